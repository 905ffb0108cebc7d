"""index_topk, reference: all scores above the K-th, then ties with it from the left."""

from __future__ import annotations

import torch
from torch import Tensor

from openmla.backends import Problem

SCORES = 2**21  # compared at once


def why_not(problem: Problem) -> str | None:
    return None


def run(
    logits: Tensor, row_starts: Tensor, row_lens: Tensor, *, K: int, sorted: bool
) -> tuple[Tensor, Tensor]:
    T, S = logits.shape
    positions = torch.full((T, K), -1, dtype=torch.int32, device=logits.device)
    step = max(SCORES // max(S, 1), 1)
    for i in range(0, T, step):
        chunk = slice(i, i + step)
        choose(positions[chunk], logits[chunk], row_starts[chunk, None], row_lens[chunk, None])
    return positions, row_lens.clamp(max=K)


def choose(positions: Tensor, logits: Tensor, starts: Tensor, lens: Tensor) -> None:
    """Fill positions [n, K], ascending in every row."""
    K, S = positions.shape[1], logits.shape[1]
    columns = torch.arange(S, dtype=torch.int32, device=logits.device)
    inside = (columns >= starts) & (columns < starts + lens)
    kept = inside & (lens <= K)  # short rows whole, whatever their scores
    if S > K:
        scores = logits.masked_fill(~inside | logits.isnan(), -torch.inf)
        cut = scores.topk(K, dim=1).values[:, -1:]
        above, equal = scores > cut, (scores == cut) & inside
        ties = K - above.sum(1, keepdim=True)
        chosen = above | (equal & (equal.cumsum(1, dtype=torch.int32) <= ties))
        kept |= chosen & (lens > K)
    rows, found = kept.nonzero(as_tuple=True)
    order = kept.cumsum(1, dtype=torch.int32)[rows, found].long() - 1
    positions[rows, order] = (found - starts[rows, 0]).int()
