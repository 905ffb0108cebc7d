"""rope, Triton: rotate columns by position, in place.

Computes  pairs: (x[2i], x[2i+1]), halves: (x[i], x[i+R/2])  <-  (a c - b s, b c + a s)
          in float32 (float64 if x or the table is), rounded once (specification: ops/rope.py)
Grid      (T', cdiv(H, BLOCK_H)): one program owns one token and BLOCK_H heads.
Reads     x [T, H, R], positions [T'], table [Q, R]
Writes    x
Limits    none
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from openmla.backends import Problem
from openmla.backends.triton._build import (
    DO_NOT_SPECIALIZE_ON_ALIGNMENT,
    assembly,
    cdiv,
    next_power_of_2,
)
from openmla.backends.triton._primitives import rotate_first, rotate_second, round_to, widen_to
from openmla.backends.triton._spec import Fixed, KernelSpec, case

ELEMENTS = 4096  # elements per tile: 32 per thread of 4 warps, 1024 per warp

LAUNCHES = 1


@triton.jit(do_not_specialize_on_alignment=DO_NOT_SPECIALIZE_ON_ALIGNMENT)
def _rope_kernel(
    x, positions, table, x_token, x_head, table_stride, positions_stride,
    H: tl.constexpr, HALF: tl.constexpr, PAIRS: tl.constexpr, INVERSE: tl.constexpr,
    dtype: tl.constexpr, ASM: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    i = tl.arange(0, BLOCK_I)
    angles = table + tl.load(positions + t * positions_stride) * table_stride + i
    cos = widen_to(tl.load(angles, mask=i < HALF, other=0.0), dtype)[None, :]
    sin = widen_to(tl.load(angles + HALF, mask=i < HALF, other=0.0), dtype)[None, :]
    if INVERSE:
        sin = -sin
    at = (x + t * x_token + heads.to(tl.int64) * x_head)[:, None]
    mask = (heads < H)[:, None] & (i < HALF)[None, :]
    if PAIRS:  # both columns of a pair in one load
        c = tl.arange(0, 2 * BLOCK_I)[None, :]
        mask_c = (heads < H)[:, None] & (c < 2 * HALF)
        both = tl.load(at + c, mask=mask_c, other=0.0)
        first, second = tl.split(tl.reshape(both, [BLOCK_H, BLOCK_I, 2]))
    else:
        first = tl.load(at + i[None, :], mask=mask, other=0.0)
        second = tl.load(at + (HALF + i)[None, :], mask=mask, other=0.0)
    a = widen_to(first, dtype)
    b = widen_to(second, dtype)
    new_first = round_to(rotate_first(a, b, cos, sin), x.dtype.element_ty, ASM)
    new_second = round_to(rotate_second(a, b, cos, sin), x.dtype.element_ty, ASM)
    tl.debug_barrier()  # threads may hold the same columns: all must read before any writes
    if PAIRS:
        both = tl.reshape(tl.join(new_first, new_second), [BLOCK_H, 2 * BLOCK_I])
        tl.store(at + c, both, mask=mask_c)
    else:
        tl.store(at + i[None, :], new_first, mask=mask)
        tl.store(at + (HALF + i)[None, :], new_second, mask=mask)


def why_not(problem: Problem) -> str | None:
    return None


def run(x: Tensor, positions: Tensor, table: Tensor, *, pairing: str, inverse: bool) -> None:
    _, H, R = x.shape
    if positions.shape[0] * H * R == 0:
        return
    launch = SPEC.launch(
        H, R, pairing=pairing, inverse=inverse, double=torch.float64 in (x.dtype, table.dtype)
    )
    launch(
        (positions.shape[0], cdiv(H, launch.fixed["BLOCK_H"])),
        x,
        positions,
        table,
        x.stride(0),
        x.stride(1),
        table.stride(0),
        positions.stride(0),
    )


def fix(H: int, R: int, *, pairing: str, inverse: bool, double: bool) -> Fixed:
    block_i = next_power_of_2(R // 2)
    block_h = min(next_power_of_2(H), max(ELEMENTS // (2 * block_i), 1))
    constants = {
        "H": H,
        "HALF": R // 2,
        "PAIRS": pairing == "pairs",
        "INVERSE": inverse,
        "dtype": tl.float64 if double else tl.float32,
        "ASM": assembly(),
        "BLOCK_H": block_h,
        "BLOCK_I": block_i,
    }
    return Fixed(constants, num_warps=min(max(block_h * 2 * block_i // 1024, 1), 4))


SPEC = KernelSpec(
    _rope_kernel,
    fix,
    types={"*bf16": "x", "*i64": "positions", "*fp32": "table"},
    cases=lambda _: [
        case(f"rope-{pairing}-H128-R64", 128, 64, pairing=pairing, inverse=False, double=False)
        for pairing in ("pairs", "halves")
    ],
    fp_fusion=True,
)
SPECS = (SPEC,)
