"""project_heads, reference: dequantized weights, then one matmul per head.

A library matmul may change its order of summation with the number of rows. Where bits must not
depend on that, rows are multiplied one by one. Each is copied first, so that its address does not
depend on its place either.
"""

from __future__ import annotations

import torch
from torch import Tensor

from openmla.backends import Problem
from openmla.backends.kernels import Variant
from openmla.backends.reference._weights import scaled


def why_not(problem: Problem) -> str | None:
    return None


def kernel_for(problem: Problem) -> Variant:
    return Variant(run=run_rows if problem.batch_invariant else run)


def kernel_of(problem: Problem) -> str:
    return "row by row" if problem.batch_invariant else ""


def run(out: Tensor, x: Tensor, w: Tensor, w_scale: Tensor | None) -> None:
    out.copy_(product(x, w, w_scale))


def run_rows(out: Tensor, x: Tensor, w: Tensor, w_scale: Tensor | None) -> None:
    wide = torch.promote_types(x.dtype, torch.float32)
    weights = scaled(w, w_scale, wide)
    for row, one in zip(out, x, strict=True):
        row.copy_(torch.bmm(one[:, None].to(wide, copy=True), weights)[:, 0])


def product(x: Tensor, w: Tensor, w_scale: Tensor | None) -> Tensor:  # [T, H, N], wide
    """Multiply in float32, or in float64 for float64 x."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return torch.bmm(x.transpose(0, 1).to(wide), scaled(w, w_scale, wide)).transpose(0, 1)
