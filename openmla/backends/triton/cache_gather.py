"""cache_gather, Triton: decode rows of a paged cache and pack them in request order.

Computes  out[row_start_loc[b] + j] = decode(cache[block_table[b, p // BS], p % BS]), p = starts[b]
          + j, in float32 (float64 if out is), rounded once (specification: ops/cache_gather.py)
Grid      (cdiv(n, BLOCK_N),): one program owns BLOCK_N rows of out; those past the last row idle.
Reads     cache [N, BS, W], kv_scale [], block_table [B, M], starts [B], row_start_loc [B+1]
Writes    out [n, D]
Limits    see why_not()
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from openmla.backends import Problem
from openmla.backends.triton._build import DO_NOT_SPECIALIZE_ON_ALIGNMENT, cdiv, next_power_of_2
from openmla.backends.triton._cache_rows import (
    STORED_AS,
    is_aligned,
    layout_of,
    row_constants,
    row_offsets,
    stored_type,
)
from openmla.backends.triton._primitives import (
    FP8,
    INT32_MAX,
    PLAIN,
    V4,
    decode_e4m3,
    load_bfloat16,
    load_group_scales,
    round_to,
    widen,
)
from openmla.backends.triton._spec import Case, Fixed, KernelSpec, case
from openmla.cache.format import get_format

BLOCK_B = 32  # requests compared at once: fixed, so that B never recompiles the kernel
ELEMENTS = 4096  # elements per tile of rows, 32 per thread of 4 warps; wider rows use 8 warps
ROWS = 32  # rows per tile, at most

LAUNCHES = 1


@triton.jit
def dequantize(stored, scales, dtype: tl.constexpr, ASM: tl.constexpr):
    """Return e4m3 bytes times their scales, rounded to dtype once; raw bytes if dtype is uint8."""
    if dtype == tl.uint8:
        return stored
    EXACT: tl.constexpr = tl.bfloat16 if ASM else tl.float32  # either holds e4m3 exactly
    values = widen(decode_e4m3(stored, EXACT, ASM))
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
    BS: tl.constexpr, FORMAT: tl.constexpr, MAIN: tl.constexpr, ROPE: tl.constexpr,
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
        for first_b in range(0, B, BLOCK_B):
            each = first_b + tl.arange(0, BLOCK_B)
            ends = tl.load(row_start_loc + (each + 1) * loc_stride, mask=each < B, other=INT32_MAX)
            b += tl.sum((ends[None, :] <= i[:, None]).to(tl.int32), 1)
        begin = tl.load(row_start_loc + b * loc_stride, mask=mask_n, other=0)
        position = tl.load(starts + b * starts_stride, mask=mask_n, other=0) + (i - begin)
        column = position // BS
        block = tl.load(
            block_table + b.to(tl.int64) * table_stride + column.to(tl.int64) * column_stride,
            mask=mask_n & (column < M),
            other=-1,
        )
        valid = mask_n & (block >= 0) & (block < N)
        values_at, scales_at, rope_at = row_offsets(
            block.to(tl.int64), (position % BS).to(tl.int64), page, row_stride,
            BS, FORMAT, MAIN, ROPE, SCALES,
        )  # fmt: skip
        out_at = i.to(tl.int64) * out_stride
        g = tl.arange(0, BLOCK_G)
        c = tl.arange(0, BLOCK_C)
        d = (g * GROUP)[:, None] + c[None, :]
        mask_d = (g < MAIN // GROUP)[:, None] & (c < GROUP)[None, :]
        stored = tl.load(
            cache + values_at[:, None, None] + d[None, :, :],
            mask=valid[:, None, None] & mask_d[None, :, :],
            other=0,
        )  # [BLOCK_N, BLOCK_G, BLOCK_C]
        if FORMAT == PLAIN:
            values = round_to(stored, dtype, ASM)
        elif FORMAT == FP8:
            values = dequantize(stored, tl.load(kv_scale), dtype, ASM)
        else:
            mask_g = valid[:, None] & (g < MAIN // GROUP)[None, :]
            WORDS: tl.constexpr = ALIGNED and FORMAT != V4
            scales = load_group_scales(cache, scales_at, g, mask_g, FORMAT, WORDS)
            values = dequantize(stored, scales[:, :, None], dtype, ASM)
        tl.store(
            out + out_at[:, None, None] + d[None, :, :],
            values,
            mask=mask_n[:, None, None] & mask_d[None, :, :],
        )
        if ROPE > 0:
            r = tl.arange(0, BLOCK_R)
            mask_r = valid[:, None] & (r < ROPE)[None, :]
            if FORMAT == PLAIN or FORMAT == FP8:
                rope = tl.load(cache + rope_at[:, None] + r[None, :], mask=mask_r, other=0)
                if FORMAT == FP8:
                    rope = dequantize(rope, tl.load(kv_scale), dtype, ASM)
            else:
                rope = load_bfloat16((cache + rope_at)[:, None], r[None, :], mask_r, ALIGNED)
            tl.store(
                out + out_at[:, None] + (MAIN + r)[None, :],
                round_to(rope, dtype, ASM),
                mask=mask_n[:, None] & (r < ROPE)[None, :],
            )


def why_not(problem: Problem) -> str | None:
    if type(get_format(problem.format)) not in STORED_AS:
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
    launch = SPEC.launch(format, D, BS, aligned=is_aligned(cache, layout_of(format, D, cut_of(D))))
    launch(
        (cdiv(n, launch.fixed["BLOCK_N"]),),
        out.view(torch.uint8) if out.dtype == torch.float8_e4m3fn else out,
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
    )


def cut_of(D: int) -> int:
    """Return the largest power of two that fits in a row; ROPE is the rest."""
    return next_power_of_2(D + 1) // 2


def fix(format: str, D: int, BS: int, *, aligned: bool) -> Fixed:
    constants = row_constants(layout_of(format, D, cut_of(D)), 0, BS, aligned=aligned)
    del constants["C"], constants["EXACT"]
    width = constants["BLOCK_G"] * constants["BLOCK_C"]
    constants["BLOCK_B"] = BLOCK_B
    constants["BLOCK_N"] = min(max(ELEMENTS // width, 1), ROWS)
    return Fixed(constants, num_warps=8 if width > ELEMENTS else 4)


def cases(_: int) -> Iterator[Case]:
    """Every format with bf16 outputs, and copied fp8 codes."""
    for format, D, out in (
        ("bf16", 576, "bf16"), ("fp8", 576, "bf16"), ("fp8_ds_mla", 576, "bf16"),
        ("fp8_dsv4", 512, "bf16"), ("index_fp8", 128, "bf16"), ("fp8", 576, "u8"),
    ):  # fmt: skip
        name = f"gather-{format}-D{D}{'' if out == 'bf16' else f'-{out}'}"
        types = {"out": f"*{out}", "cache": stored_type(format)}
        yield case(name, format, D, 64, aligned=True, types=types)


SPEC = KernelSpec(
    _cache_gather_kernel,
    fix,
    types={"*fp32": "kv_scale", "*i32": "block_table starts row_start_loc"},
    cases=cases,
    fp_fusion=False,  # a row's values must not depend on how the compiler contracts
)
SPECS = (SPEC,)
