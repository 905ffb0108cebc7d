"""Rows and tables of some of a batch's requests, and small host tensors plans are made of."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from openmla.config import MLAConfig
from openmla.plan.batch import Batch
from openmla.plan.types import Rows, Tensors


def pick_rows(requests: Sequence[int], starts: Sequence[int]) -> Rows:
    """Token rows of some requests: everything, one slice if they are neighbours, or indices."""
    if not requests:
        return slice(0, 0)
    if list(requests) == list(range(requests[0], requests[0] + len(requests))):
        return slice(starts[requests[0]], starts[requests[-1] + 1])
    return torch.cat([torch.arange(starts[b], starts[b + 1]) for b in requests])


def num_rows(rows: Rows) -> int:
    return rows.stop - rows.start if isinstance(rows, slice) else len(rows)


def pick(table: Tensor, requests: Sequence[int]) -> Tensor:
    if list(requests) == list(range(table.shape[0])):
        return table
    return table[torch.tensor(requests, dtype=torch.int64, device=table.device)]


def cumulative(lens: Sequence[int]) -> Tensor:
    if len(lens) and min(lens) == max(lens) == 1:  # plain decode, at every step: kept cheap
        return torch.arange(len(lens) + 1, dtype=torch.int32)
    return torch.tensor(list(accumulate(lens, initial=0)), dtype=torch.int32)


def owners(query_lens: Sequence[int]) -> Tensor:
    """[T] i64: the request of each token."""
    counts = torch.tensor(query_lens, dtype=torch.int64)
    return torch.arange(len(query_lens)).repeat_interleave(counts)


def start_locs(query_start_loc: Tensor, chunks: Sequence[slice], num_rows: int) -> Tensors:
    """query_start_loc of each chunk of the rows, [B+1] i32, from the chunk's first row on."""
    if len(chunks) == 1 and chunks[0].stop >= num_rows:  # all at once, as when decoding
        return (query_start_loc,)
    return tuple(query_start_loc.clamp(rows.start, rows.stop) - rows.start for rows in chunks)


def rope_offsets(batch: Batch, config: MLAConfig, *, uniform: bool = False) -> Tensor | None:
    """[T] i64, what longrope adds to positions: its table's second half has the long factors, for
    tokens of requests past the original length; 0 for padding.

    Lengths that only the device knows are compared there; `seq_lens` are their upper bounds. None
    where all would be 0, except in a `uniform` step.
    """
    if config.rope.kind != "longrope":
        return None
    original = config.rope.original_positions
    if batch.device_seq_lens is not None:
        lens = batch.device_seq_lens
        mine = owners(batch.query_lens).to(lens.device)
        return padded((lens > original).long()[mine] * config.max_positions, batch.padding)
    offsets = [config.max_positions if original < S else 0 for S in batch.seq_lens]
    if not (any(offsets) or uniform):
        return None
    each = torch.tensor(offsets, dtype=torch.int64)[owners(batch.query_lens)]
    return padded(each, batch.padding)


def padded(tokens: Tensor, padding: int, value: int = 0) -> Tensor:
    """[n] of the requests' tokens, and `value` for tokens of no request behind them."""
    return torch.cat([tokens, tokens.new_full((padding,), value)]) if padding else tokens
