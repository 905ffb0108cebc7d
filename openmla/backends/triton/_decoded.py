"""Rows that many tokens attend to, decoded once: the kernel then reads a 16-bit copy of them.

Decoding costs a token that attends to a row about as much as the attention itself. A prompt's
tokens name the same rows over and over: those of its block table, each decoded by one gather. What
packed rows hold fits bf16 exactly, so this changes which kernel runs, not what it is given. Chosen
rows are then named by their place in the copy: one load each less.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from openmla.backends.segments import Segment
from openmla.backends.triton import cache_gather, map_slots
from openmla.backends.triton._launch import inner_contiguous

PACKED = ("fp8_ds_mla", "fp8_dsv4")
USES = 8  # of a row, on average, from which decoding it once pays
MOST = 256 << 20  # bytes of the copy


def decoded(
    q: Tensor, query_start_loc: Tensor, parts: Sequence[Segment], run_length: int
) -> list[Segment]:
    """The same segments, their packed rows decoded where that pays. With fixed runs they never are:
    a token's bits may not depend on how many others there are."""
    packed = list(filter(_is_packed, parts))
    sizes = [_rows_of(part) for part in packed]
    uses = sum(q.shape[0] * _width(part) for part in packed)
    small = 2 * q.shape[2] * sum(sizes) <= MOST
    if run_length or q.dtype != torch.bfloat16 or not small or not 0 < USES * sum(sizes) <= uses:
        return list(parts)
    return [_decode(q, query_start_loc, part) if _is_packed(part) else part for part in parts]


def _is_packed(part: Segment) -> bool:
    return part.format in PACKED and part.block_table is not None


def _rows_of(part: Segment) -> int:
    assert part.block_table is not None
    return part.block_table.numel() * part.cache.shape[1]


def _width(part: Segment) -> int:
    """Rows a token attends to, at most; of a prefix that grows with the tokens, half of it."""
    assert part.block_table is not None
    if part.rows is not None:
        return part.rows.shape[1]
    everything = part.block_table.shape[1] * part.cache.shape[1]
    return min(part.span, everything) if part.kind == "window" else everything // 2


def _decode(q: Tensor, query_start_loc: Tensor, part: Segment) -> Segment:
    assert part.block_table is not None
    (B, M), (N, BS, _), D = part.block_table.shape, part.cache.shape, q.shape[2]
    i32: Any = {"dtype": torch.int32, "device": q.device}
    rows = q.new_empty((B * M * BS, D))
    cache_gather.run(
        rows,
        part.cache,
        part.kv_scale,
        part.block_table,
        torch.zeros(B, **i32),
        torch.arange(0, B * M * BS + 1, M * BS, **i32) if rows.numel() else torch.zeros(1, **i32),
        format=part.format,
    )
    there = (part.block_table >= 0) & (part.block_table < N)
    table = torch.arange(B * M, **i32).view(B, M).where(there, -1)
    part = part._replace(cache=rows.view(B * M, BS, D), format="bf16", block_table=table)
    if part.rows is None:
        return part
    slots, _ = map_slots.run(
        inner_contiguous(part.rows), table, query_start_loc, BS=BS, num_blocks=B * M, cp_size=1,
        cp_rank=0, interleave=1, compact=False,
    )  # fmt: skip
    return part._replace(kind="slots", rows=slots, block_table=None)
