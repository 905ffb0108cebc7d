"""map_slots: map positions within a request to physical slots of a paged cache.

    owner = (p // interleave) % cp_size
    l     = (p // (cp_size * interleave)) * interleave + p % interleave
    slot  = block_table[b, l // BS] * BS + l % BS

A slot is -1 where p is negative, where l is past the table's columns, where the table entry is not
a block of the cache (0 .. num_blocks-1), where another rank owns p (owner != cp_rank), and in rows
past query_start_loc[B]. slot_lens counts the others. With `compact` they are moved to the front, in
order; without it, every entry keeps its column. Positions may repeat.
"""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from openmla.backends import Problem, problem_on
from openmla.errors import ShapeError
from openmla.ops._declare import op
from openmla.ops._register import Cost
from openmla.ops._values import check_start_loc


def check(op: str, BS: int, num_blocks: int, cp_size: int, cp_rank: int, interleave: int) -> None:
    for name, value in (("BS", BS), ("cp_size", cp_size), ("interleave", interleave)):
        if value < 1:
            raise ShapeError(f"{op}: {name} must be positive, got {value}.")
    if not 0 <= cp_rank < cp_size:
        raise ShapeError(f"{op}: cp_rank must be within 0..{cp_size - 1}, got {cp_rank}.")
    if num_blocks * BS > 2**31 - 1:
        raise ShapeError(f"{op}: slots must fit int32, got {num_blocks} blocks of {BS}.")


def check_values(op: str, query_start_loc: Tensor, T: int) -> None:
    check_start_loc(op, "query_start_loc", query_start_loc, T, "positions")


def fake(positions: Tensor, T: int) -> tuple[Tensor, Tensor]:
    return torch.empty_like(positions), positions.new_empty((T,))


def problem(device: torch.device) -> Problem:
    """Describe a call to the backends."""
    return problem_on(device, "map_slots")


@op(problem=problem, check=check, check_values=check_values, fake=fake)
def map_slots(
    positions: Annotated[Tensor, "[T, K] i32 row"],  # within the request; negative: none
    block_table: Annotated[Tensor, "[B, M] i32"],
    query_start_loc: Annotated[Tensor, "[B+1] i32"],
    *,
    BS: int,
    num_blocks: int,
    cp_size: int = 1,
    cp_rank: int = 0,
    interleave: int = 1,
    compact: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:  # slots [T, K] i32, slot_lens [T] i32
    """Look positions up; see the module docstring for the contract."""


def cost(num_rows: int, *, K: int) -> Cost:
    """Positions read, one table entry each, slots written."""
    return Cost(num_rows * (12 * K + 4), 0)
