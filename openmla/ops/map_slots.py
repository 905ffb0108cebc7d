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
    positions: Annotated[Tensor, "[T, K] i32 row"],
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
    """Look positions up; see the module docstring for the contract.

    Args:
        positions: positions within the request. Negative: none.
        block_table: block numbers of each request's rows.
        query_start_loc: first query row of each request, then the end.
        BS: tokens per block.
        num_blocks: blocks of the cache.
        cp_size: ranks that share the cache.
        cp_rank: number of this rank.
        interleave: consecutive positions per rank.
        compact: move valid slots to the front.
        backend: "auto", or the name of a backend.

    Returns:
        Slots [T, K] int32, -1 where there is none, and the number of valid slots per row, [T]
            int32.

    Raises:
        ShapeError: an argument does not fit the contract. Values are checked on the CPU only.
        ConfigError: the backend is not known.
        UnsupportedError: no backend supports the call.

    ```python
    import torch
    from openmla.ops import map_slots

    positions = torch.tensor([[0, 5, -1]], dtype=torch.int32)
    block_table = torch.tensor([[7, 3]], dtype=torch.int32)
    starts = torch.tensor([0, 1], dtype=torch.int32)
    slots, lens = map_slots(positions, block_table, starts, BS=4, num_blocks=8)
    print(slots, lens)  # [[28, 13, -1]] and [2]
    ```
    """


def cost(num_rows: int, *, K: int) -> Cost:
    """Positions read, one table entry each, slots written."""
    return Cost(num_rows * (12 * K + 4), 0)
