"""project_heads, reference: weights multiplied out, then one product a head."""

from __future__ import annotations

import torch
from torch import Tensor

from openmla.backends import Problem
from openmla.backends.reference._weights import scaled


def why_not(problem: Problem) -> str | None:
    return None


def run(out: Tensor, x: Tensor, w: Tensor, w_scale: Tensor | None) -> None:
    out.copy_(product(x, w, w_scale))


def product(x: Tensor, w: Tensor, w_scale: Tensor | None) -> Tensor:  # [T, H, N], wide
    """In float32, float64 for float64 x."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return torch.bmm(x.transpose(0, 1).to(wide), scaled(w, w_scale, wide)).transpose(0, 1)
