"""Small linears that are quantised, as others make them, and count what they are called with."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn


class FP8Linear(nn.Linear):
    """fp8 weights with a scale, and activations in fp8 too, as transformers' class of that name;
    counts the rows it was called with."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__(weight.shape[1], weight.shape[0], bias=False)
        scale = weight.abs().max() / 448
        codes = (weight / scale).to(torch.float8_e4m3fn)
        self.weight = nn.Parameter(codes, requires_grad=False)
        # as there, this one wants a gradient
        self.weight_scale_inv = nn.Parameter(scale.reshape(1, 1).clone())
        self.activation_scheme = "dynamic"
        self.rows: list[int] = []

    def forward(self, hidden: Tensor) -> Tensor:
        if hidden.dim() == 2:  # transformers' own modules have a batch before it
            assert hidden.is_contiguous()
            self.rows.append(hidden.shape[0])
        scale = hidden.abs().amax(-1, keepdim=True).clamp_min(1e-12) / 448
        codes = (hidden / scale).to(torch.float8_e4m3fn)
        return (codes.float() @ self.weight.float().T * scale * self.weight_scale_inv).to(
            hidden.dtype
        )


class Decoding(nn.Module):
    """Weights of 8 bits that are decoded whenever it is called."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.register_buffer("codes", (weight / 0.05).round().to(torch.int8))
        self.codes: Tensor
        self.rows: list[int] = []

    def forward(self, hidden: Tensor) -> Tensor:
        self.rows.append(hidden.shape[0])
        return hidden @ (self.codes.to(hidden.dtype) * 0.05).T


def with_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the CPU multiplied fp8."""
    monkeypatch.setattr("openmla.layers.weights.capability", lambda device: (9, 0))
