"""quantize_out, Triton: quantize attention outputs in one pass.

Computes  values, scales of rows [n, O], O = H * V
          (specification: ops/quantize_out.py; numbers: backends/reference/_quantize.py)
Grid      (cdiv(n, BLOCK_T) * cdiv(O, COLUMNS),): one program owns COLUMNS columns of BLOCK_T
          tokens.
Reads     out [n, H, V], global_scale [], rows [n]
Writes    values [T, O], scales
Limits    see why_not()
"""

from __future__ import annotations

from collections.abc import Iterator

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
from openmla.backends.triton._primitives import widen
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

ELEMENTS = 2048  # elements per tile: 16 per thread

LAUNCHES = 1


@triton.jit(
    do_not_specialize=NOT_SPECIALIZED,
    do_not_specialize_on_alignment=DO_NOT_SPECIALIZE_ON_ALIGNMENT,
)
def _quantize_out_kernel(
    values, scales, global_scale, rows, out,
    values_stride, scale_row, scale_column, first_row, out_token, out_head, num_rows,
    H: tl.constexpr, V: tl.constexpr, GROUP: tl.constexpr, FP4: tl.constexpr, POW2: tl.constexpr,
    CVT: tl.constexpr, LISTED: tl.constexpr, ASM: tl.constexpr,
    BLOCK_T: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    TILES: tl.constexpr = (H * V + COLUMNS - 1) // COLUMNS
    program = tl.program_id(0).to(tl.int64)
    first_column = (program % TILES).to(tl.int32) * COLUMNS
    t = program // TILES * BLOCK_T + tl.arange(0, BLOCK_T)
    column = first_column + tl.arange(0, COLUMNS)
    row = target_rows(rows, first_row, t, t < num_rows, LISTED)
    at = out + (t * out_token)[:, None] + (column // V * out_head + column % V)[None, :]
    mask = (t < num_rows)[:, None] & (column < H * V)[None, :]
    tile = widen(tl.load(at, mask=mask, other=0.0))
    store_quantized(
        tile, values, scales, global_scale, row, first_column, H * V, values_stride, scale_row,
        scale_column, GROUP, FP4, POW2, CVT, ASM,
    )  # fmt: skip


def why_not(problem: Problem) -> str | None:
    return None


def run(
    values: Tensor,
    scales: Tensor | None,
    out: Tensor,
    global_scale: Tensor | None,
    *,
    rows: Tensor | None,
    first_row: int,
    format: str,
) -> None:
    n, H, V = out.shape
    if n * H * V == 0:
        return
    launch = SPEC.launch(H, V, format, rows is not None, capability_of(values.device))
    tiles = cdiv(n, launch.fixed["BLOCK_T"]) * cdiv(H * V, launch.fixed["COLUMNS"])
    pointers, numbers = output_arguments(values, scales, global_scale, rows, first_row)
    launch((tiles,), *pointers, out, *numbers, out.stride(0), out.stride(1), n)


def fix(H: int, V: int, format: str, listed: bool, capability: int) -> Fixed:
    columns = tile_columns(H * V, ELEMENTS, format)
    return Fixed(
        {
            "H": H,
            "V": V,
            **output_constants(format, capability),
            "LISTED": listed,
            "ASM": assembly(),
            "BLOCK_T": max(ELEMENTS // columns, 1),
            "COLUMNS": columns,
        }
    )


def cases(capability: int) -> Iterator[Case]:
    """Every format, and one with listed rows."""
    for format, listed in (*((format, False) for format in OUTPUT_FORMATS), ("fp8_128", True)):
        name = f"quantize-{format}-H128-V128{'-listed' * listed}"
        types = output_types(format, rows=listed)
        yield case(name, 128, 128, format, listed, capability, types=types)


SPEC = KernelSpec(
    _quantize_out_kernel,
    fix,
    types={"*bf16": "out"},
    cases=cases,
    fp_fusion=False,  # bytes must not depend on how the compiler contracts
)
SPECS = (SPEC,)
