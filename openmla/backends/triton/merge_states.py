"""merge_states, Triton: merge two partial attentions over disjoint keys, in place.

Computes  m = max(lse, other_lse);  weights = exp(lse - m), exp(other_lse - m);  z = their sum
          out = (weight * out + other weight * other_out) / z;  lse = m + log(z)
          (specification: ops/merge_states.py; numbers: backends/reference/merge_states.py)
Grid      (cdiv(T * H, BLOCK_N),): one program owns BLOCK_N rows with all columns.
Reads     out, other_out [T, H, V], lse, other_lse [T, H]
Writes    out, lse
Limits    see why_not()
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from openmla.backends import Problem
from openmla.backends.triton._build import assembly, cdiv, next_power_of_2
from openmla.backends.triton._primitives import merge_weights, round_to, widen_to
from openmla.backends.triton._spec import Fixed, KernelSpec, case

ELEMENTS = 2048  # elements per tile: 16 per thread and side
ROWS = 128  # rows per tile, at most

LAUNCHES = 1


# States of some tokens may not start at 16 bytes: if the number of heads is no multiple of 4.
@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["lse", "other_lse"])
def _merge_states_kernel(
    out, lse, other_out, other_lse,
    out_token, out_head, lse_token, lse_head,
    other_out_token, other_out_head, other_lse_token, other_lse_head, num_rows,
    H: tl.constexpr, V: tl.constexpr, dtype: tl.constexpr, ASM: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = row < num_rows
    t, h = row // H, row % H
    lse_at = lse + t * lse_token + h * lse_head
    other_lse_at = other_lse + t * other_lse_token + h * other_lse_head
    own = widen_to(tl.load(lse_at, mask=mask, other=float("-inf")), dtype)
    other = widen_to(tl.load(other_lse_at, mask=mask, other=float("-inf")), dtype)
    valid, other_valid, weight, other_weight, merged = merge_weights(own, other)
    weight = weight[:, None]
    other_weight = other_weight[:, None]
    # lse may alias other_lse: no warp may write it before all have read it
    tl.debug_barrier()
    tl.store(lse_at, merged.to(lse.dtype.element_ty), mask=mask)
    at = (out + t * out_token + h * out_head)[:, None]
    other_at = (other_out + t * other_out_token + h * other_out_head)[:, None]
    for start in range(0, V, BLOCK_V):
        v = (start + tl.arange(0, BLOCK_V))[None, :]
        columns = tl.load(at + v, mask=valid[:, None] & (v < V), other=0.0)
        others = tl.load(other_at + v, mask=other_valid[:, None] & (v < V), other=0.0)
        values = widen_to(columns, dtype) * weight + widen_to(others, dtype) * other_weight
        tl.store(at + v, round_to(values, out.dtype.element_ty, ASM), mask=mask[:, None] & (v < V))


def why_not(problem: Problem) -> str | None:
    return None


def run(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> None:
    T, H, V = out.shape
    if T * H == 0:
        return
    tensors = (out, lse, other_out, other_lse)
    launch = SPEC.launch(H, V, double=any(t.dtype == torch.float64 for t in tensors))
    launch(
        (cdiv(T * H, launch.fixed["BLOCK_N"]),),
        *tensors,
        *(stride for tensor in tensors for stride in tensor.stride()[:2]),
        T * H,
    )


def fix(H: int, V: int, *, double: bool) -> Fixed:
    block_v = next_power_of_2(min(max(V, 1), ELEMENTS))
    return Fixed(
        {
            "H": H,
            "V": V,
            "dtype": tl.float64 if double else tl.float32,
            "ASM": assembly(),
            "BLOCK_N": min(ELEMENTS // block_v, ROWS),
            "BLOCK_V": block_v,
        }
    )


SPEC = KernelSpec(
    _merge_states_kernel,
    fix,
    types={"*bf16": "out other_out", "*fp32": "lse other_lse"},
    cases=lambda _: [case(f"merge-H128-V{V}", 128, V, double=False) for V in (512, 128)],
    fp_fusion=True,
)
SPECS = (SPEC,)
