"""RoPE as a component: both pairings, both orders of the rotated columns, and known mistakes."""

from __future__ import annotations

import torch
from torch import Tensor

from openmla.bisect.precision import Precision
from openmla.config import RopeConfig
from openmla.layers.rope import inverse_frequencies, rope_table

FAULTS = (
    "as if columns were paired the other way",
    "as if every token stood one position later",
    "as if every token stood one position earlier",
    "as if it were not rotated at all",
    "as if it were rotated backwards",
    "as if rotated columns were written in the other order (rope_order in the dump's metadata)",
    "as if frequencies were rounded to bf16 (model.to(dtype) does it, from_pretrained(dtype=) not)",
)


def rotate(
    x: Tensor,  # [T, ..., R]
    positions: Tensor,  # [T] i64
    rope: RopeConfig,
    precision: Precision,
    *,
    pairing: str,
    order: str,
    inverse: bool = False,
    fault: str = "",
) -> Tensor:
    """Rotated columns in place ("kept"), or first members of pairs before second ones ("split")."""
    if fault == FAULTS[0]:
        pairing = "halves" if pairing == "pairs" else "pairs"
    if fault in FAULTS[1:3]:
        positions = (positions + (1 if fault == FAULTS[1] else -1)).clamp_min(0)
    if fault == FAULTS[4]:
        inverse = not inverse
    if fault == FAULTS[5]:
        order = "kept" if order == "split" else "split"
    R = x.shape[-1]
    cos, sin = _cos_sin(rope, R, positions, precision, short=fault == FAULTS[6])
    if fault == FAULTS[3]:
        cos, sin = torch.ones_like(cos), torch.zeros_like(sin)
    shape = (x.shape[0], *(1,) * (x.dim() - 2), R // 2)
    cos, sin = cos.view(shape), (-sin if inverse else sin).view(shape)
    x = precision.take(x)
    if pairing == "pairs":
        first, second = x[..., 0::2], x[..., 1::2]
    else:
        first, second = x.chunk(2, dim=-1)
    # round each product and each sum, as plain PyTorch does in the model's dtype
    turned = first * cos - second * sin, second * cos + first * sin
    if pairing == "halves" or order == "split":
        return torch.cat(turned, dim=-1)
    return torch.stack(turned, dim=-1).flatten(-2)


def _cos_sin(
    rope: RopeConfig, R: int, positions: Tensor, precision: Precision, *, short: bool
) -> tuple[Tensor, Tensor]:
    """Cos and sin of float32 angles, as models are trained with. If not exact: of frequencies one
    unit in the last place off, as with another power function, and rounded to the dtype."""
    frequencies = inverse_frequencies(rope, R)[0]
    if precision.exact and not short:
        last = int(positions.max()) + 1 if positions.numel() else 0
        table = rope_table(rope, R, last).to(positions.device)[positions]
    else:
        off = torch.nextafter(frequencies, torch.full_like(frequencies, torch.inf))
        if short:
            off = frequencies.bfloat16()
        angles = torch.outer(positions.double(), off.double().to(positions.device))
        table = torch.cat([angles.cos(), angles.sin()], dim=1) * rope.cos_sin_scale
    cos, sin = table.to(precision.dtype).chunk(2, dim=1)
    return cos, sin
