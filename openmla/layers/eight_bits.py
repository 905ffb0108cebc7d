"""kv_b_proj in fp8: the checkpoint's own e4m3 if its blocks fit heads, else a copy.

The data kept for a linear is one byte tensor, which casts of a module do not change. It is empty,
or holds the checkpoint's scales repeated to smaller blocks, or e4m3 weights with their errors and
one scale for the w_uk and one for the w_uv of each head.
"""

from __future__ import annotations

from math import gcd
from typing import NamedTuple

import torch
from torch import Tensor, nn

from openmla.attention import AbsorbedWeights
from openmla.config import MLAConfig
from openmla.errors import ConfigError, ShapeError
from openmla.layers.weights import (
    FP8,
    OWN,
    absorb,
    decode_weight,
    expands_itself,
    is_plain,
    spread_scale,
)

FORMATS = (None, "fp8")
E4M3, E4M3_MAX = torch.float8_e4m3fn, 448.0
LEAST_BLOCK = 16  # rows per kernel tile
ALIGNMENT = 16
TINIEST = torch.finfo(torch.float32).tiny


def check_absorbed_format(where: str, format: object) -> None:
    if format not in FORMATS:
        raise ConfigError(f"{where}: absorbed_format must be None or 'fp8', got {format!r}.")


def keep_eight_bits(linear: nn.Module, config: MLAConfig, dtype: torch.dtype) -> Tensor:  # u8
    """Return what absorb_eight_bits() needs besides a linear; empty if its own tensors suffice."""
    own = own_blocks(linear, config)
    if own is not None:
        scales = _own_scales(own, config)
        if own.views(config.num_heads) is not None:
            return torch.empty(0, dtype=torch.uint8, device=scales.device)
        return scales.contiguous().flatten().view(torch.uint8)
    if is_plain(linear):
        weight = linear.weight
        assert isinstance(weight, Tensor)
    else:
        weight = decode_weight(linear, config.kv_lora_rank, dtype)
    return quantize_heads(weight.detach(), config)


def absorb_eight_bits(
    linear: nn.Module, kept: Tensor, config: MLAConfig, *, by_itself: bool
) -> AbsorbedWeights:
    """Absorb a linear and the data kept for it. Prefill multiplies by the weight of a plain linear.
    Other linears are called if `by_itself`; otherwise prefill decodes the fp8 weight each time."""
    plain, H = is_plain(linear), config.num_heads
    expanding = linear if by_itself and not plain else None
    if not is_exact(kept, config):
        stored, scales, _ = unpack(kept, config)
        absorbed = absorb(stored, config, expanding)
        uk, uv = scales[:, :, None, None]
        if plain:
            weight = linear.weight
            assert isinstance(weight, Tensor)
            absorbed = absorbed._replace(kv_b=weight)
        return absorbed._replace(uk_scale=uk, uv_scale=uv)
    own = own_blocks(linear, config)
    assert own is not None, "what is kept is of another linear"
    found = own.views(H)
    if found is None:
        found = kept.view(torch.float32).view(H, *(own.blocks or (1, 1)))
    uk = uv = found
    if own.blocks is not None:
        rows = _head_shape(config)[0] // own.blocks[0]
        parts = [n // rows for n in (config.qk_nope_head_dim, config.v_head_dim)]
        uk, uv = found.split(parts, dim=1)
    return absorb(own.weight, config, expanding)._replace(uk_scale=uk, uv_scale=uv.transpose(1, 2))


class Own(NamedTuple):
    """The weight [H * (P + V), C] and scales of an fp8 linear whose blocks fit heads."""

    weight: Tensor
    name: str  # name of the scales
    scale: Tensor  # one, or one per block of 128 x 128
    blocks: tuple[int, int] | None  # smallest block grid that fits a head; None: one scale

    def views(self, H: int) -> Tensor | None:  # [H, rows, columns] f32
        """Return the scales per head, or None if that needs a copy."""
        scale = self.scale.detach()
        if scale.dtype != torch.float32:
            return None
        if self.blocks is None:
            return scale.reshape(1, 1, 1).expand(H, 1, 1)
        per_head = scale.unflatten(0, (H, -1)) if scale.shape[0] % H == 0 else None
        return per_head if per_head is not None and per_head.shape[1:] == self.blocks else None


def own_blocks(linear: nn.Module, config: MLAConfig) -> Own | None:
    """Return the tensors of an fp8 linear if it has one scale, or one per block of 128 x 128 and
    heads, and their keys and values, begin at multiples of 16 rows of a block. Reads no values."""
    weight = linear._parameters.get("weight")
    if weight is None or type(weight) not in OWN or weight.dtype != E4M3:
        return None
    H, P, V, C = config.num_heads, config.qk_nope_head_dim, config.v_head_dim, config.kv_lora_rank
    for name in ("weight_scale_inv", "weight_scale"):
        scale = getattr(linear, name, None)
        if not isinstance(scale, Tensor):
            continue
        if scale.numel() == 1:
            return Own(weight.detach(), name, scale, None)
        rows, columns = gcd(128, P, V), gcd(128, C)
        fits = scale.shape == (-(-H * (P + V) // 128), -(-C // 128))
        if not fits or min(rows, columns) < LEAST_BLOCK:
            return None
        return Own(weight.detach(), name, scale, ((P + V) // rows, C // columns))
    return None


def _own_scales(own: Own, config: MLAConfig) -> Tensor:  # [H, rows, columns] f32
    """Check the scales and, if needed, repeat them to blocks that fit heads."""
    scale, H = own.scale.detach().float(), config.num_heads
    if not bool((scale.isfinite() & (scale > 0)).all()):
        raise ShapeError(f"weights: {own.name} of kv_b_proj must be positive and finite.")
    if own.blocks is None:
        return scale.reshape(1, 1, 1).expand(H, 1, 1)
    rows, columns = (len // n for len, n in zip(_head_shape(config), own.blocks, strict=True))
    spread = spread_scale(scale, own.weight, own.name)[::rows, ::columns]
    return spread.unflatten(0, (H, -1))


def _head_shape(config: MLAConfig) -> tuple[int, int]:
    return config.qk_nope_head_dim + config.v_head_dim, config.kv_lora_rank


def quantize_heads(weight: Tensor, config: MLAConfig) -> Tensor:  # u8
    """Quantize a dense kv_b weight [H * (P + V), C] to e4m3, with one scale for each head's w_uk
    and one for its w_uv: the largest magnitude over 448. Stores the relative error of each
    (Frobenius)."""
    kept = torch.zeros(_packed_bytes(config), dtype=torch.uint8, device=weight.device)
    stored, scales, errors = unpack(kept, config)
    parts = [
        whole.view(config.num_heads, -1, config.kv_lora_rank).split(
            [config.qk_nope_head_dim, config.v_head_dim], dim=1
        )
        for whole in (absorb(weight, config).kv_b, stored)
    ]
    for number, (part, codes) in enumerate(zip(*parts, strict=True)):
        values = part.float()
        largest = values.abs().amax((1, 2))
        if not bool(largest.isfinite().all()):
            raise ShapeError("weights: the weight of kv_b_proj must be finite.")
        # a true quotient: for a Python number, torch on a GPU multiplies by the reciprocal
        scale = (largest / torch.full_like(largest, E4M3_MAX)).clamp_min(TINIEST)
        scales[number] = scale
        codes.copy_((values / scale[:, None, None]).clamp_(-E4M3_MAX, E4M3_MAX).to(E4M3))
        wrong = codes.float().mul_(scale[:, None, None]).sub_(values)
        norm = values.flatten(1).norm(dim=1).clamp_min(TINIEST)
        errors[number] = wrong.flatten(1).norm(dim=1) / norm
    return kept


def unpack(kept: Tensor, config: MLAConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Return views of the result of quantize_heads(): e4m3 [H * (P + V), C], then scales and
    relative errors [2, H] f32 of w_uk and w_uv."""
    H, C = config.num_heads, config.kv_lora_rank
    size = H * (config.qk_nope_head_dim + config.v_head_dim) * C
    numbers = kept[-16 * H :].view(torch.float32).view(2, 2, H)
    return kept[:size].view(E4M3).view(-1, C), numbers[0], numbers[1]


def _packed_bytes(config: MLAConfig) -> int:
    H, C = config.num_heads, config.kv_lora_rank
    size = H * (config.qk_nope_head_dim + config.v_head_dim) * C
    return -(-size // ALIGNMENT) * ALIGNMENT + 16 * H


def is_exact(kept: Tensor, config: MLAConfig) -> bool:
    """Whether the checkpoint's own fp8 weight is read, rather than a copy in `kept`."""
    return kept.numel() != _packed_bytes(config)


def expands_better(linear: nn.Module, kept: Tensor, config: MLAConfig) -> bool:
    """Whether prefill should call a linear that is not plain: if that is cheaper, or if the fp8
    copy is not exact and the linear can be called."""
    if is_exact(kept, config):
        return expands_itself(linear, kept.device)
    weight = linear._parameters.get("weight")
    stored = isinstance(weight, Tensor) and type(weight) in OWN and weight.dtype in FP8
    return not (stored and type(linear).forward is nn.Linear.forward)


def largest_error(kept: Tensor, config: MLAConfig) -> float:
    """Return the largest relative error of a head; 0 if the checkpoint's own fp8 weight is read.
    Waits for the device."""
    if is_exact(kept, config):
        return 0.0
    return float(unpack(kept, config)[2].max())
