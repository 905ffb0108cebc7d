"""RMSNorm, with a weight and without."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def rms_normed(hidden: Tensor, eps: float) -> Tensor:
    """Normalised over the last dimension in float32, rounded once."""
    wide = hidden.float() if hidden.dtype.itemsize < 4 else hidden
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(hidden.dtype)


class RMSNorm(nn.Module):
    """Normalised in float32, rounded, then weighted: the order models are trained with."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width), requires_grad=False)
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        return self.weight * rms_normed(hidden, self.eps)
