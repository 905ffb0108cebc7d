"""Rope tables: cos and sin of every position; the rotation itself is ops/rope."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from openmla.config import RopeConfig


@lru_cache(maxsize=16)
def rope_table(rope: RopeConfig, R: int, num_positions: int, device: torch.device) -> Tensor:
    """[num_positions, R] f32: cos in the first half of a row, sin in the second.

    longrope: twice as many rows, the second half with the long factors. The same table serves
    all layers, so it is made once and kept. Float32 throughout, as models are trained with.
    """
    tables = [
        _cos_sin(frequencies, num_positions, rope.cos_sin_scale)
        for frequencies in inverse_frequencies(rope, R)
    ]
    return torch.cat(tables).to(device)


def _cos_sin(frequencies: Tensor, num_positions: int, scale: float) -> Tensor:
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
    return torch.cat([angles.cos() * scale, angles.sin() * scale], dim=1)


def inverse_frequencies(rope: RopeConfig, R: int) -> list[Tensor]:
    """[R/2] f32 radians per position; for longrope the short and the long variant."""
    exponents = torch.arange(0, R, 2, dtype=torch.int64).float() / R
    powers = rope.theta**exponents
    if rope.kind == "longrope":
        return [
            1.0 / (torch.tensor(factors, dtype=torch.float32) * powers)
            for factors in (rope.short_factor, rope.long_factor)
        ]
    if rope.kind == "yarn":
        return [_yarn(rope, R, powers)]
    return [1.0 / powers]


def _yarn(rope: RopeConfig, R: int, powers: Tensor) -> Tensor:
    """Fast pairs keep their frequency, slow ones are stretched, a ramp between."""
    low, high = (_pair_that_turns(turns, rope, R) for turns in (rope.beta_fast, rope.beta_slow))
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, R - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(R // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    return 1.0 / (rope.factor * powers) * (1 - kept) + 1.0 / powers * kept


def _pair_that_turns(turns: float, rope: RopeConfig, R: int) -> float:
    """The (fractional) pair that makes `turns` turns within the original context."""
    wavelength = rope.original_positions / (turns * 2 * math.pi)
    return R * math.log(wavelength) / (2 * math.log(rope.theta))
