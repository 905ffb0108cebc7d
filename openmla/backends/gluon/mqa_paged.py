"""mqa_paged, Gluon: rows of V3 in 16 bits, tokens times heads in tiles of 64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from openmla.backends import Problem
from openmla.backends.gluon import _paged as kernels
from openmla.backends.gluon._launch import FP_FUSION, NUM_WARPS
from openmla.backends.gluon._shapes import needs_nvidia, needs_sm90
from openmla.backends.triton import _merge_parts as merge
from openmla.backends.triton._build import Build, cdiv, next_power_of_2, signature_of
from openmla.backends.triton._launch import LOG2E, inner_contiguous
from openmla.hardware import multiprocessors

LAUNCHES = 2  # the second merges what was split
BLOCK_M, STEP = 64, 128  # rows and keys of a program's step
TILES = 2  # of an item: programs that read the same keys at the same time, mostly from L2
BOXES = (8, 16, 32)  # rows of a bulk copy, where pages are no multiple of a tile of keys
# Registers a thread of the odd and of the loading warp group has; with others they spill.
REGISTERS = {"ODD_REGISTERS": 224, "LOAD_REGISTERS": 56}
BOX_COLUMNS = 64  # 128 bytes: one swizzle span
BOX_LAYOUT = gl.NVMMASharedLayout(128, 16, 2)
FORMATS = {"bf16": torch.bfloat16, "fp16": torch.float16}


def why_not(problem: Problem) -> str | None:
    if needs_nvidia():
        return needs_nvidia()
    if FORMATS.get(problem.format) != problem.dtype:
        return f"takes queries of the cache's 16 bits, this is {problem.dtype} and {problem.format}"
    if (problem.D, problem.C) != (576, 512):
        return f"needs rows of 512 + 64, this is {problem.C} + {problem.D - problem.C}"
    if problem.BS % BLOCK_M and problem.BS not in BOXES:
        return f"needs pages of 8, 16, 32 or a multiple of 64 rows, this is {problem.BS}"
    if "rows" not in problem.aligned:
        return "needs rows at multiples of 16 bytes, no padding between pages, fewer than 2**33"
    return needs_sm90(problem)


def item_tokens(H: int, max_query_len: int) -> int:
    """Query tokens that share the keys of a tile, or of TILES of them; a power of two if they fit,
    so that few numbers of tokens are kernels of their own."""
    tiles = max(cdiv(H, BLOCK_M), min(cdiv(max_query_len * H, BLOCK_M), TILES))
    return max(min(tiles * BLOCK_M // H, next_power_of_2(max_query_len)), 1)


def run(
    q_latent: Tensor,
    cache: Tensor,
    kv_scale: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    *,
    format: str,
    C: int,
    scale: float,
    causal: bool,
    max_query_len: int,
    run_length: int,
) -> tuple[Tensor, Tensor]:
    T, H, D = q_latent.shape
    N, BS, _ = cache.shape
    B, M = block_table.shape
    tokens = item_tokens(H, max_query_len)
    tiles = cdiv(tokens * H, BLOCK_M)
    programs = max(multiprocessors(q_latent.device) // tiles, 1)
    unit, box = cdiv(run_length, STEP) * STEP or STEP, min(BS, BLOCK_M)
    outputs = merge.make_outputs(
        q_latent, C, rows=tiles * BLOCK_M, items=B * cdiv(max_query_len, tokens),
        programs=programs, units=max(cdiv(M * BS, unit), 1), fixed=run_length > 0,
    )  # fmt: skip
    if T == 0:
        return outputs.out, outputs.lse
    table = inner_contiguous(block_table)
    flat = cache.as_strided((N * BS, D), (cache.stride(1), 1))  # the last row may be unpadded
    kernels._paged_kernel[(tiles, programs)](
        q_latent,
        TensorDescriptor.from_tensor(flat, [box, BOX_COLUMNS], BOX_LAYOUT),
        query_start_loc.contiguous(),
        seq_lens.contiguous(),
        table,
        outputs.out,
        outputs.lse,
        outputs.part,
        outputs.part_lse,
        outputs.spans,
        B,
        T,
        unit,
        scale * LOG2E,
        q_latent.stride(0),
        q_latent.stride(1),
        table.stride(0),
        N * BS,
        outputs.rows,
        **paged_constants(H, BS, tokens, causal=causal, fixed=run_length > 0),
        num_warps=NUM_WARPS,
        enable_fp_fusion=FP_FUSION,
    )
    merge.merge_parts(outputs, overlapped=True)
    return outputs.out, outputs.lse


def paged_constants(H: int, BS: int, tokens: int, *, causal: bool, fixed: bool) -> dict[str, Any]:
    return {
        "BS": BS,
        "BOX": min(BS, BLOCK_M),
        "H": H,
        "TOKENS": tokens,
        "CAUSAL": causal,
        "FOLDED": causal and tokens > 1,
        "FIXED": fixed,
        "BLOCK_T": next_power_of_2(tokens),
        **REGISTERS,
    }


def builds() -> Iterator[Build]:
    kernel: Any = kernels._paged_kernel
    types = {
        **dict.fromkeys(("query_start_loc", "seq_lens", "table", "spans"), "*i32"),
        **dict.fromkeys(("lse", "part", "part_lse"), "*fp32"),
        "qk_scale": "fp32",
    }
    for H, BS, tokens, fixed, dtype in (
        (128, 64, 1, False, "bf16"), (16, 64, 1, False, "bf16"), (64, 64, 2, False, "bf16"),
        (16, 16, 4, False, "fp16"), (128, 64, 1, True, "bf16"),
    ):  # fmt: skip
        constants = paged_constants(H, BS, tokens, causal=True, fixed=fixed)
        own = {
            **types, "q": f"*{dtype}", "out": f"*{dtype}",
            "rows": f"tensordesc<{dtype}[{constants['BOX']}, {BOX_COLUMNS}],{BOX_LAYOUT!r}>",
        }  # fmt: skip
        name = f"many-rows-{dtype}-H{H}x{tokens}-BS{BS}{'-fixed' if fixed else ''}"
        signature = signature_of(kernel, constants, own)
        yield Build(name, kernel, signature, constants, NUM_WARPS, 1, 90, FP_FUSION)
