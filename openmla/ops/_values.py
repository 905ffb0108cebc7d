"""Checks of index values; ops run them only on CPU tensors, where reading is free.

Device tensors are never read back. The values of a step on a GPU are checked once, on the host,
when the batch is built.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from operator import gt

import torch
from torch import Tensor

from openmla.errors import ShapeError


def check_start_loc(op: str, name: str, start_loc: Tensor, total: int, rows: str) -> list[int]:
    """Check and return cumulative lengths [B+1]: from 0, never decreasing, at most `total`."""
    values: list[int] = start_loc.tolist()
    if not values or values[0] != 0:
        raise ShapeError(f"{op}: {name} must start with 0, got {_head(values)}.")
    if any(map(gt, values, values[1:])):
        raise ShapeError(f"{op}: {name} must not fall, got {_head(values)}.")
    if values[-1] > total:
        raise ShapeError(
            f"{op}: {name} must end within the {total} rows of {rows}, got {values[-1]}."
        )
    return values


def check_query_lens(
    op: str, starts: list[int], seq_lens: Tensor, max_query_len: int, causal: bool
) -> None:
    """Check that no request exceeds max_query_len or, if causal, its number of keys."""
    query_lens = [end - start for start, end in pairwise(starts)]
    for request, (n, S) in enumerate(zip(query_lens, seq_lens.tolist(), strict=True)):
        least = n if causal else 0
        if least > S:
            raise ShapeError(
                f"{op}: seq_lens[{request}] must be at least its {least} query tokens, got {S}."
            )
    most = max(query_lens, default=max_query_len)
    if most > max_query_len:
        raise ShapeError(f"{op}: max_query_len must be at least {most}, got {max_query_len}.")


def check_slots(
    op: str, slots: Tensor | list[int], num_slots: int, name: str = "slot_mapping"
) -> None:
    """Check slots to write: inside the cache, each at most once; negative ones are skipped."""
    values: list[int] = slots if isinstance(slots, list) else slots.tolist()
    largest = max(values, default=-1)
    if largest >= num_slots:
        most = f"N*BS={num_slots}" if name == "slot_mapping" else num_slots
        raise ShapeError(f"{op}: {name} must be below {most}, got {largest}.")
    if len(set(values)) == len(values):
        return
    written = [slot for slot in values if slot >= 0]
    if len(set(written)) < len(written):
        slot = min(slot for slot, count in Counter(written).items() if count > 1)
        raise ShapeError(f"{op}: {name} must name each slot once, got {slot} twice.")


def check_block_table(
    op: str,
    block_table: Tensor,
    starts: Tensor | None,
    ends: Tensor | Sequence[int],
    N: int,
    BS: int,
) -> None:
    """Check that the blocks of keys starts[b]..ends[b]-1 exist; other columns may hold anything."""
    if block_table.shape[0] == 0:
        return
    M, lengths = block_table.shape[1], ends.tolist() if isinstance(ends, Tensor) else ends
    most = -(-max(lengths) // BS)  # columns in use
    if most > M:
        request, S = next((b, S) for b, S in enumerate(lengths) if S > M * BS)
        raise ShapeError(
            f"{op}: block_table must have a column for every {BS} keys, got M={M} columns for "
            f"{S} keys of request {request}."
        )
    if most <= 0:
        return
    table = block_table if most == M else block_table[:, :most]
    if within(table, N):
        return
    columns = torch.arange(most, dtype=torch.int32, device="cpu")
    # array converts a list at once; torch.tensor() converts each value separately
    counts = torch.frombuffer(array("i", [-(-S // BS) for S in lengths]), dtype=torch.int32)
    used = columns < counts[:, None]
    if starts is not None:
        some = torch.tensor(lengths) > starts
        used &= (columns >= (starts // BS)[:, None]) & some[:, None]
    table = table * used  # unused columns become 0, a valid block
    if not within(table, N):
        row, column = ((table < 0) | (table >= N)).nonzero()[0].tolist()
        raise ShapeError(
            f"{op}: block_table[{row}, {column}] must be a block of the cache (0..{N - 1}), "
            f"got {int(block_table[row, column])}."
        )


def within(blocks: Tensor, N: int) -> bool:
    """Whether all of one or more block numbers are blocks of the cache."""
    low, high = blocks.aminmax()
    return int(low) >= 0 and int(high) < N


def _head(values: list[int]) -> str:
    shown = ", ".join(str(value) for value in values[:8])
    return f"[{shown}{', ...' if len(values) > 8 else ''}]"


def check_row_lens(op: str, row_lens: Tensor, most: int) -> None:
    """Check that each token sees between 0 and `most` keys."""
    if row_lens.numel() == 0:
        return
    low, high = (int(value) for value in row_lens.aminmax())
    if low < 0 or high > most:
        raise ShapeError(f"{op}: row_lens must be within 0..num_keys={most}, got {low}..{high}.")


def check_positions(op: str, positions: Tensor, Q: int | None = None) -> None:
    """Check that positions are rows of a RoPE table [Q, R], if there is one."""
    if Q is None or not positions.numel():
        return
    low, high = (int(value) for value in positions.aminmax())
    if low < 0 or high >= Q:
        raise ShapeError(
            f"{op}: positions must be within the table's 0..{Q - 1}, got {low}..{high}."
        )


def check_positive(op: str, name: str, scales: Tensor) -> None:
    """Check that dequantization scales are finite and above 0."""
    wrong = ~(scales.isfinite() & (scales > 0))
    if bool(wrong.any()):
        got = scales[wrong].flatten()[0].item()
        raise ShapeError(f"{op}: {name} must be finite and above 0, got {got}.")
