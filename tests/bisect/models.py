"""Tiny models in a precision, with RoPE's frequencies left in float32 as from_pretrained() does."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def in_dtype(model: Any, dtype: torch.dtype) -> Any:
    kept = {name: b.clone() for name, b in model.named_buffers() if "inv_freq" in name}
    model = model.to(dtype)
    for name, buffer in kept.items():
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, buffer)
    return model


def prompt(num_tokens: int, seed: int = 3) -> Tensor:
    return torch.randint(2, 97, (num_tokens,), generator=torch.Generator().manual_seed(seed))
