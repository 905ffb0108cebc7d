"""An o_proj of fp8 weights that is handed outputs quantised already: which format, its product.

transformers' FP8Linear takes 16 bits and quantises them itself: dynamically per token and 128
columns, or by a fixed scale. Where outputs come so quantised, the product is torch's own scaled
one on GPUs that have it, else both sides decoded and multiplied in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from openmla.errors import ConfigError
from openmla.hardware import capability
from openmla.layers.weights import FP8_PRODUCTS, spread_scale
from openmla.outputs import QuantizedOutput, decode_output, make_output

BLOCK = 128
ALIGNED = 16  # columns of both sides of torch's scaled product
# The one capability whose cuBLAS multiplies by blocks, from CUDA 12.9 on, and the multiple of
# blocks along a row that it wants.
BLOCKS_ON, BLOCKS_CUDA, BLOCKS_ALIGNED = (9, 0), (12, 9), 4
_OWN = (Tensor, nn.Parameter)  # torch's own classes: what they hold is what they show


def output_format(linear: nn.Module) -> str | None:
    """The format of OUTPUT_FORMATS that a linear quantises its input to; None if it does not."""
    weight, scale = linear._parameters.get("weight"), getattr(linear, "weight_scale_inv", None)
    scheme = getattr(linear, "activation_scheme", None)
    hooked = linear._forward_hooks or linear._forward_pre_hooks or hasattr(linear, "_hf_hook")
    if hooked or type(weight) not in _OWN or not isinstance(weight, Tensor) or scheme is None:
        return None
    if weight.dtype != torch.float8_e4m3fn or not isinstance(scale, Tensor):
        return None
    if scheme == "static":
        fixed = getattr(linear, "activation_scale", None)
        return "fp8" if isinstance(fixed, Tensor) and fixed.numel() == 1 else None
    rows, columns = weight.shape
    blocks = tuple(getattr(linear, "block_size", None) or ())
    fits = scale.shape == (-(-rows // BLOCK), -(-columns // BLOCK)) and columns % BLOCK == 0
    if scheme != "dynamic" or blocks != (BLOCK, BLOCK) or not fits:
        return None
    return "fp8_128" if scale.dtype == torch.float32 else "fp8_128_pow2"


def check_taken(linear: nn.Module, format: str) -> None:
    """Raise unless a linear reads this format."""
    taken = output_format(linear)
    if taken != format:
        raise ConfigError(
            f"MLAAttention: output must be the format of o_proj, {taken!r}, got {format!r} in the "
            "plan. Call make_plan(output=layer.output_format)."
        )


def output_buffers(linear: nn.Module, format: str, T: int) -> QuantizedOutput:
    """For T rows: rows and columns of scales as the product wants them. Behind them there may be
    rows up to a multiple of 4, which nobody reads."""
    weight = linear.weight
    assert isinstance(weight, Tensor)
    fixed = getattr(linear, "activation_scale", None)
    if format == "fp8":
        assert isinstance(fixed, Tensor)
        scale = fixed.detach().reshape(()).to(torch.float32)
        return make_output(format, T, weight.shape[1], global_scale=scale, device=weight.device)
    whole = make_output(
        format, -(-T // 4) * 4, weight.shape[1], layout="column", device=weight.device
    )
    assert whole.scales is not None
    return whole._replace(values=whole.values[:T], scales=whole.scales[:T])


@torch.no_grad()  # scales may be parameters that want a gradient
def project_output(linear: nn.Module, out: QuantizedOutput, dtype: torch.dtype) -> Tensor:
    """[T, hidden] in dtype: what the linear makes of these outputs."""
    weight, bias = linear.weight, getattr(linear, "bias", None)
    scale = linear.weight_scale_inv
    assert isinstance(weight, Tensor) and isinstance(scale, Tensor)
    if multiplies_scaled(out.format, weight, scale, dtype) and out.values.shape[0] > 0:
        product = _scaled_product(out, weight, scale, dtype)
    else:
        spread = spread_scale(scale.float(), weight, "weight_scale_inv")
        decoded = decode_output(out, torch.float32)
        product = (decoded @ (weight.float() * spread).T).to(dtype)
    return product if bias is None else product + bias


def multiplies_scaled(format: str, weight: Tensor, scale: Tensor, dtype: torch.dtype) -> bool:
    """Whether torch multiplies these as they are."""
    able, (rows, columns) = capability(weight.device), weight.shape
    if able is None or able < FP8_PRODUCTS or rows % ALIGNED or columns % ALIGNED:
        return False
    if dtype not in (torch.bfloat16, torch.float16, torch.float32) or torch.version.cuda is None:
        return False
    if format == "fp8":
        return scale.numel() == 1
    version = tuple(int(part) for part in torch.version.cuda.split(".")[:2])
    return (
        able == BLOCKS_ON
        and version >= BLOCKS_CUDA
        and dtype == torch.bfloat16
        and scale.dtype == torch.float32
        and rows % BLOCK == 0
        and scale.shape[1] % BLOCKS_ALIGNED == 0
    )


def _scaled_product(
    out: QuantizedOutput, weight: Tensor, scale: Tensor, dtype: torch.dtype
) -> Tensor:
    values, T = out.values, out.values.shape[0]
    if out.scales is None:
        assert out.global_scale is not None
        factors = out.global_scale, scale.reshape(()).float()
        return torch._scaled_mm(values, weight.t(), *factors, out_dtype=dtype)
    rows = out.scales.stride(1)  # the multiple of 4 that output_buffers() allocated
    values = values.as_strided((rows, values.shape[1]), (values.stride(0), 1))
    scales = out.scales.as_strided((rows, out.scales.shape[1]), (1, rows))
    return torch._scaled_mm(values, weight.t(), scales, scale.t(), out_dtype=dtype)[:T]
