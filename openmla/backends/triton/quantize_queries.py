"""quantize_queries, Triton: concatenate parts of queries and quantize them to e4m3 in one pass.

Computes  q [T, H, D] and scale [T, H] of latent and q_pe
          (specification: ops/quantize_queries.py)
Grid      (cdiv(T * H, BLOCK_H),): one program owns BLOCK_H rows, one per token and head.
Reads     latent [T, H, C], q_pe [T, H, R], q_scale []
Writes    q, scale
Limits    see why_not()
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from openmla.backends import Problem
from openmla.backends.triton._build import cdiv, next_power_of_2
from openmla.backends.triton._prepare import Piece
from openmla.backends.triton._primitives import encode_e4m3, widen
from openmla.backends.triton._spec import Fixed, KernelSpec, case

LAUNCHES = 1
INPUTS = (torch.bfloat16, torch.float16, torch.float32)
WIDEST = 4096  # columns of a row, held in registers
BLOCK_H = 4
E4M3_MAX = tl.constexpr(448.0)
SMALLEST = tl.constexpr(1e-10)  # lower bound of a row's largest value


@triton.jit
def magnitudes(values):
    """Return the largest magnitude per row as bits, which order NaN above all."""
    return tl.max(values.to(tl.uint32, bitcast=True) & 0x7FFFFFFF, 1)


@triton.jit(do_not_specialize=["num_rows"])
def _quantize_queries_kernel(
    q, scale, latent, q_pe, q_scale,
    x_token, x_head, rope_token, rope_head, num_rows,
    H: tl.constexpr, C: tl.constexpr, R: tl.constexpr, GIVEN: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_H + tl.arange(0, BLOCK_H)
    c, r = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_R)
    mask = (row < num_rows)[:, None] & (c < C)[None, :]
    mask_r = (row < num_rows)[:, None] & (r < R)[None, :]
    t, h = row // H, row % H
    at = latent + (t * x_token + h * x_head)[:, None] + c[None, :]
    values = widen(tl.load(at, mask=mask, other=0.0))
    at = q_pe + (t * rope_token + h * rope_head)[:, None] + r[None, :]
    rope = widen(tl.load(at, mask=mask_r, other=0.0))
    if GIVEN:
        found = tl.load(q_scale) + tl.zeros([BLOCK_H], tl.float32)
    else:
        largest = tl.maximum(magnitudes(values), magnitudes(rope)).to(tl.float32, bitcast=True)
        found = tl.div_rn(tl.where(largest < SMALLEST, SMALLEST, largest), E4M3_MAX)
    inverse = tl.div_rn(1.0, found)[:, None]
    at = (q + row * (C + R))[:, None]
    tl.store(at + c[None, :], encode_e4m3(values * inverse), mask=mask)
    tl.store(at + (C + r)[None, :], encode_e4m3(rope * inverse), mask=mask_r)
    tl.store(scale + row, found, mask=row < num_rows)


def why_not(problem: Problem) -> str | None:
    if problem.dtype not in INPUTS:
        return f"takes 16- and 32-bit queries, this is {problem.dtype}"
    if problem.D > WIDEST:
        return f"holds rows of up to {WIDEST} values, this is {problem.D}"
    return None


def run(latent: Tensor, q_pe: Tensor, q_scale: Tensor | None) -> tuple[Tensor, Tensor]:
    (T, H, C), R = latent.shape, q_pe.shape[2]
    q = latent.new_empty((T, H, C + R), dtype=torch.float8_e4m3fn)
    scale = latent.new_empty((T, H), dtype=torch.float32)
    if T * H:
        SPEC.launch(H, C, R, q_scale is not None)(
            (cdiv(T * H, BLOCK_H),),
            Piece(q, 0, torch.uint8),
            scale,
            latent,
            q_pe,
            scale if q_scale is None else q_scale,
            latent.stride(0),
            latent.stride(1),
            q_pe.stride(0),
            q_pe.stride(1),
            T * H,
        )
    return q, scale


def fix(H: int, C: int, R: int, given: bool) -> Fixed:
    return Fixed(
        {
            "H": H,
            "C": C,
            "R": R,
            "GIVEN": given,
            "BLOCK_H": BLOCK_H,
            "BLOCK_C": next_power_of_2(C),
            "BLOCK_R": next_power_of_2(R),
        }
    )


SPEC = KernelSpec(
    _quantize_queries_kernel,
    fix,
    types={"*u8": "q", "*bf16": "latent q_pe", "*fp32": "scale q_scale"},
    cases=lambda _: [
        case(f"quantize-queries{'-given' * given}-H128-D576", 128, 512, 64, given)
        for given in (False, True)
    ],
    fp_fusion=False,  # bytes must not depend on how the compiler contracts
)
SPECS = (SPEC,)
