"""Quantisers of attention outputs: a tile of float32 in registers into values and their scales.

The epilogue of every op that writes a quantised output, bit for bit what backends/reference/
_quantize.py makes of the same float32 (specification: ops/quantize_out.py). A tile is [ROWS,
COLUMNS], COLUMNS a power of two and a multiple of the format's group, which a tile begins with.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from openmla.backends.triton._build import GFX942, assembly, next_power_of_2
from openmla.backends.triton._prepare import Piece
from openmla.backends.triton._primitives import decode_e4m3, encode_e4m3
from openmla.outputs import FP4_MAX, get_output_format

E4M3_MAX = tl.constexpr(448.0)
FIRST_CVT = 89  # the first capability that converts to e4m3
E2M1_MAX = tl.constexpr(FP4_MAX)
# Strides of scales follow the tokens where columns are contiguous.
NOT_SPECIALIZED = ("num_rows", "first_row", "scale_row", "scale_column")
SMALLEST = tl.constexpr(1e-10)  # of a group's largest value, and of a power of two before it is one


def output_constants(format: str, capability: int) -> dict[str, Any]:
    """What a kernel specializes on: store_quantized()'s constants but for ASM."""
    layout = get_output_format(format)
    return {
        "GROUP": layout.group,
        "FP4": layout.packed,
        "POW2": layout.power_of_two,
        "CVT": assembly() and FIRST_CVT <= capability < GFX942,
    }


def tile_columns(columns: int, most: int, format: str) -> int:
    """Columns of a tile of rows of O: a power of two, at least a group."""
    return next_power_of_2(max(min(columns, most), get_output_format(format).group))


def output_arguments(
    values: Tensor,
    scales: Tensor | None,
    global_scale: Tensor | None,
    rows: Tensor | None,
    first_row: int,
) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """A kernel's pointers values, scales, global_scale, rows, and its numbers values_stride,
    scale_row, scale_column, first_row. Any address stands for a tensor that is not there."""
    bytes_ = Piece(values, 0, torch.uint8)
    stored: Any = bytes_
    strides: tuple[int, ...] = (0, 0)
    if scales is not None and scales.dtype == torch.float32:
        stored, strides = scales, scales.stride()
    elif scales is not None:  # bytes of 128 rows, and of a tile of 4 columns in them
        stored, strides = Piece(scales, 0, torch.uint8), (128 * scales.shape[1], 512)
    scale = bytes_ if global_scale is None else global_scale
    pointers = (bytes_, stored, scale, bytes_ if rows is None else rows)
    return pointers, (values.stride(0), *strides, first_row)


def output_types(format: str, *, rows: bool) -> dict[str, str]:
    """Triton types of those arguments, for ahead-of-time builds."""
    layout = get_output_format(format)
    return {
        "values": "*u8",
        "scales": "*fp32" if layout.group and not layout.packed else "*u8",
        "global_scale": "*fp32" if layout.global_scale else "*u8",
        "rows": "*i64" if rows else "*u8",
    }


@triton.jit
def target_rows(rows, first_row, i, mask, LISTED: tl.constexpr):
    """Where tokens i go, -1 for those past the end: listed if LISTED, else first_row and on."""
    if LISTED:
        row = tl.load(rows + i, mask=mask, other=-1)
    else:
        row = tl.where(mask, first_row + i, -1).to(tl.int64)
    return row


@triton.jit
def encode_fp8(values, CVT: tl.constexpr):
    """encode_e4m3 with one NaN: its sign would be the machine's. By the hardware's conversion where
    it has one, four values at a time: on the bits it took half of a merge's time."""
    if CVT:
        return tl.inline_asm_elementwise(
            """{
            .reg .b16 lower, upper;
            cvt.rn.satfinite.e4m3x2.f32 lower, $2, $1;
            cvt.rn.satfinite.e4m3x2.f32 upper, $4, $3;
            mov.b32 $0, {lower, upper};
            }""",
            "=r,r,r,r,r",
            [values],
            dtype=tl.uint8,
            is_pure=True,
            pack=4,
        )
    return tl.where(values != values, 0x7F, encode_e4m3(values)).to(tl.uint8)


@triton.jit
def encode_fp4(values):
    """float32 to e2m1 codes: nearest, of two as near the even code, saturated."""
    bits = values.to(tl.uint32, bitcast=True)
    a = (bits & 0x7FFFFFFF).to(tl.float32, bitcast=True)
    code = (a > 0.25).to(tl.uint8) + (a >= 0.75).to(tl.uint8) + (a > 1.25).to(tl.uint8)
    code += (a >= 1.75).to(tl.uint8) + (a > 2.5).to(tl.uint8) + (a >= 3.5).to(tl.uint8)
    code += (a > 5.0).to(tl.uint8)
    return code | ((bits >> 28) & 8).to(tl.uint8)


@triton.jit
def largest(groups):
    """The largest magnitude along the last of three axes; a NaN is the largest by its bits."""
    magnitudes = groups.to(tl.uint32, bitcast=True) & 0x7FFFFFFF
    return tl.max(magnitudes, 2).to(tl.float32, bitcast=True)


@triton.jit
def group_scales(groups, POW2: tl.constexpr):
    """Scales [ROWS, GROUPS] of fp8 groups [ROWS, GROUPS, GROUP]."""
    amax = largest(groups)
    scales = tl.div_rn(tl.where(amax < SMALLEST, SMALLEST, amax), E4M3_MAX)
    if POW2:  # up to the next power of two; NaN stays
        scales = tl.where(scales < SMALLEST, SMALLEST, scales)
        bits = (scales.to(tl.uint32, bitcast=True) + 0x007FFFFF) & 0x7F800000
        scales = tl.where(scales != scales, scales, bits.to(tl.float32, bitcast=True))
    return scales


@triton.jit
def store_quantized(
    tile, values, scales, global_scale, row, first_column, width,
    values_stride, scale_row, scale_column,
    GROUP: tl.constexpr, FP4: tl.constexpr, POW2: tl.constexpr, CVT: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """Quantise tile [ROWS, COLUMNS] float32, which holds columns first_column and on of rows
    `row` [ROWS] i64 of the output, and store it. Negative rows are skipped, and columns from
    `width`, O, on; what the tile has there must be 0."""
    ROWS: tl.constexpr = tile.shape[0]
    COLUMNS: tl.constexpr = tile.shape[1]
    valid = row[:, None] >= 0
    if GROUP == 0:
        codes = encode_fp8(tile * tl.div_rn(1.0, tl.load(global_scale)), CVT)
        column = first_column + tl.arange(0, COLUMNS)[None, :]
        at = values + row[:, None] * values_stride + column
        tl.store(at, codes, mask=valid & (column < width))
    else:
        GROUPS: tl.constexpr = COLUMNS // GROUP
        groups = tl.reshape(tile, [ROWS, GROUPS, GROUP])
        group = first_column // GROUP + tl.arange(0, GROUPS)[None, :]
        mask = valid & (group * GROUP < width)
        if FP4:
            factor = tl.load(global_scale)
            stored = encode_fp8(tl.div_rn(largest(groups) * factor, E2M1_MAX), CVT)
            factors = decode_e4m3(stored, tl.float32, ASM)[:, :, None]
            codes = encode_fp4(tl.div_rn(groups * factor, factors))
            codes = tl.where(factors > 0, codes, 0).to(tl.uint8)
            even, odd = tl.split(tl.reshape(codes, [ROWS, COLUMNS // 2, 2]))
            column = first_column // 2 + tl.arange(0, COLUMNS // 2)[None, :]
            at = values + row[:, None] * values_stride + column
            tl.store(at, even | (odd << 4), mask=valid & (column < width // 2))
            swizzled = (row // 128 * scale_row + row % 32 * 16 + row // 32 % 4 * 4)[:, None]
            swizzled += group // 4 * scale_column + group % 4
            tl.store(scales + swizzled, stored, mask=mask)
        else:
            factors = group_scales(groups, POW2)
            if POW2:  # whose reciprocal is exact: one division per group
                codes = encode_fp8(groups * tl.div_rn(1.0, factors)[:, :, None], CVT)
            else:
                codes = encode_fp8(tl.div_rn(groups, factors[:, :, None]), CVT)
            column = first_column + tl.arange(0, COLUMNS)[None, :]
            at = values + row[:, None] * values_stride + column
            tl.store(at, tl.reshape(codes, [ROWS, COLUMNS]), mask=valid & (column < width))
            tl.store(scales + row[:, None] * scale_row + group * scale_column, factors, mask=mask)
