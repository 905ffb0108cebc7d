"""Weights that accelerate keeps on the CPU or on disk: brought to the device while they are read.

accelerate leaves parameters on `meta` and brings them in around each module's forward. Attention
reads kv_b_proj's weight, and V4's compressors' weights, without calling the modules.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


def is_away(module: nn.Module) -> bool:
    """Whether accelerate has put some of a module's own tensors elsewhere."""
    if not hasattr(module, "_hf_hook"):
        return False
    tensors = (*module._parameters.values(), *module._buffers.values())
    return any(tensor is not None and tensor.is_meta for tensor in tensors)


@contextmanager
def brought_in(*modules: nn.Module) -> Iterator[None]:
    """Load offloaded tensors of modules, as for their forward. A tensor read inside stays valid."""
    away = [part for part in modules if is_away(part)]
    for part in away:
        part._hf_hook.pre_forward(part)  # type: ignore[union-attr, operator]
    try:
        yield
    finally:
        for part in away:
            part._hf_hook.post_forward(part, None)  # type: ignore[union-attr, operator]
