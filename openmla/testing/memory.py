"""Memory that reveals misuse: NaN outside of valid data, odd strides, poisoned allocations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


def poison(shape: Sequence[int], dtype: torch.dtype, device: str | torch.device = "cpu") -> Tensor:
    """Return a tensor of 0xFF bytes: NaN in every floating dtype, -1 in signed integers."""
    tensor = torch.empty(tuple(shape), dtype=dtype, device=device)
    tensor.view(torch.uint8).fill_(0xFF)
    return tensor


def strided(tensor: Tensor) -> Tensor:
    """Copy values into a larger poisoned buffer: rows are contiguous, outer strides are not."""
    shape = tensor.shape
    around = [size + 1 if dim else size for dim, size in enumerate(shape)]
    around[-1] += 7
    view = poison(around, tensor.dtype, tensor.device)[tuple(slice(size) for size in shape)]
    return view.copy_(tensor)


@contextmanager
def poisoned_memory(on: bool = True) -> Iterator[None]:
    """Make torch.empty and similar functions return NaN instead of old memory."""
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    switches: Any = torch.utils.deterministic
    fill = switches.fill_uninitialized_memory
    torch.use_deterministic_algorithms(on, warn_only=True)
    switches.fill_uninitialized_memory = on
    try:
        yield
    finally:
        switches.fill_uninitialized_memory = fill
        torch.use_deterministic_algorithms(before, warn_only=warn_only)
