"""Packed rows that many tokens attend to, decoded once into a bf16 copy.

Decoding a row costs a token about as much as attending to it, and the tokens of a prompt attend to
the same rows over and over: those of its block table, which one gather decodes. bf16 holds packed
rows exactly, so this changes which kernel runs, not its inputs. Chosen rows are renamed to slots of
the copy, which saves a load each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from openmla.backends.segments import Segment
from openmla.backends.triton import cache_gather, map_slots
from openmla.backends.triton._launch import inner_contiguous, out_dtype

PACKED = ("fp8_ds_mla", "fp8_dsv4")
MIN_USES = 8  # tokens per row, on average, from which decoding once is faster
MAX_BYTES = 256 << 20  # of the copy


def decoded(
    q: Tensor, query_start_loc: Tensor, parts: Sequence[Segment], run_length: int
) -> list[Segment]:
    """The segments, packed rows decoded where that is faster. Never with fixed runs: a token's bits
    must not depend on how many other tokens there are."""
    packed = list(filter(_is_packed, parts))
    sizes = [_rows_of(part) for part in packed]
    uses = sum(q.shape[0] * _width(part) for part in packed)
    fits = 2 * q.shape[2] * sum(sizes) <= MAX_BYTES
    bf16 = out_dtype(q) == torch.bfloat16  # which e4m3 queries are widened to
    if run_length or not bf16 or not fits or not 0 < MIN_USES * sum(sizes) <= uses:
        return list(parts)
    return [_decode(q, query_start_loc, part) if _is_packed(part) else part for part in parts]


def _is_packed(part: Segment) -> bool:
    return part.format in PACKED and part.block_table is not None


def _rows_of(part: Segment) -> int:
    assert part.block_table is not None
    return part.block_table.numel() * part.cache.shape[1]


def _width(part: Segment) -> int:
    """The most rows a token attends to; of a prefix, which grows with the tokens, half."""
    assert part.block_table is not None
    if part.rows is not None:
        return part.rows.shape[1]
    capacity = part.block_table.shape[1] * part.cache.shape[1]
    return min(part.span, capacity) if part.kind == "window" else capacity // 2


def _decode(q: Tensor, query_start_loc: Tensor, part: Segment) -> Segment:
    assert part.block_table is not None
    (B, M), (N, BS, _), D = part.block_table.shape, part.cache.shape, q.shape[2]
    i32: Any = {"dtype": torch.int32, "device": q.device}
    rows = q.new_empty((B * M * BS, D), dtype=torch.bfloat16)
    cache_gather.run(
        rows,
        part.cache,
        part.kv_scale,
        part.block_table,
        torch.zeros(B, **i32),
        torch.arange(0, B * M * BS + 1, M * BS, **i32) if rows.numel() else torch.zeros(1, **i32),
        format=part.format,
    )
    valid = (part.block_table >= 0) & (part.block_table < N)
    table = torch.arange(B * M, **i32).view(B, M).where(valid, -1)
    part = part._replace(cache=rows.view(B * M, BS, D), format="bf16", block_table=table)
    if part.rows is None:
        return part
    slots, _ = map_slots.run(
        inner_contiguous(part.rows), table, query_start_loc, BS=BS, num_blocks=B * M, cp_size=1,
        cp_rank=0, interleave=1, compact=False,
    )  # fmt: skip
    return part._replace(kind="slots", rows=slots, block_table=None)
