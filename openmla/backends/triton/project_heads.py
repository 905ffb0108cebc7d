"""project_heads, Triton: one small matrix per head, its weights in eight bits or as they are.

Computes  out[t, h] = x[t, h] @ (w[h] * its scales), summed in float32
          (specification: ops/project_heads.py; numbers: backends/reference/project_heads.py)
Grid      (cdiv(T, BLOCK_M), cdiv(N, BLOCK_N), H): one program owns some tokens' columns of a head.
Reads     x [T, H, K], w [H, K, N], w_scale [H, KB, NB]
Writes    out [T, H, N]
Limits    see why_not()
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from openmla.backends import Problem
from openmla.backends.kernels import Variant
from openmla.backends.triton._build import SHARED_MEMORY, TYPES, cdiv
from openmla.backends.triton._head_weights import (
    FEW_OF_FIXED,
    FEW_TOKENS,
    HeadWeights,
    Product,
    config_of,
    fixed_config,
    project_tile,
    tile_constants,
    weight_constants,
    weights_of,
    why_not_weights,
)
from openmla.backends.triton._primitives import round_to
from openmla.backends.triton._spec import Case, Fixed, KernelSpec, case
from openmla.hardware import shared_memory

LAUNCHES = 1
COLUMNS_AT_ONCE = tl.constexpr(8)  # tiles of them


@triton.jit(do_not_specialize=["num_tokens"])
def _project_heads_kernel(
    out, x, w, w_scale,
    num_tokens, out_token, out_head, x_token, x_head, w_head, w_line, scale_head, scale_k, scale_n,
    K: tl.constexpr, N: tl.constexpr, SCALED_K: tl.constexpr, SCALED_N: tl.constexpr,
    EIGHT_BITS: tl.constexpr, BY_COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
    ASM: tl.constexpr, UPCAST: tl.constexpr, MASKED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    PRODUCT: tl.constexpr = Product(
        K, N, SCALED_K, SCALED_N, EIGHT_BITS, BY_COLUMNS, PRECISION, ASM, UPCAST, MASKED, BLOCK_M,
        BLOCK_N, BLOCK_K,
    )  # fmt: skip
    h = tl.program_id(2).to(tl.int64)
    # programs at work together share tokens and columns, which then come from L2
    column, token = tl.swizzle2d(
        tl.program_id(1), tl.program_id(0), tl.num_programs(1), tl.num_programs(0), COLUMNS_AT_ONCE
    )
    t = token.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = column * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_m = t < num_tokens
    x_token_at = tl.minimum(t, num_tokens - 1) * x_token  # past the end, the last one again
    x += h * x_head
    weights = HeadWeights(w + h * w_head, w_scale + h * scale_head, w_line, scale_k, scale_n)
    acc = project_tile(x, x_token_at, mask_m, weights, n, PRODUCT)
    at = out + h * out_head + (t * out_token)[:, None] + n[None, :]
    mask = mask_m[:, None] & (n < N)[None, :]
    tl.store(at, round_to(acc, out.dtype.element_ty, ASM), mask=mask)


def why_not(problem: Problem) -> str | None:
    return why_not_weights(problem)


def kernel_for(problem: Problem) -> Variant:
    return Variant(partial(run, fixed=problem.batch_invariant))


def kernel_of(problem: Problem) -> str:
    return "one order of sums" if problem.batch_invariant else ""


def run(out: Tensor, x: Tensor, w: Tensor, w_scale: Tensor | None, *, fixed: bool = False) -> None:
    T, H, N = out.shape
    if T * H * N == 0:
        return
    KB, NB = (1, 1) if w_scale is None else w_scale.shape[1:]
    few = T <= FEW_OF_FIXED if fixed else T <= FEW_TOKENS
    room = shared_memory(x.device) if fixed else 0
    launch = SPEC.launch(
        x.dtype, few, H, w.shape[1], N, KB, NB,
        eight_bits=w_scale is not None, by_columns=w.stride(2) == 1, fixed=fixed, room=room,
        float32_out=out.dtype != x.dtype,
    )  # fmt: skip
    block_m, block_n = launch.fixed["BLOCK_M"], launch.fixed["BLOCK_N"]
    weights = weights_of(w, w_scale)
    launch(
        (cdiv(T, block_m), cdiv(N, block_n), H),
        out, x, *weights.pointers,
        T, *out.stride()[:2], *x.stride()[:2], *weights.strides,
    )  # fmt: skip


def fix(
    dtype: torch.dtype, few: bool, H: int, K: int, N: int, KB: int, NB: int, *,
    eight_bits: bool, by_columns: bool, fixed: bool = False, room: int = 0,
    float32_out: bool = False,
) -> Fixed:  # fmt: skip
    """`fixed`: bits do not depend on the tokens, and so much shared memory is there for loads in
    flight."""
    sizes = dtype, few, H, K, N, KB
    if fixed:
        config = fixed_config(*sizes, eight_bits=eight_bits, room=room, float32_out=float32_out)
    else:
        config = config_of(*sizes, eight_bits=eight_bits)
    constants = {
        **weight_constants(dtype, K, N, KB, NB, eight_bits=eight_bits, by_columns=by_columns),
        **tile_constants(config),
        "MASKED": fixed,
    }
    return Fixed(constants, config.num_warps, config.num_stages)


def cases(capability: int) -> Iterator[Case]:
    """Queries into latent space and outputs out of it, with a scale per head and with blocks, of
    few tokens and of many; weights in 16 bits."""
    room = SHARED_MEMORY[capability]
    for (H, few), (K, N), block in product(
        ((128, True), (128, False), (16, True)), ((128, 512), (512, 128)), (0, 128)
    ):
        yield project_case(room, few, H, K, N, block, by_columns=N == 512)
    yield project_case(room, True, 128, 128, 512, eight_bits=False, by_columns=True)
    yield project_case(room, True, 16, 512, 128, by_columns=False, dtype=torch.float32)
    # whose bits do not depend on the tokens: w_uk, w_uv, kv_b_proj, q_a_proj
    fixed: dict[str, Any] = {"eight_bits": False, "fixed": True}
    for few, (H, K, N) in product(
        (True, False), ((128, 128, 512), (128, 512, 128), (1, 512, 32768), (1, 7168, 1536))
    ):
        yield project_case(room, few, H, K, N, by_columns=N == 512, **fixed)
    # and the sum of a row's squares; a compressor's projection
    yield project_case(room, False, 1, 1536, 1, by_columns=True, dtype=torch.float32, **fixed)
    yield project_case(room, False, 1, 7168, 1024, by_columns=False, wide=True, **fixed)


def project_case(
    room: int, few: bool, H: int, K: int, N: int, block: int = 0, *, eight_bits: bool = True,
    by_columns: bool, dtype: torch.dtype = torch.bfloat16, fixed: bool = False, wide: bool = False,
) -> Case:  # fmt: skip
    KB, NB = (K // block, N // block) if block else (1, 1)
    own = "*" + TYPES[dtype]
    name = f"project-H{H}-{K}x{N}-{'few' if few else 'many'}{'-fixed' * fixed}{'-wide' * wide}"
    name += (f"-blocks{block}" if block else "-fp8") if eight_bits else ""
    name += "" if eight_bits and dtype == torch.bfloat16 else f"-{TYPES[dtype]}"
    types = {"x": own, "out": "*fp32" if wide else own}
    types |= {"w": "*u8", "w_scale": "*fp32"} if eight_bits else {"w": own, "w_scale": own}
    return case(
        name, dtype, few, H, K, N, KB, NB, eight_bits=eight_bits, by_columns=by_columns,
        fixed=fixed, room=room, float32_out=wide, types=types,
    )  # fmt: skip


SPEC = KernelSpec(
    _project_heads_kernel,
    fix,
    types={},
    cases=cases,
    fp_fusion=True,  # the same sums as in project_quantize
)
SPECS = (SPEC,)
