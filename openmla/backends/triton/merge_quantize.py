"""merge_quantize, Triton: the last merge of two partial attentions, quantized in registers.

Computes  x = weight * out + other weight * other_out, rounded to out's dtype; values, scales of x
          (specification: ops/merge_quantize.py; numbers: backends/reference/_quantize.py)
Grid      (cdiv(n, BLOCK_T) * cdiv(O, COLUMNS),): one program owns COLUMNS columns of BLOCK_T
          tokens.
Reads     out, other_out [n, H, V], lse, other_lse [n, H], global_scale [], rows [n]
Writes    values [T, O], scales
Limits    see why_not()

A tile is split into pieces of one head each, as long a power of two as possible: one weight applies
to a whole piece. The pieces of all tokens form one axis, so that adjacent lanes of a warp hold
adjacent columns. If tokens and pieces were two axes, Triton 3.6 would place lanes of other tokens
between the lanes of a group that spans heads. Its reductions assume adjacent lanes and would return
the maximum of the wrong values (_build.scattered_reductions).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from openmla.backends import Problem
from openmla.backends.triton._build import (
    DO_NOT_SPECIALIZE_ON_ALIGNMENT,
    assembly,
    capability_of,
    cdiv,
)
from openmla.backends.triton._primitives import merge_weights, round_to, widen, widen_to
from openmla.backends.triton._quantize import (
    NOT_SPECIALIZED,
    output_arguments,
    output_constants,
    output_types,
    store_quantized,
    target_rows,
    tile_columns,
)
from openmla.backends.triton._spec import Case, Fixed, KernelSpec, case
from openmla.outputs import OUTPUT_FORMATS

ELEMENTS = 2048  # elements per tile: 16 per thread and side

LAUNCHES = 1


@triton.jit(
    do_not_specialize=NOT_SPECIALIZED,
    do_not_specialize_on_alignment=[*DO_NOT_SPECIALIZE_ON_ALIGNMENT, "lse", "other_lse"],
)
def _merge_quantize_kernel(
    values, scales, global_scale, rows, out, lse, other_out, other_lse,
    values_stride, scale_row, scale_column, first_row,
    out_token, out_head, lse_token, lse_head,
    other_out_token, other_out_head, other_lse_token, other_lse_head, num_rows,
    H: tl.constexpr, V: tl.constexpr, dtype: tl.constexpr, GROUP: tl.constexpr, FP4: tl.constexpr,
    POW2: tl.constexpr, CVT: tl.constexpr, LISTED: tl.constexpr, ASM: tl.constexpr,
    BLOCK_T: tl.constexpr, COLUMNS: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    TILES: tl.constexpr = (H * V + COLUMNS - 1) // COLUMNS
    PIECES: tl.constexpr = COLUMNS // EACH  # per token
    program = tl.program_id(0).to(tl.int64)
    first_column = (program % TILES).to(tl.int32) * COLUMNS
    first_token = program // TILES * BLOCK_T
    # EACH adjacent columns belong to one head and share a weight
    piece = tl.arange(0, BLOCK_T * PIECES)
    t = first_token + piece // PIECES
    first = first_column + piece % PIECES * EACH
    head = first // V
    mask = (t < num_rows) & (head < H)
    at = lse + t * lse_token + head * lse_head
    own = widen_to(tl.load(at, mask=mask, other=float("-inf")), dtype)
    at = other_lse + t * other_lse_token + head * other_lse_head
    other = widen_to(tl.load(at, mask=mask, other=float("-inf")), dtype)
    valid, other_valid, weight, other_weight, _ = merge_weights(own, other)
    at = out + t * out_token + head * out_head + first % V
    tile = weighted(at, valid, weight, dtype, EACH)
    at = other_out + t * other_out_token + head * other_out_head + first % V
    tile += weighted(at, other_valid, other_weight, dtype, EACH)
    tile = tl.reshape(tile, [BLOCK_T, COLUMNS])
    tile = widen(round_to(tile, out.dtype.element_ty, ASM))
    t = first_token + tl.arange(0, BLOCK_T)
    row = target_rows(rows, first_row, t, t < num_rows, LISTED)
    store_quantized(
        tile, values, scales, global_scale, row, first_column, H * V, values_stride,
        scale_row, scale_column, GROUP, FP4, POW2, CVT, ASM,
    )  # fmt: skip


@triton.jit
def weighted(at, valid, weight, dtype: tl.constexpr, EACH: tl.constexpr):
    """Return EACH values of a side from each of `at` [N] on, [N, EACH], times their weight; 0 where
    the side saw no key."""
    columns = tl.load(at[:, None] + tl.arange(0, EACH)[None, :], mask=valid[:, None], other=0.0)
    return widen_to(columns, dtype) * weight[:, None]


def why_not(problem: Problem) -> str | None:
    return None


def run(
    values: Tensor,
    scales: Tensor | None,
    out: Tensor,
    lse: Tensor,
    other_out: Tensor,
    other_lse: Tensor,
    global_scale: Tensor | None,
    *,
    rows: Tensor | None,
    first_row: int,
    format: str,
) -> None:
    n, H, V = out.shape
    if n * H * V == 0:
        return
    sides = (out, lse, other_out, other_lse)
    double = any(side.dtype == torch.float64 for side in sides)
    launch = SPEC.launch(H, V, format, rows is not None, double, capability_of(values.device))
    tiles = cdiv(n, launch.fixed["BLOCK_T"]) * cdiv(H * V, launch.fixed["COLUMNS"])
    pointers, numbers = output_arguments(values, scales, global_scale, rows, first_row)
    strides = (stride for side in sides for stride in side.stride()[:2])
    launch((tiles,), *pointers, *sides, *numbers, *strides, n)


def fix(H: int, V: int, format: str, listed: bool, double: bool, capability: int) -> Fixed:
    columns = tile_columns(H * V, ELEMENTS, format)
    return Fixed(
        {
            "H": H,
            "V": V,
            "dtype": tl.float64 if double else tl.float32,
            **output_constants(format, capability),
            "LISTED": listed,
            "ASM": assembly(),
            "BLOCK_T": max(ELEMENTS // columns, 1),
            "COLUMNS": columns,
            "EACH": min(V & -V, columns),
        }
    )


def cases(capability: int) -> Iterator[Case]:
    """Every format, a head width that is not a power of two, and groups that span two heads."""
    shapes = [(format, 128, 128) for format in OUTPUT_FORMATS]
    for format, H, V in (*shapes, ("fp8_64", 64, 192), ("fp8_128", 16, 64)):
        name = f"merge-quantize-{format}-H{H}-V{V}"
        types = output_types(format, rows=False)
        yield case(name, H, V, format, False, False, capability, types=types)


SPEC = KernelSpec(
    _merge_quantize_kernel,
    fix,
    types={"*bf16": "out other_out", "*fp32": "lse other_lse"},
    cases=cases,
    fp_fusion=True,  # as in merge_states, which has the same sums; quantization has none
)
SPECS = (SPEC,)
