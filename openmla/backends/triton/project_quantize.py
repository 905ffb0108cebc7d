"""project_quantize, Triton: latent outputs times w_uv, quantised before anything is written.

Computes  x = out_latent @ (w_uv * its scales) in float32, rounded to out_latent's dtype;
          values, scales of x
          (specification: ops/project_quantize.py; numbers: backends/reference/project_quantize.py)
Grid      (cdiv(n, BLOCK_M), cdiv(V, BLOCK_N), H): one program owns some tokens' columns of a head,
          whole groups of them.
Reads     out_latent [n, H, C], w_uv [H, C, V], w_scale [H, KB, NB], global_scale [], rows [n]
Writes    values [T, O], scales
Limits    see why_not()
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
    SHARED_MEMORY,
    capability_of,
    cdiv,
    nearest_target,
)
from openmla.backends.triton._head_weights import (
    FEW_TOKENS,
    HeadWeights,
    Product,
    config_of,
    project_tile,
    tile_constants,
    weight_constants,
    weights_of,
    why_not_weights,
)
from openmla.backends.triton._primitives import round_to, widen
from openmla.backends.triton._quantize import (
    NOT_SPECIALIZED,
    output_arguments,
    output_constants,
    output_types,
    store_quantized,
    target_rows,
)
from openmla.backends.triton._spec import Case, Fixed, KernelSpec, case
from openmla.outputs import get_output_format

LAUNCHES = 1


@triton.jit(
    do_not_specialize=NOT_SPECIALIZED,
    do_not_specialize_on_alignment=DO_NOT_SPECIALIZE_ON_ALIGNMENT,
)
def _project_quantize_kernel(
    values, scales, global_scale, rows, x, w, w_scale,
    values_stride, scale_row, scale_column, first_row,
    num_rows, x_token, x_head, w_head, w_line, scale_head, scale_k, scale_n,
    K: tl.constexpr, N: tl.constexpr, SCALED_K: tl.constexpr, SCALED_N: tl.constexpr,
    EIGHT_BITS: tl.constexpr, BY_COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
    ASM: tl.constexpr, UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr, FP4: tl.constexpr, POW2: tl.constexpr, CVT: tl.constexpr,
    LISTED: tl.constexpr,
):  # fmt: skip
    PRODUCT: tl.constexpr = Product(
        K, N, SCALED_K, SCALED_N, EIGHT_BITS, BY_COLUMNS, PRECISION, ASM, UPCAST, False, BLOCK_M,
        BLOCK_N, BLOCK_K,
    )  # fmt: skip
    h = tl.program_id(2).to(tl.int64)
    t = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    first = tl.program_id(1) * BLOCK_N
    mask_m = t < num_rows
    # past the end, the last one again: zeros would take the slow path of a division
    x_token_at = tl.minimum(t, num_rows - 1) * x_token
    x += h * x_head
    weights = HeadWeights(w + h * w_head, w_scale + h * scale_head, w_line, scale_k, scale_n)
    n = first + tl.arange(0, BLOCK_N)
    acc = project_tile(x, x_token_at, mask_m, weights, n, PRODUCT)
    tile = widen(round_to(acc, x.dtype.element_ty, ASM))
    row = target_rows(rows, first_row, t, mask_m, LISTED)
    column = tl.program_id(2) * N + first
    store_quantized(
        tile, values, scales, global_scale, row, column, tl.program_id(2) * N + N, values_stride,
        scale_row, scale_column, GROUP, FP4, POW2, CVT, ASM,
    )  # fmt: skip


def why_not(problem: Problem) -> str | None:
    group = get_output_format(problem.format).group
    if group and problem.V % group:
        return f"takes heads of whole groups of {group} columns, these are {problem.V} wide"
    return why_not_weights(problem)


def run(
    values: Tensor,
    scales: Tensor | None,
    out_latent: Tensor,
    w_uv: Tensor,
    w_scale: Tensor | None,
    global_scale: Tensor | None,
    *,
    rows: Tensor | None,
    first_row: int,
    format: str,
) -> None:
    n, H, C = out_latent.shape
    V = w_uv.shape[2]
    if n * H * V == 0:
        return
    KB, NB = (1, 1) if w_scale is None else w_scale.shape[1:]
    launch = SPEC.launch(
        out_latent.dtype, n <= FEW_TOKENS, H, C, V, KB, NB, format,
        eight_bits=w_scale is not None, by_columns=w_uv.stride(2) == 1, listed=rows is not None,
        capability=capability_of(values.device),
    )  # fmt: skip
    weights = weights_of(w_uv, w_scale)
    pointers, numbers = output_arguments(values, scales, global_scale, rows, first_row)
    launch(
        (cdiv(n, launch.fixed["BLOCK_M"]), cdiv(V, launch.fixed["BLOCK_N"]), H),
        *pointers, out_latent, *weights.pointers,
        *numbers, n, *out_latent.stride()[:2], *weights.strides,
    )  # fmt: skip


def fix(
    dtype: torch.dtype, few: bool, H: int, C: int, V: int, KB: int, NB: int, format: str, *,
    eight_bits: bool, by_columns: bool, listed: bool, capability: int,
) -> Fixed:  # fmt: skip
    """Rows are cut as project_heads cuts them."""
    group = get_output_format(format).group
    room = SHARED_MEMORY[nearest_target(capability)]
    config = config_of(dtype, few, H, C, V, KB, eight_bits=eight_bits, least_n=group, room=room)
    constants = {
        **weight_constants(dtype, C, V, KB, NB, eight_bits=eight_bits, by_columns=by_columns),
        **tile_constants(config),
        **output_constants(format, capability),
        "LISTED": listed,
    }
    return Fixed(constants, config.num_warps, config.num_stages)


def cases(capability: int) -> Iterator[Case]:
    """Every kind of format, with a scale per head; few tokens and many, with blocks, with listed
    rows, of weights in 16 bits."""
    C, V = 512, 128
    for few, H, format, weights, listed in (
        (True, 128, "fp8", "fp8", False), (True, 128, "fp8_128", "fp8", False),
        (True, 128, "fp8_64_pow2", "fp8", False), (True, 128, "nvfp4", "fp8", False),
        (False, 128, "nvfp4", "fp8", False), (True, 16, "fp8_128", "blocks128", False),
        (False, 128, "fp8_128", "blocks128", True), (True, 128, "fp8_128", "bf16", False),
    ):  # fmt: skip
        KB, NB = (C // 128, V // 128) if weights == "blocks128" else (1, 1)
        name = f"project-quantize-{format}-H{H}-{'few' if few else 'many'}-{weights}"
        own = {"w": "*bf16", "w_scale": "*bf16"} if weights == "bf16" else {}
        yield case(
            name + "-listed" * listed, torch.bfloat16, few, H, C, V, KB, NB, format,
            eight_bits=weights != "bf16", by_columns=False, listed=listed, capability=capability,
            types={**own, **output_types(format, rows=listed)},
        )  # fmt: skip


SPEC = KernelSpec(
    _project_quantize_kernel,
    fix,
    types={"*bf16": "x", "*u8": "w", "*fp32": "w_scale"},
    cases=cases,
    fp_fusion=True,  # float32 is summed as torch sums it; no quantizer adds to a product
)
SPECS = (SPEC,)
