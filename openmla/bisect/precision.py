"""Precision: the arithmetic a component is computed in, exact or as plain PyTorch would round.

The latter is the error budget: every result rounded to the model's dtype, sums of products in
float32 in the least careful order. Bounds therefore follow from the precision, for any shape.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

EXACT_DTYPE = torch.float64


@dataclass(frozen=True)
class Precision:
    """float64 is exact; with any other dtype, results are rounded to it."""

    dtype: torch.dtype

    @property
    def exact(self) -> bool:
        return self.dtype == EXACT_DTYPE

    @property
    def wide(self) -> torch.dtype:
        """The dtype of sums."""
        return EXACT_DTYPE if self.exact else torch.float32

    def take(self, given: Tensor) -> Tensor:
        """Take a tensor from outside: unchanged if exact, else rounded."""
        return given.to(self.dtype)

    def product(self, x: Tensor, w: Tensor) -> Tensor:
        """x [..., n, K] @ w [..., K, m], kept wide.

        If not exact: float32 sums of K terms may have an error of u * sqrt(K) times the sum of
        magnitudes, in any order of summation. That much is added, with alternating signs.
        """
        wide = self.wide
        x, w = x.to(wide), w.to(wide)
        result = x @ w
        if self.exact or result.numel() == 0:
            return result
        slack = 0.5 * torch.finfo(torch.float32).eps * math.sqrt(x.shape[-1])
        signs = torch.ones(result.shape[-1], device=result.device)
        signs[1::2] = -1
        return result + signs * slack * (x.abs() @ w.abs())

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """A projection like nn.Linear, rounded once."""
        result = self.product(self.take(x), self.take(weight).mT)
        if bias is not None:
            result = result + self.take(bias).to(self.wide)
        return result.to(self.dtype)

    def rms_norm(self, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        """Normalize, round, multiply by the weight, round: the order models are trained with.

        Without a weight (V4's queries) transformers rounds the reciprocal root itself.
        """
        values = self.take(x).to(self.wide)
        root = (values.square().mean(-1, keepdim=True) + eps).rsqrt() * self._root
        if weight is None:
            return self.take(x) * root.to(self.dtype)
        return self.take(weight) * (values * root).to(self.dtype)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        values, wide = self.take(x).to(self.wide), self.wide
        shape, scale, shift = values.shape[-1:], weight.to(wide), bias.to(wide)
        normed = torch.nn.functional.layer_norm(values, shape, None, None, eps) * self._root
        return (normed * scale + shift).to(self.dtype)

    @property
    def _root(self) -> float:
        """Error factor: reciprocal roots are accurate to two units in the last place on GPUs."""
        return 1.0 if self.exact else 1.0 + 2 * torch.finfo(torch.float32).eps


EXACT = Precision(EXACT_DTYPE)
