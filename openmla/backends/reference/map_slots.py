"""map_slots, reference: the formula, and a stable sort to move entries to the front."""

from __future__ import annotations

import torch
from torch import Tensor

from openmla.backends import Problem
from openmla.backends.reference._rows import look_up, row_requests

ENTRIES = 2**20  # entries looked up at once


def why_not(problem: Problem) -> str | None:
    return None


def run(
    positions: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    *,
    BS: int,
    num_blocks: int,
    cp_size: int,
    cp_rank: int,
    interleave: int,
    compact: bool,
) -> tuple[Tensor, Tensor]:
    T, K = positions.shape
    requests = row_requests(query_start_loc, T)
    slots = torch.empty_like(positions)
    step = max(ENTRIES // max(K, 1), 1)
    for i in range(0, T, step):
        chunk = slice(i, i + step)
        p = positions[chunk].long()
        owned = (p >= 0) & (p // interleave % cp_size == cp_rank)
        local = p // (cp_size * interleave) * interleave + p % interleave
        found = look_up(local.where(owned, -1), block_table, requests[chunk], BS, num_blocks)
        if compact:
            found = found.gather(1, (found < 0).int().argsort(dim=1, stable=True))
        slots[chunk] = found.int()
    return slots, (slots >= 0).sum(1).int()
