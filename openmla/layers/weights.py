"""kv_b_proj as dense weights: views of a plain linear, or decoded from any other module."""

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
OWN = (Tensor, nn.Parameter)  # torch's own classes: what they hold is what they show


class Known(NamedTuple):
    """A kv_b_proj that was looked at and found plain, and the views made of its weight."""

    linear: nn.Linear
    weight: Tensor
    address: int
    views: AbsorbedWeights

    def still_holds(self, linear: nn.Module) -> bool:
        """Whether everything that was looked at is as it was, but what is in the weight."""
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

    Raises:
        ShapeError: the weight does not have the shape of the config.
    """
    check_kind("weights", "kv_b_proj's weight", weight, Tensor)
    H, P, V, C = config.num_heads, config.qk_nope_head_dim, config.v_head_dim, config.kv_lora_rank
    if weight.shape != (H * (P + V), C):
        raise ShapeError(
            f"weights: kv_b_proj must be [H * (P + V), C] = {(H * (P + V), C)}, "
            f"got {tuple(weight.shape)}."
        )
    per_head = weight.view(H, P + V, C)
    return AbsorbedWeights(weight, per_head[:, :P], per_head[:, P:].transpose(1, 2), linear)


def is_plain(linear: nn.Module) -> bool:
    """Whether a linear's own weight says all it does: 16 or more bits, no forward of its own.

    A tensor of another class (torchao's, DTensor) may keep anything behind the dtype it shows.
    """
    if not isinstance(linear, nn.Linear) or type(linear).forward is not nn.Linear.forward:
        return False
    if "forward" in vars(linear) and not hasattr(linear, "_hf_hook"):  # accelerate's moves tensors
        return False
    # a fake one stands for a plain one while a model is traced
    return type(linear.weight) in (*OWN, FakeTensor) and linear.weight.dtype in _PLAIN


def expands_itself(linear: nn.Module, device: torch.device) -> bool:
    """Whether prefill is cheaper by a linear itself than by its decoded copy.

    It is where fp8 weights meet activations in fp8 (transformers' FP8Linear says so by its
    activation_scheme): half the bytes and twice the throughput of 16 bits, on GPUs that multiply
    fp8. Any other linear decodes its weight at every call, which is what the copy saves.
    """
    weight, can = linear._parameters.get("weight"), capability(device)
    return (
        type(weight) in OWN
        and isinstance(weight, Tensor)
        and weight.dtype in FP8
        and type(linear).forward is not nn.Linear.forward
        and getattr(linear, "activation_scheme", None) is not None
        and not hasattr(linear, "_hf_hook")  # offloaded: it would be brought in for every chunk
        and can is not None
        and can >= FP8_PRODUCTS
    )


def parts_of(linear: nn.Module) -> tuple[nn.Module, ...]:
    """A linear and the modules in it; a plain one has none, and every layer's is asked."""
    return tuple(linear.modules()) if linear._modules else (linear,)


def refuse_unabsorbable(linear: nn.Module, name: str) -> None:
    """Attention uses kv_b_proj's weight without calling it: hooks and biases would be lost."""
    parts = parts_of(linear)
    if any(module._forward_hooks or module._forward_pre_hooks for module in parts):
        raise UnsupportedError(
            f"{name} has forward hooks, and attention reads its weight without calling it. Remove "
            "the hooks (peft adds some for adapter_names)."
        )
    if isinstance(getattr(linear, "bias", None), Tensor):
        raise UnsupportedError(f"{name} has a bias, which is not supported in attention.")


def state_of(linear: nn.Module) -> tuple[Any, ...]:
    """What a linear's weight depends on, cheap to compare: its tensors, switches and numbers."""
    found: list[Any] = []
    for module in linear.modules():
        tensors = (*module._parameters.items(), *module._buffers.items())
        found += [(name, _identity(tensor)) for name, tensor in tensors if tensor is not None]
        own = {name: value for name, value in vars(module).items() if name not in _MODULE}
        found += [(name, _frozen(value)) for name, value in own.items()]
    return tuple(found)


_MODULE = frozenset(vars(nn.Module()))  # tensors, children and hooks, which are looked at apart


def _identity(tensor: Tensor) -> tuple[int, ...]:
    """Another one where a tensor was replaced, moved or written to."""
    with torch._C.DisableTorchFunctionSubclass():  # asked of the tensor, not of its class
        version = 0 if tensor.is_inference() else tensor._version
    return id(tensor), version, tensor.data_ptr() if type(tensor) in OWN else 0


def _frozen(value: Any) -> Any:
    """A value as something that can be compared; what is no plain data, by which object it is."""
    if isinstance(value, Tensor):
        return _identity(value)
    if isinstance(value, dict):
        return tuple((key, _frozen(entry)) for key, entry in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(_frozen(entry) for entry in value)
    return value if isinstance(value, (bool, int, float, str, type(None))) else id(value)


@torch.no_grad()  # scales may be parameters that want a gradient
def decode_weight(linear: nn.Module, C: int, dtype: torch.dtype) -> Tensor:
    """The weight [out, C] in dtype of a linear that is not plain: quantised, or with adapters.

    fp8 with `weight_scale_inv` or `weight_scale`: multiplied out, one scale per tensor, per row or
    per block of 128 x 128. Anything else: an identity is pushed through the linear itself, which
    is exact unless it quantises its activations with a fixed scale.
    """
    # its own: an adapter shows the weight of the linear it wraps, which is not all it does
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
    if bool(pushed[C].any()):  # what comes out where nothing went in
        raise UnsupportedError(
            "weights: kv_b_proj or one of its adapters has a bias, which is not supported in "
            "attention."
        )
    return pushed[:C].T.to(dtype).contiguous()


def spread_scale(scale: Tensor, weight: Tensor, name: str) -> Tensor:
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
        f"weights: {name} must have 1 scale, 1 per row or 1 per block of 128 x 128 for a weight of "
        f"{tuple(weight.shape)}, got shape {tuple(scale.shape)}."
    )
