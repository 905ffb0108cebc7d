"""map_slots, reference: the formula, and a stable sort where entries are moved to the front."""

from __future__ import annotations

from torch import Tensor

from openmla.backends import Problem
from openmla.backends.reference._rows import look_up, row_requests


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
    requests = row_requests(query_start_loc, positions.shape[0])
    p = positions.long()
    owned = (p >= 0) & (p // interleave % cp_size == cp_rank)
    local = p // (cp_size * interleave) * interleave + p % interleave
    slots = look_up(local.where(owned, -1), block_table, requests, BS, num_blocks).int()
    lens = (slots >= 0).sum(1).int()
    if compact:
        slots = slots.gather(1, (slots < 0).int().argsort(dim=1, stable=True))
    return slots, lens
