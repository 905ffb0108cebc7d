"""Dequantized head weights: e4m3 values times the scales of their blocks."""

from __future__ import annotations

import torch
from torch import Tensor


def scaled(w: Tensor, w_scale: Tensor | None, dtype: torch.dtype) -> Tensor:  # [H, K, N]
    """Dequantize in `dtype`, float32 or wider: a product of 4 and 24 bits rounds at most once."""
    wide = w.to(dtype)
    if w_scale is None:
        return wide
    (H, K, N), (KB, NB) = w.shape, w_scale.shape[1:]
    blocks = wide.reshape(H, KB, K // KB, NB, N // NB) * w_scale.to(dtype)[:, :, None, :, None]
    return blocks.reshape(H, K, N)
