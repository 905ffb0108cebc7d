"""map_slots: map positions within a request to physical slots of a paged cache.

    owner = (p // interleave) % cp_size
    l     = (p // (cp_size * interleave)) * interleave + p % interleave
    slot  = block_table[b, l // BS] * BS + l % BS

-1 where p is negative, where l is past the table's columns, where the table names no block of the
cache (0 .. num_blocks-1), where another rank owns p (owner != cp_rank), and in rows past
query_start_loc[B]. slot_lens counts the others. With `compact` they are moved to the front, in
order; without, every entry keeps its column. Positions may repeat.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from openmla.backends import Problem, problem_on
from openmla.errors import ShapeError
from openmla.ops._register import Cost, Decided, bind, decided, register
from openmla.ops._values import check_start_loc

_SPEC = "positions:T K i32 row, block_table:B M i32, query_start_loc:B+1 i32"


def _check(tensors: tuple[Tensor, ...], **scalars: int) -> dict[str, int]:
    block_table = tensors[1]
    B1 = block_table.shape[0] + 1 if block_table.dim() else 0
    dims = bind("map_slots", _SPEC, tensors, {"B+1": B1})
    for name in ("BS", "cp_size", "interleave"):
        if scalars[name] < 1:
            raise ShapeError(f"map_slots: {name} must be positive, got {scalars[name]}.")
    if not 0 <= scalars["cp_rank"] < scalars["cp_size"]:
        raise ShapeError(
            f"map_slots: cp_rank must be within 0..{scalars['cp_size'] - 1}, "
            f"got {scalars['cp_rank']}."
        )
    if scalars["num_blocks"] * scalars["BS"] > 2**31 - 1:
        raise ShapeError(
            f"map_slots: slots must fit int32, got {scalars['num_blocks']} blocks of "
            f"{scalars['BS']}."
        )
    return dims


def problem(device: torch.device) -> Problem:
    """A call, as backends are asked about it."""
    return problem_on(device, "map_slots")


def _decide(*tensors: Tensor, compact: bool, backend: str, **scalars: int) -> Decided:
    return decided(_check(tensors, **scalars), problem(tensors[0].device), backend)


def _run(known: Decided, *tensors: Tensor, **scalars: Any) -> tuple[Tensor, Tensor]:
    positions, _, query_start_loc = tensors
    if positions.device.type == "cpu":
        T = known.dims["T"]
        check_start_loc("map_slots", "query_start_loc", query_start_loc, T, "positions")
    found: tuple[Tensor, Tensor] = known.runner.run(*tensors, **scalars)
    return found


def _fake(*tensors: Tensor, compact: bool, backend: str, **scalars: int) -> tuple[Tensor, Tensor]:
    dims = _check(tensors, **scalars)
    return torch.empty_like(tensors[0]), tensors[0].new_empty((dims["T"],))


_OP = register(
    "map_slots(Tensor positions, Tensor block_table, Tensor query_start_loc, *, int BS,"
    " int num_blocks, int cp_size, int cp_rank, int interleave, bool compact, str backend)"
    " -> (Tensor, Tensor)",
    _decide,
    _run,
    _fake,
)


def map_slots(
    positions: Tensor,  # [T, K] i32, within the request; negative: none
    block_table: Tensor,  # [B, M] i32
    query_start_loc: Tensor,  # [B+1] i32
    *,
    BS: int,
    num_blocks: int,
    cp_size: int = 1,
    cp_rank: int = 0,
    interleave: int = 1,
    compact: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:  # slots [T, K] i32, slot_lens [T] i32
    """Look positions up; see the module's text for the contract."""
    slots, lens = _OP(
        positions,
        block_table,
        query_start_loc,
        BS=BS,
        num_blocks=num_blocks,
        cp_size=cp_size,
        cp_rank=cp_rank,
        interleave=interleave,
        compact=compact,
        backend=backend,
    )
    return slots, lens


def cost(num_rows: int, *, K: int) -> Cost:
    """Positions read, one table entry each, slots written."""
    return Cost(num_rows * (12 * K + 4), 0)
