"""kv_b_proj as dense weights: views of a plain linear, or a decoded copy of any other module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from openmla.attention import AbsorbedWeights
from openmla.config import MLAConfig
from openmla.errors import ShapeError, UnsupportedError, check_kind
from openmla.hardware import capability

_PLAIN = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
FP8_PRODUCTS = (8, 9)  # the first capability with fp8 matrix instructions
OWN = (Tensor, nn.Parameter)  # torch's own classes, which hide no other data


class Known(NamedTuple):
    """A kv_b_proj that was checked to be plain, and the views of its weight."""

    linear: nn.Linear
    weight: Tensor
    address: int
    views: AbsorbedWeights

    def still_holds(self, linear: nn.Module) -> bool:
        """Whether all that was checked is unchanged, except for the values of the weight."""
        parameters = linear._parameters
        return (
            linear is self.linear
            and parameters["weight"] is self.weight
            and self.weight.data_ptr() == self.address
            and parameters.get("bias") is None
            and not linear._forward_hooks
            and not linear._forward_pre_hooks
            and not linear._modules
            and "forward" not in vars(linear)
        )


def absorb(
    weight: Tensor, config: MLAConfig, linear: Callable[[Tensor], Tensor] | None = None
) -> AbsorbedWeights:
    """Split the weight of kv_b_proj into the shapes that attention uses, as views of it.

    Args:
        weight: [H * (P + V), C], not quantized.
        config: the model's dimensions.
        linear: a callable that expands latents, if that is cheaper than the weight.

    Returns:
        AbsorbedWeights, whose tensors are views of `weight`.

    Raises:
        ShapeError: the weight does not have the shape of the config.
        ConfigError: the weight is not a tensor, or the config has layers of several kinds.

    ```python
    import openmla, torch

    config = openmla.PRESETS["tiny-v3"]
    H, P, V = config.num_heads, config.qk_nope_head_dim, config.v_head_dim
    kv_b_proj = torch.nn.Linear(config.kv_lora_rank, H * (P + V), bias=False)
    weights = openmla.absorb(kv_b_proj.weight.detach(), config)
    print(weights.w_uk.shape, weights.w_uv.shape)  # [H, P, C] and [H, C, V]
    ```
    """
    check_kind("weights", "kv_b_proj's weight", weight, Tensor)
    config.check_one_kind("weights")
    H, P, V, C = config.num_heads, config.qk_nope_head_dim, config.v_head_dim, config.kv_lora_rank
    if weight.shape != (H * (P + V), C):
        raise ShapeError(
            f"weights: kv_b_proj must be [H * (P + V), C] = {(H * (P + V), C)}, "
            f"got {tuple(weight.shape)}."
        )
    per_head = weight.view(H, P + V, C)
    return AbsorbedWeights(weight, per_head[:, :P], per_head[:, P:].transpose(1, 2), linear)


def is_plain(linear: nn.Module) -> bool:
    """Whether a linear is fully described by its weight: 16 or more bits, no custom forward.

    A tensor of another class (torchao, DTensor) may hold data that its dtype does not show.
    """
    if not isinstance(linear, nn.Linear) or type(linear).forward is not nn.Linear.forward:
        return False
    if "forward" in vars(linear) and not hasattr(linear, "_hf_hook"):  # accelerate moves tensors
        return False
    # While a model is traced, a fake tensor stands for a plain one.
    return type(linear.weight) in (*OWN, FakeTensor) and linear.weight.dtype in _PLAIN


def expands_itself(linear: nn.Module, device: torch.device) -> bool:
    """Whether prefill is cheaper with the linear itself than with its decoded copy.

    It is if fp8 weights multiply fp8 activations (FP8Linear of transformers sets activation_scheme)
    on GPUs with fp8 products: half the bytes and twice the throughput of 16 bits. Any other linear
    decodes its weight at every call, which the copy avoids.
    """
    weight, can = linear._parameters.get("weight"), capability(device)
    return (
        type(weight) in OWN
        and isinstance(weight, Tensor)
        and weight.dtype in FP8
        and type(linear).forward is not nn.Linear.forward
        and getattr(linear, "activation_scheme", None) is not None
        and not hasattr(linear, "_hf_hook")  # offloaded: it would be loaded for every chunk
        and can is not None
        and can >= FP8_PRODUCTS
    )


def parts_of(linear: nn.Module) -> tuple[nn.Module, ...]:
    """Return a linear and its submodules, with a fast path for plain linears without any."""
    return tuple(linear.modules()) if linear._modules else (linear,)


def refuse_unabsorbable(linear: nn.Module, name: str) -> None:
    """Raise if kv_b_proj has hooks or a bias: attention reads its weight without calling it."""
    parts = parts_of(linear)
    if any(module._forward_hooks or module._forward_pre_hooks for module in parts):
        raise UnsupportedError(
            f"{name} has forward hooks, and attention reads its weight without calling it. Remove "
            "the hooks (peft adds some for adapter_names)."
        )
    if isinstance(getattr(linear, "bias", None), Tensor):
        raise UnsupportedError(f"{name} has a bias, which is not supported in attention.")


def state_of(linear: nn.Module) -> tuple[Any, ...]:
    """Return what a linear's weight depends on, cheap to compare: tensors, flags and numbers."""
    found: list[Any] = []
    for module in linear.modules():
        tensors = (*module._parameters.items(), *module._buffers.items())
        found += [(name, _identity(tensor)) for name, tensor in tensors if tensor is not None]
        own = {name: value for name, value in vars(module).items() if name not in _MODULE}
        found += [(name, _frozen(value)) for name, value in own.items()]
    return tuple(found)


_MODULE = frozenset(vars(nn.Module()))  # tensors, children and hooks, compared separately


def _identity(tensor: Tensor) -> tuple[int, ...]:
    """Return a key that changes if the tensor is replaced, moved or written to."""
    with torch._C.DisableTorchFunctionSubclass():  # bypasses overrides of a subclass
        version = 0 if tensor.is_inference() else tensor._version
    return id(tensor), version, tensor.data_ptr() if type(tensor) in OWN else 0


def _frozen(value: Any) -> Any:
    """Convert a value to something comparable; objects that are not plain data become their id."""
    if isinstance(value, Tensor):
        return _identity(value)
    if isinstance(value, dict):
        return tuple((key, _frozen(entry)) for key, entry in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(_frozen(entry) for entry in value)
    return value if isinstance(value, (bool, int, float, str, type(None))) else id(value)


@torch.no_grad()  # scales may be parameters that require grad
def decode_weight(linear: nn.Module, C: int, dtype: torch.dtype) -> Tensor:
    """Return the weight [out, C] in `dtype` of a linear that is quantized or has adapters.

    fp8 with `weight_scale_inv` or `weight_scale` is multiplied out, with one scale per tensor, per
    row or per block of 128 x 128. For anything else the linear is applied to an identity matrix,
    which is exact unless it quantizes its activations with a fixed scale.
    """
    # Not getattr(): an adapter exposes the weight of the linear it wraps, without its own part.
    weight = linear._parameters.get("weight", linear._buffers.get("weight"))
    if isinstance(weight, Tensor) and type(weight) in OWN and weight.dtype in FP8:
        for name in ("weight_scale_inv", "weight_scale"):
            scale = getattr(linear, name, None)
            if isinstance(scale, Tensor):
                return (weight.float() * spread_scale(scale.float(), weight, name)).to(dtype)
        raise ShapeError(
            "weights: the fp8 kv_b_proj has neither weight_scale_inv nor weight_scale. Load the "
            "scales of its checkpoint."
        )
    device = next((t.device for t in (*linear.parameters(), *linear.buffers())), None)
    pushed = linear(torch.eye(C + 1, C, dtype=dtype, device=device))
    if bool(pushed[C].any()):  # the output of a zero input
        raise UnsupportedError(
            "weights: kv_b_proj or one of its adapters has a bias, which is not supported in "
            "attention."
        )
    return pushed[:C].T.to(dtype).contiguous()


def spread_scale(scale: Tensor, weight: Tensor, name: str) -> Tensor:
    """Repeat a scale tensor to the shape of the weight."""
    rows, columns = weight.shape
    if scale.numel() == 1:
        return scale.reshape(1, 1)
    if scale.numel() == rows and scale.dim() <= 2 and scale.shape[-1] in (1, rows):
        return scale.reshape(rows, 1)
    if scale.shape == (-(-rows // 128), -(-columns // 128)):
        spread = scale.repeat_interleave(128, dim=0).repeat_interleave(128, dim=1)
        return spread[:rows, :columns]
    raise ShapeError(
        f"weights: {name} must have 1 scale, 1 per row or 1 per block of 128 x 128 for a weight of "
        f"{tuple(weight.shape)}, got shape {tuple(scale.shape)}."
    )
