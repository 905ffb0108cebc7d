"""quantize_heads, reference: widen heads to float32, scale, then encode."""

from __future__ import annotations

import torch
from torch import Tensor

from openmla.backends import Problem
from openmla.backends.reference._quantize import encode_fp8
from openmla.cache.format import FP8_MAX, power_of_two

SMALLEST = 2.0**-60  # lower bound of a row's largest magnitude


def why_not(problem: Problem) -> str | None:
    return None


def run(
    values: Tensor,
    row_scale: Tensor | None,
    x: Tensor,
    shared: Tensor | None,
    head_scale: Tensor | None,
    requests: Tensor | None,
) -> None:
    x = x.to(torch.float32)
    if shared is not None:
        x = torch.cat([x, shared.to(torch.float32)[:, None].expand(-1, x.shape[1], -1)], dim=2)
    if row_scale is None:
        assert head_scale is not None and requests is not None
        scale = head_scale[requests]
    else:
        most = torch.full((), FP8_MAX, device=x.device)  # torch multiplies by a number's reciprocal
        largest = x.abs().amax(2) if x.shape[2] else x.new_zeros(x.shape[:2])
        scale = power_of_two(largest.clamp_min(SMALLEST) / most)
        scale = scale.masked_fill(~scale.isfinite(), torch.nan)
        row_scale.copy_(scale)
    codes = encode_fp8(x * scale.reciprocal()[:, :, None])
    values.copy_(codes.view(values.dtype))
