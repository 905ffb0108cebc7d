"""Tensors that the inputs of several benchmarks have: caches, rotations, output buffers."""

from __future__ import annotations

import torch
from torch import Tensor

from openmla import MLAConfig
from openmla.attention import AbsorbedWeights, Projected
from openmla.cache.format import get_format
from openmla.layers.weights import absorb
from openmla.outputs import get_output_format, make_output
from openmla.testing import Inputs


def blank_cache(num_slots: int, BS: int, format: str, D: int, device: str) -> Tensor:
    """A cache of zeros [N, BS, W] with at least so many slots."""
    layout = get_format(format)
    data = torch.zeros(-(-num_slots // BS), BS, layout.width(D), device=device)
    return data.to(layout.dtype)


def fill(cache: Tensor, format: str, D: int, std: float = 1.0) -> Tensor:
    """Write random rows into every slot, a part at a time. Returns the cache."""
    layout, device = get_format(format), cache.device
    one, total = torch.ones((), device=device), cache.shape[0] * cache.shape[1]
    for start in range(0, total, 65536):
        slots = torch.arange(start, min(start + 65536, total), device=device)
        layout.write(cache, slots, torch.randn(len(slots), D, device=device) * std, one)
    return cache


def random_cache(
    num_blocks: int, BS: int, format: str, D: int, device: str, std: float = 1.0
) -> Tensor:
    """A cache [N, BS, W] with random rows in every slot."""
    layout = get_format(format)
    shape = (num_blocks, BS, layout.width(D))
    return fill(torch.empty(shape, dtype=layout.dtype, device=device), format, D, std)


def rotation(num_positions: int, R: int, device: str) -> Tensor:
    """[Q, R] cosines and sines of every position."""
    half = torch.arange(0, R, 2, device=device) / R
    angles = torch.outer(torch.arange(float(num_positions), device=device), 10000.0**-half)
    return torch.cat([angles.cos(), angles.sin()], dim=1)


def random_step(
    config: MLAConfig, T: int, device: str, dtype: torch.dtype, std: float = 1.0
) -> tuple[Projected, AbsorbedWeights]:
    """Queries and rows of T tokens, rows with this standard deviation, and a layer's weights."""
    H, P, R = config.num_heads, config.qk_nope_head_dim, config.qk_rope_head_dim
    C, V = config.kv_lora_rank, config.v_head_dim

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=dtype)

    projected = Projected(randn(T, H, P), randn(T, H, R), randn(T, C) * std, randn(T, R) * std)
    return projected, absorb(randn(H * (P + V), C) * C**-0.5, config)


def output_inputs(
    tensors: dict[str, Tensor], format: str, n: int, columns: int, device: str
) -> Inputs:
    """Arguments of an op that writes n quantized rows with scales: buffers, then tensors."""
    scale = 1.0 if get_output_format(format).global_scale else None
    made = make_output(format, n, columns, global_scale=scale, device=device)
    assert made.scales is not None
    scalars = {"global_scale": made.global_scale, "format": format}
    return Inputs({"values": made.values, "scales": made.scales, **tensors}, scalars, ())
