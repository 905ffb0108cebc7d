"""RMSNorm."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from openmla.attention.products import rms_normed


class RMSNorm(nn.Module):
    """Normalised in float32, rounded, then weighted: the order models are trained with."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width), requires_grad=False)
        self.eps = eps

    def forward(self, hidden: Tensor, fixed_by: str | None = None) -> Tensor:
        """`fixed_by` is the plan's."""
        return self.weight * rms_normed(hidden, self.eps, fixed_by)
