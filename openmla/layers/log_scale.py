"""LogScale: a learned scale of queries that grows with the logarithm of the position."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class LogScale(nn.Module):
    """Multiplies the query of head h at position p by scale[h] ln(p + 1) + bias[h], in float32."""

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(num_heads), requires_grad=False)
        self.bias = nn.Parameter(torch.ones(num_heads), requires_grad=False)

    def forward(self, q: Tensor, positions: Tensor) -> Tensor:  # [T, H, E], [T]
        wide = torch.promote_types(q.dtype, torch.float32)
        log = torch.log1p(positions.to(wide))[:, None]
        factor = log * self.scale.to(wide) + self.bias.to(wide)
        return (q * factor[:, :, None]).to(q.dtype)
