"""Rows and tables of some requests of a batch, and the small host tensors of plans."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate, chain

import torch
from torch import Tensor

from openmla.config import MLAConfig
from openmla.plan.batch import Batch
from openmla.plan.types import Rows, Tensors
from openmla.plan.upload import upload


def integers(values: Sequence[int], dtype: torch.dtype = torch.int32) -> Tensor:
    """[n] on the host, int32 or int64. Every step makes some; array() converts a list faster than
    torch.tensor(), which visits each value."""
    if not len(values):
        return torch.empty(0, dtype=dtype, device="cpu")
    return torch.frombuffer(array("i" if dtype == torch.int32 else "q", values), dtype=dtype)


def some(values: Sequence[int], requests: Sequence[int]) -> Sequence[int]:
    """The values of some requests, in the order listed."""
    if everyone(requests, len(values)):
        return values
    return [values[b] for b in requests]


def everyone(requests: Sequence[int], B: int) -> bool:
    """Whether these are all requests in order."""
    return len(requests) == B and list(requests) == list(range(B))


def _neighbours(requests: Sequence[int]) -> bool:
    first = requests[0] if len(requests) else 0
    return len(requests) > 0 and list(requests) == list(range(first, first + len(requests)))


def pick_rows(requests: Sequence[int], starts: Sequence[int]) -> Rows:
    """Token rows of some requests: a slice if they are neighbors, else indices."""
    if not requests:
        return slice(0, 0)
    if _neighbours(requests):
        return slice(starts[requests[0]], starts[requests[-1] + 1])
    spans = [range(starts[b], starts[b + 1]) for b in requests]
    return integers(list(chain.from_iterable(spans)), torch.int64)


def num_rows(rows: Rows) -> int:
    return rows.stop - rows.start if isinstance(rows, slice) else len(rows)


ALIGN = 16  # bytes; kernels are compiled for tensors aligned to this


def pick(table: Tensor, requests: Sequence[int]) -> Tensor:
    """Rows of some requests: the table itself, a view if they are neighbors, or a copy."""
    if everyone(requests, table.shape[0]):
        return table
    if _neighbours(requests):
        some = table[requests[0] : requests[-1] + 1]
        if table.device.type == "cpu" or some.data_ptr() % ALIGN == table.data_ptr() % ALIGN == 0:
            return some
    (index,) = upload((integers(requests, torch.int64),), table.device)
    return table[index]


def cumulative(lens: Sequence[int]) -> Tensor:
    return integers(list(accumulate(lens, initial=0)))


def owners(query_lens: Sequence[int]) -> Tensor:
    """[T] i64: the request of each token."""
    return repeated(range(len(query_lens)), query_lens, torch.int64)


def repeated(
    values: Sequence[int], counts: Sequence[int], dtype: torch.dtype = torch.int32
) -> Tensor:
    """[sum(counts)] on the host: each value repeated by its count."""
    each, times = integers(values, dtype), integers(counts, torch.int64)
    return each.repeat_interleave(times, output_size=sum(counts))


def start_locs(query_start_loc: Tensor, chunks: Sequence[slice], num_rows: int) -> Tensors:
    """query_start_loc of each chunk of the rows, [B+1] i32, from the chunk's first row on."""
    if len(chunks) == 1 and chunks[0].stop >= num_rows:  # all at once, as in decode
        return (query_start_loc,)
    return tuple(query_start_loc.clamp(rows.start, rows.stop) - rows.start for rows in chunks)


def rope_offsets(batch: Batch, config: MLAConfig, *, uniform: bool = False) -> Tensor | None:
    """[T] i64: what longrope adds to positions. The second half of its table has the long factors,
    for tokens of requests past the original length; padding gets 0.

    Lengths that only the device knows are compared there; `seq_lens` are upper bounds. The result
    is None if all offsets are 0, except in a `uniform` step.
    """
    if config.rope.kind != "longrope":
        return None
    original = config.rope.original_positions
    if batch.device_seq_lens is not None:
        lens = batch.device_seq_lens
        (mine,) = upload((owners(batch.query_lens),), lens.device)
        return padded((lens > original).long()[mine] * config.max_positions, batch.padding)
    offsets = [config.max_positions if original < S else 0 for S in batch.seq_lens]
    if not (any(offsets) or uniform):
        return None
    return padded(repeated(offsets, batch.query_lens, torch.int64), batch.padding)


def padded(tokens: Tensor, padding: int, value: int = 0) -> Tensor:
    """The [n] values of the requests' tokens, followed by `value` for padding tokens."""
    return torch.cat([tokens, tokens.new_full((padding,), value)]) if padding else tokens
