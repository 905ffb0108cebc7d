"""cache_gather, Triton: rows out of a paged cache, decoded, packed in request order.

Computes  out[row_start_loc[b] + j] = decode(cache[block_table[b, p // BS], p % BS]), p = starts[b]
          + j, in float32 (float64 if out is), rounded once (specification: ops/cache_gather.py)
Grid      (cdiv(n, BLOCK_N),): one program owns BLOCK_N rows of out; past the last it does nothing.
Reads     cache [N, BS, W], kv_scale [], block_table [B, M], starts [B], row_start_loc [B+1]
Writes    out [n, D]
Limits    see why_not()
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from openmla.backends import Problem
from openmla.backends.triton import cache_write
from openmla.backends.triton._build import (
    DO_NOT_SPECIALIZE_ON_ALIGNMENT,
    TARGETS,
    TYPES,
    Build,
    cdiv,
    next_power_of_2,
)
from openmla.backends.triton._latent import FP8, PLAIN, V4, decode_e4m3
from openmla.backends.triton.cache_write import places, round_to, widen
from openmla.cache.format import get_format

BLOCK_B = 32  # requests looked at together, however many there are: nothing is compiled for B

LAUNCHES = 1
FP_FUSION = False  # a row's values do not depend on what else was compiled


@triton.jit
def _load_scales(
    cache, scales_at, there, KIND: tl.constexpr, COUNT: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK_G: tl.constexpr,
):  # fmt: skip
    """The scales of some rows, [BLOCK_N, BLOCK_G]."""
    g = tl.arange(0, BLOCK_G)
    mask = there[:, None] & (g < COUNT)[None, :]
    if KIND == V4:
        exponents = tl.load(cache + scales_at[:, None] + g[None, :], mask=mask, other=0)
        bits = exponents.to(tl.uint32) << 23
    elif ALIGNED:
        words = (cache + scales_at).to(tl.pointer_type(tl.uint32))
        bits = tl.load(words[:, None] + g[None, :], mask=mask, other=0)
    else:
        bits = tl.zeros([there.shape[0], BLOCK_G], tl.uint32)
        for i in tl.static_range(4):
            at = cache + scales_at[:, None] + (4 * g + i)[None, :]
            bits |= tl.load(at, mask=mask, other=0).to(tl.uint32) << (8 * i)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _load_halves(cache, rope_at, mask, ALIGNED: tl.constexpr, BLOCK_R: tl.constexpr):
    """bf16 columns inside bytes, [BLOCK_N, BLOCK_R]."""
    r = tl.arange(0, BLOCK_R)
    if ALIGNED:
        halves = (cache + rope_at).to(tl.pointer_type(tl.bfloat16))
        columns = tl.load(halves[:, None] + r[None, :], mask=mask, other=0.0)
    else:
        at = cache + rope_at[:, None] + (2 * r)[None, :]
        low = tl.load(at, mask=mask, other=0).to(tl.uint16)
        high = tl.load(at + 1, mask=mask, other=0).to(tl.uint16)
        columns = (low | (high << 8)).to(tl.bfloat16, bitcast=True)
    return columns


@triton.jit
def _decode(stored, scales, dtype: tl.constexpr, ASM: tl.constexpr):
    """e4m3 bytes times their scales, one product, rounded to dtype once."""
    FACTORS: tl.constexpr = tl.bfloat16 if ASM else tl.float32  # either holds e4m3 exactly
    values = widen(decode_e4m3(stored, FACTORS, ASM))
    if dtype == tl.float64:
        product = values.to(tl.float64) * scales.to(tl.float64)
    else:
        product = values * scales
    return round_to(product, dtype, ASM)


@triton.jit(
    do_not_specialize=["B", "M", "N", "table_stride"],
    do_not_specialize_on_alignment=DO_NOT_SPECIALIZE_ON_ALIGNMENT,
)
def _cache_gather_kernel(
    out, cache, kv_scale, block_table, starts, row_start_loc,
    out_stride, page, row_stride, table_stride, column_stride, starts_stride, loc_stride, B, M, N,
    BS: tl.constexpr, KIND: tl.constexpr, MAIN: tl.constexpr, ROPE: tl.constexpr,
    GROUP: tl.constexpr, SCALES: tl.constexpr, ALIGNED: tl.constexpr, ASM: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = out.dtype.element_ty
    first = tl.program_id(0) * BLOCK_N
    num_rows = tl.load(row_start_loc + B * loc_stride)
    if first < num_rows:
        i = first + tl.arange(0, BLOCK_N)
        mask_n = i < num_rows
        b = tl.zeros([BLOCK_N], tl.int32)  # requests that end at or before a row
        for some in range(0, B, BLOCK_B):
            each = some + tl.arange(0, BLOCK_B)
            ends = tl.load(row_start_loc + (each + 1) * loc_stride, mask=each < B, other=2147483647)
            b += tl.sum((ends[None, :] <= i[:, None]).to(tl.int32), 1)
        begin = tl.load(row_start_loc + b * loc_stride, mask=mask_n, other=0)
        position = tl.load(starts + b * starts_stride, mask=mask_n, other=0) + (i - begin)
        column = position // BS
        block = tl.load(
            block_table + b.to(tl.int64) * table_stride + column.to(tl.int64) * column_stride,
            mask=mask_n & (column < M),
            other=-1,
        )
        there = mask_n & (block >= 0) & (block < N)
        values_at, scales_at, rope_at = places(
            block.to(tl.int64), (position % BS).to(tl.int64), page, row_stride,
            BS, KIND, MAIN, ROPE, SCALES,
        )  # fmt: skip
        out_at = i.to(tl.int64) * out_stride
        g = tl.arange(0, BLOCK_G)
        c = tl.arange(0, BLOCK_C)
        d = (g * GROUP)[:, None] + c[None, :]
        mask_d = (g < MAIN // GROUP)[:, None] & (c < GROUP)[None, :]
        stored = tl.load(
            cache + values_at[:, None, None] + d[None, :, :],
            mask=there[:, None, None] & mask_d[None, :, :],
            other=0,
        )  # [BLOCK_N, BLOCK_G, BLOCK_C]
        if KIND == PLAIN:
            values = round_to(stored, dtype, ASM)
        elif KIND == FP8:
            values = _decode(stored, tl.load(kv_scale), dtype, ASM)
        else:
            scales = _load_scales(cache, scales_at, there, KIND, MAIN // GROUP, ALIGNED, BLOCK_G)
            values = _decode(stored, scales[:, :, None], dtype, ASM)
        tl.store(
            out + out_at[:, None, None] + d[None, :, :],
            values,
            mask=mask_n[:, None, None] & mask_d[None, :, :],
        )
        if ROPE > 0:
            r = tl.arange(0, BLOCK_R)
            mask_r = there[:, None] & (r < ROPE)[None, :]
            if KIND == PLAIN or KIND == FP8:
                rope = tl.load(cache + rope_at[:, None] + r[None, :], mask=mask_r, other=0)
                if KIND == FP8:
                    rope = _decode(rope, tl.load(kv_scale), dtype, ASM)
            else:
                rope = _load_halves(cache, rope_at, mask_r, ALIGNED, BLOCK_R)
            tl.store(
                out + out_at[:, None] + (MAIN + r)[None, :],
                round_to(rope, dtype, ASM),
                mask=mask_n[:, None] & (r < ROPE)[None, :],
            )


def why_not(problem: Problem) -> str | None:
    if type(get_format(problem.format)) not in cache_write.KINDS:
        return f"cache format {problem.format} is not implemented"
    return None


def run(
    out: Tensor,
    cache: Tensor,
    kv_scale: Tensor,
    block_table: Tensor,
    starts: Tensor,
    row_start_loc: Tensor,
    *,
    format: str,
) -> None:
    (n, D), (N, BS, _), (B, M) = out.shape, cache.shape, block_table.shape
    if n == 0 or D == 0 or B == 0:
        return
    constants, num_warps = constants_of(format, D, BS, cache)
    _cache_gather_kernel[(cdiv(n, constants["BLOCK_N"]),)](
        out,
        cache.view(torch.uint8) if format == "fp8" else cache,
        kv_scale,
        block_table,
        starts,
        row_start_loc,
        out.stride(0),
        cache.stride(0),
        cache.stride(1),
        block_table.stride(0),
        block_table.stride(1),
        starts.stride(0),
        row_start_loc.stride(0),
        B,
        M,
        N,
        **constants,
        num_warps=num_warps,
        num_stages=1,
        enable_fp_fusion=FP_FUSION,
    )


def constants_of(
    format: str, D: int, BS: int, cache: Tensor | None = None
) -> tuple[dict[str, Any], int]:
    """What the kernel is compiled for, and its warps: about 32 values of MAIN per thread."""
    cut = next_power_of_2(D + 1) // 2  # the largest power of two in a row, and what is left
    layout = cache_write.layout_of(format, D, cut)
    aligned = cache is None or cache_write.is_aligned(cache, layout)
    constants = cache_write.constants_of(layout, 0, BS, aligned=aligned)
    del constants["C"], constants["EXACT"]
    width = constants["BLOCK_G"] * constants["BLOCK_C"]
    constants["BLOCK_B"] = BLOCK_B
    constants["BLOCK_N"] = min(max(4096 // width, 1), 32)
    return constants, 8 if width > 4096 else 4


def builds() -> Iterator[Build]:
    """One per way of storing and target, into bf16."""
    shapes = {
        "bf16": 576,
        "fp8": 576,
        "fp8_ds_mla": 576,
        "fp8_dsv4": 512,
        "index_fp8": 128,
    }
    for capability in TARGETS:
        for format, D in shapes.items():
            yield gather_build(capability, format, D)


def gather_build(
    capability: int, format: str, D: int, dtype: torch.dtype = torch.bfloat16
) -> Build:
    constants, num_warps = constants_of(format, D, 64)
    types = {
        "out": TYPES[dtype],
        "cache": TYPES.get(get_format(format).dtype, "u8"),
        "kv_scale": "fp32",
        "block_table": "i32",
        "starts": "i32",
        "row_start_loc": "i32",
    }
    signature = {
        name: "constexpr" if name in constants else "*" + types[name] if name in types else "i32"
        for name in _cache_gather_kernel.arg_names
    }
    return Build(
        f"gather-{format}-D{D}", _cache_gather_kernel, signature, constants, num_warps, 1,
        capability, FP_FUSION,
    )  # fmt: skip
