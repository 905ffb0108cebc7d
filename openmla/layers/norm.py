"""RMSNorm, and the gated one of GigaChat 3.5."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from openmla.attention.products import rms_normed
from openmla.layers.linear import wide_linear

GATE_RANK = 16


class RMSNorm(nn.Module):
    """Normalizes in float32, rounds, then multiplies by the weight, in the order of training."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width), requires_grad=False)
        self.eps = eps

    def forward(self, hidden: Tensor, fixed_by: str | None = None) -> Tensor:
        """Normalize the last dimension. `fixed_by`: from the plan."""
        return self.weight * rms_normed(hidden, self.eps, fixed_by)


class GatedNorm(nn.Module):
    """RMSNorm times 1 + weight, then times `gate` and the sigmoid of a low-rank projection of the
    result. Parameter names match checkpoints of GigaChat 3.5."""

    def __init__(self, width: int, eps: float, gate: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))
        self.gate_up_projection = nn.Linear(width, GATE_RANK, bias=False)
        self.gate_down_projection = nn.Linear(GATE_RANK, width, bias=False)
        self.eps, self.gate = eps, gate
        self.requires_grad_(False)

    def forward(self, hidden: Tensor, fixed_by: str | None = None) -> Tensor:
        """Normalize the last dimension of [T, width]. `fixed_by`: from the plan."""
        wide = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
        normed = (rms_normed(wide, self.eps, fixed_by) * (1 + self.weight)).to(hidden.dtype)
        low = wide_linear(normed, self.gate_up_projection.weight, fixed_by)
        low = nn.functional.silu(low)
        gate = wide_linear(low, self.gate_down_projection.weight, fixed_by).sigmoid()
        return (normed * gate * self.gate).to(hidden.dtype)


def latent_norm(width: int, eps: float, gate: float) -> RMSNorm | GatedNorm:
    """Make the norm of a latent; `gate` is norm_gate of the config."""
    return GatedNorm(width, eps, gate) if gate else RMSNorm(width, eps)
