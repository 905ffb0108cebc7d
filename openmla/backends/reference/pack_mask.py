"""pack_mask, reference: one byte per key, then 32 of them per word, a few rows at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from openmla.backends import Problem

KEYS = 2**20  # keys held as bytes at once


def why_not(problem: Problem) -> str | None:
    return None


def run(topk_positions: Tensor, key_starts: Tensor, key_lens: Tensor, *, num_words: int) -> Tensor:
    T = topk_positions.shape[0]
    device = topk_positions.device
    mask = torch.zeros((T, num_words), dtype=torch.int32, device=device)
    places = torch.arange(32, dtype=torch.int64, device=device)
    step = max(KEYS // max(32 * num_words, 1), 1)
    for i in range(0, T, step):
        chunk = slice(i, min(i + step, T))
        keys = topk_positions[chunk].long() - key_starts[chunk, None]
        inside = (keys >= 0) & (keys < key_lens[chunk, None].clamp(max=32 * num_words))
        inside &= topk_positions[chunk] >= 0
        chosen = torch.zeros((chunk.stop - i, 32 * num_words + 1), dtype=torch.bool, device=device)
        chosen.scatter_(1, keys.where(inside, 32 * num_words), True)
        words = chosen[:, :-1].unflatten(1, (num_words, 32)).long() << places
        mask[chunk] = words.sum(-1).to(torch.int32)
    return mask
