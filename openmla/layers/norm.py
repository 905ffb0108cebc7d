"""RMSNorm."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from openmla.attention.products import rms_normed


class RMSNorm(nn.Module):
    """Normalizes in float32, rounds, then multiplies by the weight, in the order of training."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width), requires_grad=False)
        self.eps = eps

    def forward(self, hidden: Tensor, fixed_by: str | None = None) -> Tensor:
        """Normalize the last dimension. `fixed_by`: from the plan."""
        return self.weight * rms_normed(hidden, self.eps, fixed_by)
