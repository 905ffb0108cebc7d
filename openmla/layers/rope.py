"""RopeTable: cos and sin of every position, a buffer of the layers. ops/rope applies it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from openmla.config import RopeConfig
from openmla.errors import ConfigError


class RopeTable(nn.Module):
    """A table of cos and sin per position. It moves with its layers, stays float32, is not saved.

    A layer makes its own unless you pass one. All layers of a model that are on one device can
    share a table: one of 163,840 positions takes 42 MB, those of DeepSeek V4 take 268 MB.

    Args:
        rope: the RoPE settings.
        R: the rotated columns.
        num_positions: rows of the table; longrope has twice as many.
        alpha: [R/2] learned exponents, which multiply the frequencies by exp(alpha), where the
            settings say that the model has them.

    Raises:
        ConfigError: the RoPE settings are of kind "external", or alpha is missing or unused.

    ```python
    import openmla

    config = openmla.PRESETS["tiny-v3"]
    table = openmla.RopeTable(config.rope, config.qk_rope_head_dim, config.max_positions)
    layers = [openmla.MLAAttention(config, layer=i, rope_table=table) for i in range(2)]
    assert layers[0].rope_table is layers[1].rope_table
    print(table.table.shape)  # [num_positions, R]
    ```
    """

    table: Tensor  # [num_positions, R] f32, longrope: twice as many rows

    def __init__(
        self, rope: RopeConfig, R: int, num_positions: int, *, alpha: Tensor | None = None
    ) -> None:
        super().__init__()
        if rope.learned != (alpha is not None):
            what = "missing: the config has learned RoPE frequencies" if rope.learned else "unused"
            raise ConfigError(f"rope: alpha is {what}. Pass RopeTable(alpha=...) for such models.")
        self.made_of, self.alpha = (rope, R, num_positions), alpha
        table = rope_table(*self.made_of, alpha)
        device = torch.get_default_device()
        if device.type != "meta":  # a meta layer keeps its table, whose values are known
            table = table.to(device)
        self.register_buffer("table", table, persistent=False)

    @classmethod
    def shared(
        cls, given: RopeTable | None, rope: RopeConfig, R: int, num_positions: int
    ) -> RopeTable:
        """Return the table that was passed, if it fits, or a new one."""
        if given is None:
            return cls(rope, R, num_positions)
        if given.made_of != (rope, R, num_positions):
            raise ConfigError(
                f"rope: rope_table must have the RoPE settings of the layer, {rope.kind!r} with "
                f"R={R} and {num_positions} positions, got {given.made_of[0].kind!r} with "
                f"R={given.made_of[1]} and {given.made_of[2]}, or other factors. Share a table "
                "only between layers with equal settings."
            )
        return given

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Called by .to(), .cuda(), .half() and to_empty(): changes only the device."""
        device = fn(self.table.new_empty(0)).device
        if self.table.is_meta and device.type != "meta":
            self.table = rope_table(*self.made_of, self.alpha)
        self.table = self.table.to(device)
        return self


def rope_table(rope: RopeConfig, R: int, num_positions: int, alpha: Tensor | None = None) -> Tensor:
    """Return [num_positions, R] f32 on the CPU: cos in the first half of a row, sin in the second.

    longrope has twice as many rows, the second half with the long factors. All math is in float32,
    as in training, and on the CPU, so that results are bitwise equal on every machine.
    """
    with torch.device("cpu"):
        factor = 1.0 if alpha is None else alpha.detach().to("cpu", torch.float32).exp()
        tables = [
            _cos_sin(frequencies * factor, num_positions, rope.cos_sin_scale)
            for frequencies in inverse_frequencies(rope, R)
        ]
        return torch.cat(tables)


def _cos_sin(frequencies: Tensor, num_positions: int, scale: float) -> Tensor:
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
    return torch.cat([angles.cos() * scale, angles.sin() * scale], dim=1)


def inverse_frequencies(rope: RopeConfig, R: int) -> list[Tensor]:
    """Return [R/2] f32 radians per position; for longrope the short and the long variant."""
    if rope.kind == "external":
        raise ConfigError(
            "rope: a config of kind 'external' has no RoPE table. Apply RoPE yourself, or make the "
            "config with from_hf()."
        )
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
    """Keep the frequency of fast pairs, stretch slow ones, and interpolate between."""
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
    """Return the (fractional) pair that makes `turns` turns within the original context."""
    wavelength = rope.original_positions / (turns * 2 * math.pi)
    return R * math.log(wavelength) / (2 * math.log(rope.theta))
