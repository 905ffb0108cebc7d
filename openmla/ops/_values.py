"""Checks of index values; an op calls them only where looking is free, on CPU tensors.

Device tensors are never read back. A step on a GPU has its values checked once, on the host,
when the batch is made.
"""

from __future__ import annotations

import torch
from torch import Tensor

from openmla.errors import ShapeError


def check_start_loc(op: str, name: str, start_loc: Tensor, total: int, rows: str) -> None:
    """Cumulative lengths [B+1]: from 0, never falling, within the rows there are."""
    if start_loc.numel() == 0 or start_loc[0] != 0:
        raise ShapeError(f"{op}: {name} must start with 0, got {_head(start_loc)}.")
    if (start_loc[1:] < start_loc[:-1]).any():  # a difference of int32 may wrap around
        raise ShapeError(f"{op}: {name} must not fall, got {_head(start_loc)}.")
    if start_loc[-1] > total:
        raise ShapeError(
            f"{op}: {name} must end within the {total} rows of {rows}, got {int(start_loc[-1])}."
        )


def check_slots(op: str, slots: Tensor, num_slots: int, name: str = "slot_mapping") -> None:
    """Slots to write: inside the cache, each at most once; negative ones are skipped."""
    if slots.numel() == 0:
        return
    ordered = slots.sort().values
    if ordered[-1] >= num_slots:
        most = f"N*BS={num_slots}" if name == "slot_mapping" else num_slots
        raise ShapeError(f"{op}: {name} must be below {most}, got {int(ordered[-1])}.")
    repeated = ordered.diff() == 0
    if repeated.any():
        slots_twice = ordered[1:][repeated & (ordered[1:] >= 0)]
        if slots_twice.numel():
            slot = int(slots_twice[0])
            raise ShapeError(f"{op}: {name} must name each slot once, got {slot} twice.")


def check_block_table(
    op: str, block_table: Tensor, starts: Tensor | None, ends: Tensor, N: int, BS: int
) -> None:
    """Blocks that hold keys starts[b]..ends[b]-1 exist; columns outside may hold anything."""
    if block_table.shape[0] == 0:
        return
    M = block_table.shape[1]
    last = (ends - 1) // BS + 1  # one past the last column in use; a sum might wrap around
    if last.max() > M:
        request = int(last.argmax())
        raise ShapeError(
            f"{op}: block_table must have a column for every {BS} keys, got M={M} columns for "
            f"{int(ends[request])} keys of request {request}."
        )
    columns = torch.arange(M, dtype=torch.int32)
    used = columns < last[:, None]
    if starts is not None:
        used &= (columns >= (starts // BS)[:, None]) & (ends > starts)[:, None]
    low, high = block_table.where(used, 0).aminmax() if M else (0, 0)
    if low < 0 or high >= N:
        wrong = used & ((block_table < 0) | (block_table >= N))
        row, column = (int(index) for index in wrong.nonzero()[0])
        raise ShapeError(
            f"{op}: block_table[{row}, {column}] must be a block of the cache (0..{N - 1}), "
            f"got {int(block_table[row, column])}."
        )


def _head(values: Tensor) -> str:
    shown = ", ".join(str(int(value)) for value in values[:8])
    return f"[{shown}{', ...' if values.numel() > 8 else ''}]"


def check_row_lens(op: str, row_lens: Tensor, most: int) -> None:
    """How many keys each token sees: none at least, `most` at most."""
    if row_lens.numel() == 0:
        return
    low, high = (int(value) for value in row_lens.aminmax())
    if low < 0 or high > most:
        raise ShapeError(f"{op}: row_lens must be within 0..num_keys={most}, got {low}..{high}.")
