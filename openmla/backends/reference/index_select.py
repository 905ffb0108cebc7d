"""index_select, reference: index_logits, then index_topk, a few rows at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from openmla.backends import Problem
from openmla.backends.reference import index_logits, index_topk

SCORES = 2**22  # logits held at once


def why_not(problem: Problem) -> str | None:
    return None


def run(
    q_idx: Tensor,
    w_idx: Tensor,
    cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    row_lens: Tensor,
    *,
    format: str,
    num_keys: int,
    K: int,
    sorted: bool,
) -> tuple[Tensor, Tensor]:
    T = q_idx.shape[0]
    positions = torch.full((T, K), -1, dtype=torch.int32, device=q_idx.device)
    step = max(SCORES // max(num_keys, 1), 1)
    for i in range(0, T, step):
        chunk = slice(i, min(i + step, T))
        bounds = query_start_loc.clamp(chunk.start, chunk.stop) - chunk.start
        logits = index_logits.run(
            q_idx[chunk],
            w_idx[chunk],
            cache,
            block_table,
            bounds,
            row_lens[chunk],
            format=format,
            num_keys=num_keys,
        )
        starts = torch.zeros_like(row_lens[chunk])
        found = index_topk.run(logits, starts, row_lens[chunk], K=K, sorted=sorted)
        positions[chunk] = found[0]
    return positions, row_lens.clamp(max=K)
