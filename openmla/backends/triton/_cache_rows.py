"""Rows as a paged cache stores them: where their parts lie, how they are quantised and stored.

A row is MAIN columns, in groups where groups have scales, and ROPE more. Shared by the ops that
write rows or read them back; latent attention's own loads are in _latent_rows.py.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from openmla.backends import Problem
from openmla.backends.triton._build import TYPES, assembly, next_power_of_2
from openmla.backends.triton._primitives import (
    FP8,
    INDEX,
    PACKED,
    PLAIN,
    V4,
    encode_e4m3,
    round_to,
    store_bits,
    widen,
)
from openmla.cache.format import (
    GROUP,
    V4_GROUP,
    V4_ROPE,
    CacheFormat,
    PackedIndex,
    PackedLatent,
    PackedV4,
    get_format,
)

STORED_AS = {
    CacheFormat: PLAIN.value,
    PackedLatent: PACKED.value,
    PackedV4: V4.value,
    PackedIndex: INDEX.value,
}
INPUTS = (torch.bfloat16, torch.float16, torch.float32)
FLOAT32_BYTES = tl.constexpr(4)
BFLOAT16_BYTES = tl.constexpr(2)
E4M3_MAX = tl.constexpr(448.0)
E4M3_ROUNDED = tl.constexpr(464.0)  # the largest that rounds to it
# Floors of cache/format.py: of a group's largest value, or of its scale.
SMALLEST = tl.constexpr(1e-4)
SMALLEST_NORMAL = tl.constexpr(1.1754943508222875e-38)


class Layout(NamedTuple):
    """The parts of a stored row: what a kernel specializes on, beside the block size."""

    FORMAT: int
    MAIN: int
    ROPE: int
    GROUP: int  # values of MAIN that share a scale, all of them without scales
    SCALES: int  # bytes of scales
    EXACT: bool


class Target(NamedTuple):
    """Where rows go: a cache of pages, `page` numbers apart, of rows that are `row_stride` apart;
    scales that an fp8 cache divides by, and the counter of what they clip."""

    cache: Any
    page: Any
    row_stride: Any
    kv_scale: Any
    rope_ratio: Any
    clamped: Any


class Writing(NamedTuple):
    """Constants of a kernel that writes rows, beside their layout: APART if there is a rope_ratio,
    COUNTED if values that are clipped are; tiles of BLOCK_G groups of BLOCK_C values, and of
    BLOCK_R for the rope."""

    BS: Any
    ALIGNED: Any
    ASM: Any
    APART: Any
    COUNTED: Any
    BLOCK_G: Any
    BLOCK_C: Any
    BLOCK_R: Any


@lru_cache(maxsize=1024)
def layout_of(format: str, D: int, cut: int) -> Layout:
    """Formats without groups are cut after `cut` columns, wherever that suits the caller."""
    layout = get_format(format)
    stored_as = FP8.value if layout.scaled else STORED_AS[type(layout)]
    if isinstance(layout, PackedLatent):
        main = D // GROUP * GROUP
        return Layout(stored_as, main, D - main, GROUP, 4 * main // GROUP, layout.exact)
    if isinstance(layout, PackedV4):
        spare = layout.width(D) - layout.value_bytes(D)
        return Layout(stored_as, D - V4_ROPE, V4_ROPE, V4_GROUP, spare, False)
    if isinstance(layout, PackedIndex):
        return Layout(stored_as, D, 0, min(D, GROUP), layout.width(D) - D, layout.exact)
    return Layout(stored_as, cut, D - cut, max(cut, 1), 0, False)


def stored_type(format: str) -> str:
    """Triton's type of a pointer to a cache."""
    return "*" + TYPES.get(get_format(format).dtype, "u8")


def is_aligned(cache: Tensor, layout: Layout) -> bool:
    """Whether scales and bf16 columns inside bytes lie on multiples of 4."""
    stored_as, offsets = layout.FORMAT, [cache.data_ptr(), cache.stride(0)]
    if stored_as == PACKED.value:
        offsets.append(cache.stride(1))
    elif stored_as == INDEX.value:
        offsets.append(cache.shape[1] * layout.MAIN)
    return all(offset % 4 == 0 for offset in offsets)


def why_not_rows(problem: Problem) -> str | None:
    if problem.dtype not in INPUTS:
        return f"takes 16- and 32-bit rows, this is {problem.dtype}"
    if type(get_format(problem.format)) not in STORED_AS:
        return f"cache format {problem.format} is not implemented"
    return None


def row_constants(layout: Layout, C: int, BS: int, *, aligned: bool) -> dict[str, Any]:
    stored_as, groups = layout.FORMAT, max(layout.MAIN // layout.GROUP, 1)
    if stored_as == V4.value:
        groups = max(groups, layout.SCALES)  # padding behind the last scale is written too
    return {
        "BS": BS,
        "C": C,
        **layout._asdict(),
        "ALIGNED": aligned,
        "ASM": assembly(),
        "BLOCK_G": next_power_of_2(groups),
        "BLOCK_C": next_power_of_2(layout.GROUP),
        "BLOCK_R": next_power_of_2(max(layout.ROPE, 1)),
    }


def row_warps(constants: dict[str, Any]) -> int:
    """Eight values per thread, 16 bytes of a 16-bit row: 256 a warp."""
    return min(max(constants["BLOCK_G"] * constants["BLOCK_C"] // 256, 1), 8)


@triton.jit
def row_offsets(
    block, offset, page, row_stride, BS: tl.constexpr, FORMAT: tl.constexpr, MAIN: tl.constexpr,
    ROPE: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """Where rows' values, scales and ROPE columns begin, in elements from the start of the
    cache."""
    if FORMAT == V4 or FORMAT == INDEX:  # a block's values come first, then its scales
        VALUES: tl.constexpr = MAIN + 2 * ROPE
        values_at = block * page + offset * VALUES
        scales_at = block * page + BS * VALUES + offset * SCALES
        rope_at = values_at + MAIN
    else:
        values_at = block * page + offset * row_stride
        scales_at = values_at + MAIN
        rope_at = scales_at + SCALES
    return values_at, scales_at, rope_at


@triton.jit
def group_scales(groups, FORMAT: tl.constexpr, EXACT: tl.constexpr):
    """A float32 scale per group; a NaN, the largest value by its bits, makes its group's NaN."""
    magnitudes = groups.to(tl.uint32, bitcast=True) & 0x7FFFFFFF
    scales = tl.max(magnitudes, 1).to(tl.float32, bitcast=True)
    if FORMAT != PACKED:
        scales = tl.where(scales < SMALLEST, SMALLEST, scales)
    scales = tl.div_rn(scales, E4M3_MAX)
    if FORMAT == PACKED:
        smallest: tl.constexpr = SMALLEST_NORMAL if EXACT else SMALLEST
        scales = tl.where(scales < smallest, smallest, scales)
    if not EXACT:  # up to the next power of two; NaN stays
        bits = (scales.to(tl.uint32, bitcast=True) + 0x007FFFFF) & 0x7F800000
        scales = tl.where(scales != scales, scales, bits.to(tl.float32, bitcast=True))
    return scales


@triton.jit
def quantize_groups(groups, FORMAT: tl.constexpr, EXACT: tl.constexpr):
    """e4m3 bytes of groups [BLOCK_G, BLOCK_C] and the bits of their float32 scales."""
    scales = group_scales(groups, FORMAT, EXACT)
    if EXACT:
        stored = encode_e4m3(tl.div_rn(groups, scales[:, None]))
    else:  # the reciprocal of a power of two is exact: one division per group
        stored = encode_e4m3(groups * tl.div_rn(1.0, scales)[:, None])
    return stored, scales.to(tl.uint32, bitcast=True)


@triton.jit
def load_columns(
    kv_c, k_pe, d, mask, C: tl.constexpr, FIRST: tl.constexpr, END: tl.constexpr
):  # fmt: skip
    """Columns d of concat(kv_c, k_pe), all within FIRST .. END-1."""
    if END <= C:
        values = tl.load(kv_c + d, mask=mask, other=0.0)
    elif FIRST >= C:
        values = tl.load(k_pe + (d - C), mask=mask, other=0.0)
    else:
        low = tl.load(kv_c + d, mask=mask & (d < C), other=0.0)
        high = tl.load(k_pe + (d - C), mask=mask & (d >= C), other=0.0)
        values = tl.where(d < C, low, high)
    return values


@triton.jit
def count_clamped(clamped, values, rope, mask, mask_r):
    """Add the scaled values that e4m3 cuts off; rows that have none touch no memory."""
    beyond = tl.sum(tl.sum((mask & (tl.abs(values) > E4M3_ROUNDED)).to(tl.int32), 1), 0)
    beyond += tl.sum((mask_r & (tl.abs(rope) > E4M3_ROUNDED)).to(tl.int32), 0)
    if beyond > 0:
        tl.atomic_add(clamped, beyond.to(tl.int64), sem="relaxed")


@triton.jit
def write_row(
    target, kv_c, k_pe, slot, C: tl.constexpr, LAYOUT: tl.constexpr, WRITING: tl.constexpr
):
    """Load one row from memory, encode it and store it in its slot."""
    MAIN: tl.constexpr = LAYOUT.MAIN
    ROPE: tl.constexpr = LAYOUT.ROPE
    GROUP: tl.constexpr = LAYOUT.GROUP
    g = tl.arange(0, WRITING.BLOCK_G)
    c = tl.arange(0, WRITING.BLOCK_C)
    d = (g * GROUP)[:, None] + c[None, :]  # [BLOCK_G, BLOCK_C]
    mask = (g < MAIN // GROUP)[:, None] & (c < GROUP)[None, :]
    r = tl.arange(0, WRITING.BLOCK_R)
    values = load_columns(kv_c, k_pe, d, mask, C, 0, MAIN)
    rope = load_columns(kv_c, k_pe, MAIN + r, r < ROPE, C, MAIN, MAIN + ROPE)
    write_values(target, values, rope, slot, LAYOUT, WRITING)


@triton.jit
def write_values(target, values, rope, slot, LAYOUT: tl.constexpr, WRITING: tl.constexpr):
    """The same for a row in registers: values [BLOCK_G, BLOCK_C], zeros past a group's GROUP
    columns, and rope [BLOCK_R]."""
    cache = target.cache
    FORMAT: tl.constexpr = LAYOUT.FORMAT
    MAIN: tl.constexpr = LAYOUT.MAIN
    ROPE: tl.constexpr = LAYOUT.ROPE
    GROUP: tl.constexpr = LAYOUT.GROUP
    SCALES: tl.constexpr = LAYOUT.SCALES
    EXACT: tl.constexpr = LAYOUT.EXACT
    BS: tl.constexpr = WRITING.BS
    ALIGNED: tl.constexpr = WRITING.ALIGNED
    ASM: tl.constexpr = WRITING.ASM
    values_at, scales_at, rope_at = row_offsets(
        slot // BS, slot % BS, target.page, target.row_stride, BS, FORMAT, MAIN, ROPE, SCALES
    )
    g = tl.arange(0, WRITING.BLOCK_G)
    c = tl.arange(0, WRITING.BLOCK_C)
    d = (g * GROUP)[:, None] + c[None, :]
    mask = (g < MAIN // GROUP)[:, None] & (c < GROUP)[None, :]
    r = tl.arange(0, WRITING.BLOCK_R)
    mask_r = r < ROPE
    if FORMAT == PLAIN:
        stored = round_to(values, cache.dtype.element_ty, ASM)
        rope = round_to(rope, cache.dtype.element_ty, ASM)
    elif FORMAT == FP8:
        scale = tl.load(target.kv_scale)
        values = tl.div_rn(widen(values), scale)
        if WRITING.APART:  # a power of two: the product is exact
            scale *= tl.load(target.rope_ratio)
        rope = tl.div_rn(widen(rope), scale)
        if WRITING.COUNTED:
            count_clamped(target.clamped, values, rope, mask, mask_r)
        stored = encode_e4m3(values)
        rope = encode_e4m3(rope)
    else:
        if FORMAT == V4:
            values = round_to(values, tl.bfloat16, ASM)
        stored, scale_bits = quantize_groups(widen(values), FORMAT, EXACT)
        if FORMAT == V4:
            exponents = tl.where(g < MAIN // GROUP, scale_bits >> 23, 0).to(tl.uint8)
            tl.store(cache + scales_at + g, exponents, mask=g < SCALES)
        else:
            store_bits(cache + scales_at, scale_bits, g < MAIN // GROUP, FLOAT32_BYTES, ALIGNED)
    tl.store(cache + values_at + d, stored, mask=mask)
    if ROPE > 0:
        if FORMAT == PLAIN or FORMAT == FP8:
            tl.store(cache + rope_at + r, rope, mask=mask_r)
        else:
            halves = round_to(rope, tl.bfloat16, ASM).to(tl.uint16, bitcast=True)
            store_bits(cache + rope_at, halves, mask_r, BFLOAT16_BYTES, ALIGNED)
