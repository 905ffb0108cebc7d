"""cache_write, Triton: rows quantised as the cache's format says and put into their slots.

Computes  cache[slot // BS, slot % BS] = encode(concat(kv_c[i], k_pe[i])) for the i with a slot,
          byte for byte what cache/format.py makes of them (specification: ops/cache_write.py)
Grid      (T',): one program owns one row.
Reads     kv_c [T, C], k_pe [T, R], slot_mapping [T'], kv_scale []
Writes    cache [N, BS, W]
Limits    see why_not()

A row is MAIN columns, cut into groups where groups have scales, and ROPE more. Rounding is done on
the bits: SM80 knows no e4m3, and the interpreter cuts float32 short where it should round.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from openmla.backends import Problem
from openmla.backends.triton._build import (
    DO_NOT_SPECIALIZE_ON_ALIGNMENT,
    TARGETS,
    TYPES,
    Build,
    assembly,
    next_power_of_2,
)
from openmla.backends.triton._latent import FP8, PACKED, PLAIN, V4
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

INDEX = tl.constexpr(4)
KINDS = {
    CacheFormat: PLAIN.value,
    PackedLatent: PACKED.value,
    PackedV4: V4.value,
    PackedIndex: INDEX.value,
}
INPUTS = (torch.bfloat16, torch.float16, torch.float32)

LAUNCHES = 1
FP_FUSION = False  # a row's bytes do not depend on what else was compiled


class Layout(NamedTuple):
    """The parts of a stored row; what a kernel is compiled for, beside BS."""

    KIND: int
    MAIN: int
    ROPE: int
    GROUP: int  # values of MAIN that share a scale, all of them where there is none
    SCALES: int  # bytes of scales
    EXACT: bool


def layout_of(format: str, D: int, cut: int) -> Layout:
    """Formats without groups are cut wherever it suits the caller."""
    layout = get_format(format)
    kind = FP8.value if layout.scaled else KINDS[type(layout)]
    if isinstance(layout, PackedLatent):
        main = D // GROUP * GROUP
        return Layout(kind, main, D - main, GROUP, 4 * main // GROUP, layout.exact)
    if isinstance(layout, PackedV4):
        spare = layout.width(D) - layout.value_bytes(D)
        return Layout(kind, D - V4_ROPE, V4_ROPE, V4_GROUP, spare, False)
    if isinstance(layout, PackedIndex):
        return Layout(kind, D, 0, min(D, GROUP), layout.width(D) - D, layout.exact)
    return Layout(kind, cut, D - cut, max(cut, 1), 0, False)


@triton.jit
def widen(values):
    """As float32; bf16 by its bits, as the interpreter loses small ones."""
    if values.dtype == tl.bfloat16:
        bits = values.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
        wide = bits.to(tl.float32, bitcast=True)
    else:
        wide = values.to(tl.float32)
    return wide


@triton.jit
def round_to(values, dtype: tl.constexpr, ASM: tl.constexpr):
    """Nearest even of a type, through float32 as torch does it; a type's own values are copied."""
    if values.dtype == dtype:
        rounded = values
    else:
        wide = widen(values)
        if dtype == tl.bfloat16 and not ASM:
            bits = wide.to(tl.uint32, bitcast=True)
            upper = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
            upper = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FFF, upper)
            rounded = upper.to(tl.uint16).to(tl.bfloat16, bitcast=True)
        else:
            rounded = wide.to(dtype)
    return rounded


@triton.jit
def encode_e4m3(values):
    """float32 into e4m3 bytes: nearest even, too large ones 448, NaN kept, sign kept."""
    bits = values.to(tl.uint32, bitcast=True)
    size = bits & 0x7FFFFFFF
    capped = tl.minimum(size, 0x43E00000)  # 448
    normal = (capped + 0x7FFFF + ((capped >> 20) & 1) - 0x3C000000) >> 20  # exponents 120 less
    # below 2**-6 codes are multiples of 2**-9, the last place of 2**14
    shifted = capped.to(tl.float32, bitcast=True) + 16384.0
    small = shifted.to(tl.uint32, bitcast=True) - 0x46800000
    code = tl.where(capped < 0x3C800000, small, normal)
    code = tl.where(size > 0x7F800000, 0x7F, code)
    return (((bits >> 24) & 0x80) | code).to(tl.uint8)


@triton.jit
def group_scales(groups, KIND: tl.constexpr, EXACT: tl.constexpr):
    """A float32 scale per row of groups; NaN, the largest by its bits, gets into its group's."""
    sizes = groups.to(tl.uint32, bitcast=True) & 0x7FFFFFFF
    scales = tl.max(sizes, 1).to(tl.float32, bitcast=True)
    if KIND != PACKED:
        scales = tl.where(scales < 1e-4, 1e-4, scales)
    scales = tl.div_rn(scales, 448.0)
    if KIND == PACKED:
        smallest: tl.constexpr = 1.1754943508222875e-38 if EXACT else 1e-4
        scales = tl.where(scales < smallest, smallest, scales)
    if not EXACT:  # the next power of two; NaN stays
        bits = (scales.to(tl.uint32, bitcast=True) + 0x007FFFFF) & 0x7F800000
        scales = tl.where(scales != scales, scales, bits.to(tl.float32, bitcast=True))
    return scales


@triton.jit
def places(
    block, offset, page, row_stride, BS: tl.constexpr, KIND: tl.constexpr, MAIN: tl.constexpr,
    ROPE: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """Where rows' values, scales and ROPE columns begin, in elements from the cache's first."""
    if KIND == V4 or KIND == INDEX:  # scales stand behind the values of the whole block
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
def _load_columns(
    kv_c, k_pe, d, mask, C: tl.constexpr, FIRST: tl.constexpr, END: tl.constexpr
):  # fmt: skip
    """Columns d of a row, all within FIRST .. END-1."""
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
def store_bits(at, bits, mask, BYTES: tl.constexpr, ALIGNED: tl.constexpr):
    """Numbers of several bytes into a cache of bytes, one by one where they lie oddly."""
    if ALIGNED:
        n = tl.arange(0, bits.shape[0])
        tl.store(at.to(tl.pointer_type(bits.dtype)) + n, bits, mask=mask)
    else:
        n = tl.arange(0, bits.shape[0])[:, None] * BYTES
        i = tl.arange(0, BYTES)[None, :]
        each = (bits.to(tl.uint32)[:, None] >> (8 * i).to(tl.uint32)) & 0xFF
        tl.store(at + (n + i), each.to(tl.uint8), mask=mask[:, None])


@triton.jit
def store_row(
    cache, kv_c, k_pe, slot, kv_scale, page, row_stride,
    BS: tl.constexpr, C: tl.constexpr, KIND: tl.constexpr, MAIN: tl.constexpr, ROPE: tl.constexpr,
    GROUP: tl.constexpr, SCALES: tl.constexpr, EXACT: tl.constexpr, ALIGNED: tl.constexpr,
    ASM: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """One row, encoded, into its slot."""
    g = tl.arange(0, BLOCK_G)
    c = tl.arange(0, BLOCK_C)
    d = (g * GROUP)[:, None] + c[None, :]  # [BLOCK_G, BLOCK_C]
    mask = (g < MAIN // GROUP)[:, None] & (c < GROUP)[None, :]
    r = tl.arange(0, BLOCK_R)
    values = _load_columns(kv_c, k_pe, d, mask, C, 0, MAIN)
    rope = _load_columns(kv_c, k_pe, MAIN + r, r < ROPE, C, MAIN, MAIN + ROPE)
    store_values(
        cache, values, rope, slot, kv_scale, page, row_stride, BS, KIND, MAIN, ROPE, GROUP, SCALES,
        EXACT, ALIGNED, ASM, BLOCK_G, BLOCK_C, BLOCK_R,
    )  # fmt: skip


@triton.jit
def store_values(
    cache, values, rope, slot, kv_scale, page, row_stride,
    BS: tl.constexpr, KIND: tl.constexpr, MAIN: tl.constexpr, ROPE: tl.constexpr,
    GROUP: tl.constexpr, SCALES: tl.constexpr, EXACT: tl.constexpr, ALIGNED: tl.constexpr,
    ASM: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """The same for a row at hand: values [BLOCK_G, BLOCK_C], zeros past a group's GROUP columns,
    and rope [BLOCK_R]."""
    values_at, scales_at, rope_at = places(
        slot // BS, slot % BS, page, row_stride, BS, KIND, MAIN, ROPE, SCALES
    )
    g = tl.arange(0, BLOCK_G)
    c = tl.arange(0, BLOCK_C)
    d = (g * GROUP)[:, None] + c[None, :]
    mask = (g < MAIN // GROUP)[:, None] & (c < GROUP)[None, :]
    r = tl.arange(0, BLOCK_R)
    mask_r = r < ROPE
    if KIND == PLAIN:
        stored = round_to(values, cache.dtype.element_ty, ASM)
        rope = round_to(rope, cache.dtype.element_ty, ASM)
    elif KIND == FP8:
        scale = tl.load(kv_scale)
        stored = encode_e4m3(tl.div_rn(widen(values), scale))
        rope = encode_e4m3(tl.div_rn(widen(rope), scale))
    else:
        if KIND == V4:
            values = round_to(values, tl.bfloat16, ASM)
        groups = widen(values)
        scales = group_scales(groups, KIND, EXACT)
        if EXACT:
            stored = encode_e4m3(tl.div_rn(groups, scales[:, None]))
        else:  # times one over a power of two is the quotient itself, rounded alike
            stored = encode_e4m3(groups * tl.div_rn(1.0, scales)[:, None])
        bits = scales.to(tl.uint32, bitcast=True)
        if KIND == V4:
            exponents = tl.where(g < MAIN // GROUP, bits >> 23, 0).to(tl.uint8)
            tl.store(cache + scales_at + g, exponents, mask=g < SCALES)
        else:
            store_bits(cache + scales_at, bits, g < MAIN // GROUP, 4, ALIGNED)
    tl.store(cache + values_at + d, stored, mask=mask)
    if ROPE > 0:
        if KIND == PLAIN or KIND == FP8:
            tl.store(cache + rope_at + r, rope, mask=mask_r)
        else:
            halves = round_to(rope, tl.bfloat16, ASM).to(tl.uint16, bitcast=True)
            store_bits(cache + rope_at, halves, mask_r, 2, ALIGNED)


@triton.jit(do_not_specialize=["N"], do_not_specialize_on_alignment=DO_NOT_SPECIALIZE_ON_ALIGNMENT)
def _cache_write_kernel(
    cache, kv_c, k_pe, slot_mapping, kv_scale,
    page, row_stride, kv_c_stride, k_pe_stride, slot_stride, N,
    BS: tl.constexpr, C: tl.constexpr, KIND: tl.constexpr, MAIN: tl.constexpr, ROPE: tl.constexpr,
    GROUP: tl.constexpr, SCALES: tl.constexpr, EXACT: tl.constexpr, ALIGNED: tl.constexpr,
    ASM: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + i * slot_stride)
    if (slot >= 0) & (slot // BS < N):
        store_row(
            cache, kv_c + i * kv_c_stride, k_pe + i * k_pe_stride, slot, kv_scale, page, row_stride,
            BS, C, KIND, MAIN, ROPE, GROUP, SCALES, EXACT, ALIGNED, ASM, BLOCK_G, BLOCK_C, BLOCK_R,
        )  # fmt: skip


def why_not(problem: Problem) -> str | None:
    if problem.dtype not in INPUTS:
        return f"takes 16- and 32-bit rows, this is {problem.dtype}"
    if type(get_format(problem.format)) not in KINDS:
        return f"cache format {problem.format} is not implemented"
    return None


def run(
    cache: Tensor,
    kv_c: Tensor,
    k_pe: Tensor,
    slot_mapping: Tensor,
    kv_scale: Tensor,
    *,
    format: str,
) -> None:
    N, BS, _ = cache.shape
    C, R = kv_c.shape[1], k_pe.shape[1]
    if slot_mapping.shape[0] == 0 or C + R == 0:
        return
    layout = layout_of(format, C + R, cut=C)
    constants = constants_of(layout, C, BS, aligned=is_aligned(cache, layout))
    _cache_write_kernel[(slot_mapping.shape[0],)](
        cache.view(torch.uint8) if format == "fp8" else cache,
        kv_c,
        k_pe,
        slot_mapping,
        kv_scale,
        cache.stride(0),
        cache.stride(1),
        kv_c.stride(0),
        k_pe.stride(0),
        slot_mapping.stride(0),
        N,
        **constants,
        num_warps=num_warps_of(constants),
        num_stages=1,
        enable_fp_fusion=FP_FUSION,
    )


def is_aligned(cache: Tensor, layout: Layout) -> bool:
    """Whether scales and 16-bit columns inside bytes lie where such numbers may."""
    kind, at = layout.KIND, [cache.data_ptr(), cache.stride(0)]
    if kind == PACKED.value:
        at.append(cache.stride(1))
    elif kind == INDEX.value:
        at.append(cache.shape[1] * layout.MAIN)
    return all(place % 4 == 0 for place in at)


def constants_of(layout: Layout, C: int, BS: int, *, aligned: bool) -> dict[str, Any]:
    kind, groups = layout.KIND, max(layout.MAIN // layout.GROUP, 1)
    if kind == V4.value:
        groups = max(groups, layout.SCALES)  # bytes past the last scale are written too
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


def num_warps_of(constants: dict[str, Any]) -> int:
    """Eight values per thread: 16 bytes of a row in 16 bits."""
    return min(max(constants["BLOCK_G"] * constants["BLOCK_C"] // 256, 1), 8)


def builds() -> Iterator[Build]:
    """One per way of storing and target, bf16 rows of the models' widths."""
    shapes = {
        "bf16": (512, 64),
        "fp8": (512, 64),
        "fp8_ds_mla": (512, 64),
        "fp8_ds_mla_exact": (512, 64),
        "fp8_dsv4": (512, 0),
        "index_fp8": (128, 0),
        "index_fp8_exact": (128, 0),
    }
    for capability in TARGETS:
        for format, (C, R) in shapes.items():
            yield write_build(capability, format, C, R)


def write_build(
    capability: int,
    format: str,
    C: int,
    R: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    aligned: bool = True,
) -> Build:
    constants = constants_of(layout_of(format, C + R, cut=C), C, 64, aligned=aligned)
    types = {
        "cache": TYPES.get(get_format(format).dtype, "u8"),
        "kv_c": TYPES[dtype],
        "k_pe": TYPES[dtype],
        "slot_mapping": "i64",
        "kv_scale": "fp32",
    }
    signature = {
        name: "constexpr" if name in constants else "*" + types[name] if name in types else "i32"
        for name in _cache_write_kernel.arg_names
    }
    return Build(
        f"write-{format}-C{C}-R{R}", _cache_write_kernel, signature, constants,
        num_warps_of(constants), 1, capability, FP_FUSION,
    )  # fmt: skip
