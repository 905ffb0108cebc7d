"""Expanded heads [S, H, E] as kernels require them: aligned rows, keys in one piece."""

from __future__ import annotations

import torch
from torch import Tensor


def aligned(tensor: Tensor) -> Tensor:
    """Copy unless rows start at multiples of 16 bytes: kernels load 16 bytes at a time."""
    pitch = 16 // tensor.dtype.itemsize
    starts = (tensor.storage_offset(), *tensor.stride()[:-1])
    if any(start % pitch for start in starts) or tensor.data_ptr() % 16:
        return tensor.clone(memory_format=torch.contiguous_format)
    return tensor


def joined(k: Tensor, k_pe: Tensor | None, into: Tensor | None = None) -> Tensor:
    """Join each head's own columns of keys and the shared ones, in `into` if given."""
    if k_pe is None:
        return k
    S, H, P = k.shape
    keys = k.new_empty((S, H, P + k_pe.shape[1])) if into is None else into
    # Two strided copies: a concatenation with a broadcast operand is slower.
    keys[:, :, :P] = k
    keys[:, :, P:] = k_pe[:, None, :]
    return keys
