"""kv_b_proj as dense weights: views of a plain linear, or decoded once from a quantised one."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from openmla.attention import Absorbed
from openmla.config import MLAConfig
from openmla.errors import ShapeError

_PLAIN = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def absorb(weight: Tensor, config: MLAConfig) -> Absorbed:
    """The three shapes of a dense kv_b weight [H * (P + V), C], all over its own storage."""
    H, P, V, C = config.num_heads, config.qk_nope_head_dim, config.v_head_dim, config.kv_lora_rank
    if weight.shape != (H * (P + V), C):
        raise ShapeError(
            f"weights: kv_b_proj must be [H * (P + V), C] = {(H * (P + V), C)}, "
            f"got {tuple(weight.shape)}."
        )
    per_head = weight.view(H, P + V, C)
    return Absorbed(weight, per_head[:, :P], per_head[:, P:].transpose(1, 2))


def is_plain(linear: nn.Module) -> bool:
    """Whether a linear's own weight can be used as it is: 16 or more bits, no scales."""
    weight = getattr(linear, "weight", None)
    return isinstance(linear, nn.Linear) and isinstance(weight, Tensor) and weight.dtype in _PLAIN


def decode_weight(linear: nn.Module, C: int, dtype: torch.dtype) -> Tensor:
    """A quantised linear's weight [out, C] in dtype.

    fp8 with `weight_scale_inv` or `weight_scale`: multiplied out, one scale per tensor, per row or
    per block of 128 x 128. Anything else: an identity is pushed through the linear itself, which
    is exact unless it quantises its activations with a fixed scale.
    """
    weight = getattr(linear, "weight", None)
    if isinstance(weight, Tensor) and weight.dtype in _FP8:
        for name in ("weight_scale_inv", "weight_scale"):
            scale = getattr(linear, name, None)
            if isinstance(scale, Tensor):
                return (weight.float() * _spread(scale.float(), weight, name)).to(dtype)
        raise ShapeError(
            "weights: an fp8 kv_b_proj must have weight_scale_inv or weight_scale, got neither."
        )
    device = next((t.device for t in (*linear.parameters(), *linear.buffers())), None)
    identity = torch.eye(C, dtype=dtype, device=device)
    pushed = linear(identity)
    bias = getattr(linear, "bias", None)
    if isinstance(bias, Tensor):
        pushed = pushed - bias
    return pushed.T.to(dtype).contiguous()


def _spread(scale: Tensor, weight: Tensor, name: str) -> Tensor:
    """A scale tensor repeated to the weight's shape."""
    rows, columns = weight.shape
    if scale.numel() == 1:
        return scale.reshape(1, 1)
    if scale.numel() == rows and scale.dim() <= 2 and scale.shape[-1] in (1, rows):
        return scale.reshape(rows, 1)
    if scale.shape == (-(-rows // 128), -(-columns // 128)):
        spread = scale.repeat_interleave(128, dim=0).repeat_interleave(128, dim=1)
        return spread[:rows, :columns]
    raise ShapeError(
        f"weights: {name} must be one scale, one per row or one per block of 128 x 128 for "
        f"{tuple(weight.shape)}, got {tuple(scale.shape)}."
    )
