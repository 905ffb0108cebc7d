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
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from openmla.backends import Problem
from openmla.backends.triton._build import (
    DO_NOT_SPECIALIZE_ON_ALIGNMENT,
    SHARED_MEMORY,
    TARGETS,
    Build,
    capability_of,
    cdiv,
    nearest_target,
    signature_of,
)
from openmla.backends.triton._head_weights import (
    FEW_TOKENS,
    HeadWeights,
    Product,
    config_of,
    project_tile,
    weight_constants,
    weights_of,
    why_not_weights,
)
from openmla.backends.triton._prepare import Launch, prepare
from openmla.backends.triton._primitives import round_to, widen
from openmla.backends.triton._quantize import (
    NOT_SPECIALIZED,
    output_arguments,
    output_constants,
    output_types,
    store_quantized,
    target_rows,
)
from openmla.outputs import get_output_format

LAUNCHES = 1
FP_FUSION = True  # float32 is summed as torch sums it; no quantiser adds to a product


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
    launch = launch_of(
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


@lru_cache(maxsize=1024)
def launch_of(
    dtype: torch.dtype, few: bool, H: int, C: int, V: int, KB: int, NB: int, format: str, *,
    eight_bits: bool, by_columns: bool, listed: bool, capability: int,
) -> Launch:  # fmt: skip
    constants, warps, stages = constants_of(
        dtype, few, H, C, V, KB, NB, format,
        eight_bits=eight_bits, by_columns=by_columns, listed=listed, capability=capability,
    )  # fmt: skip
    return prepare(
        _project_quantize_kernel, constants, num_warps=warps, num_stages=stages,
        enable_fp_fusion=FP_FUSION,
    )  # fmt: skip


def constants_of(
    dtype: torch.dtype, few: bool, H: int, C: int, V: int, KB: int, NB: int, format: str, *,
    eight_bits: bool, by_columns: bool, listed: bool, capability: int,
) -> tuple[dict[str, Any], int, int]:  # fmt: skip
    """With the warps and stages that go with them; rows are cut as project_heads cuts them."""
    group = get_output_format(format).group
    room = SHARED_MEMORY[nearest_target(capability)]
    config = config_of(dtype, few, H, C, V, KB, eight_bits=eight_bits, least_n=group, room=room)
    weights = weight_constants(dtype, C, V, KB, NB, eight_bits=eight_bits, by_columns=by_columns)
    constants = {
        **weights,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        **output_constants(format, capability),
        "LISTED": listed,
    }
    return constants, config.num_warps, config.num_stages


def builds() -> Iterator[Build]:
    """Every kind of format, with a scale per head; few tokens and many, with blocks, with listed
    rows, of weights in 16 bits."""
    for capability in TARGETS:
        for format in ("fp8", "fp8_128", "fp8_64_pow2", "nvfp4"):
            yield project_build(capability, True, 128, format)
        yield project_build(capability, False, 128, "nvfp4")
        yield project_build(capability, True, 16, "fp8_128", block=128)
        yield project_build(capability, False, 128, "fp8_128", block=128, listed=True)
        yield project_build(capability, True, 128, "fp8_128", eight_bits=False)


def project_build(
    capability: int, few: bool, H: int, format: str, *,
    block: int = 0, eight_bits: bool = True, listed: bool = False,
) -> Build:  # fmt: skip
    C, V = 512, 128
    KB, NB = (C // block, V // block) if block else (1, 1)
    constants, warps, stages = constants_of(
        torch.bfloat16, few, H, C, V, KB, NB, format,
        eight_bits=eight_bits, by_columns=False, listed=listed, capability=capability,
    )  # fmt: skip
    types = {
        "x": "*bf16",
        "w": "*u8" if eight_bits else "*bf16",
        "w_scale": "*fp32" if eight_bits else "*bf16",
        **output_types(format, rows=listed),
    }
    name = f"project-quantize-{format}-H{H}-{'few' if few else 'many'}"
    name += (f"-blocks{block}" if block else "-fp8") if eight_bits else "-bf16"
    return Build(
        f"{name}{'-listed' if listed else ''}", _project_quantize_kernel,
        signature_of(_project_quantize_kernel, constants, types), constants, warps, stages,
        capability, FP_FUSION,
    )  # fmt: skip
