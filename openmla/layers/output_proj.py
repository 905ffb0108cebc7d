"""fp8 o_proj over attention outputs that are already quantized.

FP8Linear of transformers takes 16-bit inputs and quantizes them itself: dynamically per token and
128 columns, or with a fixed scale. For outputs quantized the same way, the product is
torch._scaled_mm on GPUs that support it. Elsewhere both sides are decoded and multiplied in
float32.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from openmla.errors import ConfigError
from openmla.hardware import capability
from openmla.layers.weights import FP8_PRODUCTS, spread_scale
from openmla.outputs import QuantizedOutput, decode_output, make_output

BLOCK = 128
ALIGNED = 16  # column multiple on both sides of torch._scaled_mm
# The only compute capability with block-scaled products in cuBLAS, the CUDA version that added them
# (12.9), and the required multiple of blocks along a row.
BLOCKS_ON, BLOCKS_CUDA, BLOCKS_ALIGNED = (9, 0), (12, 9), 4
_OWN = (Tensor, nn.Parameter)  # torch's own classes, which hide no other data


def output_format(linear: nn.Module) -> str | None:
    """Return the format of OUTPUT_FORMATS that a linear quantizes its input to, or None."""
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
    """Raise unless the linear reads this format."""
    taken = output_format(linear)
    if taken != format:
        raise ConfigError(
            f"MLAAttention: output must be the format of o_proj, {taken!r}, got {format!r} in the "
            "plan. Call make_plan(output=layer.output_format)."
        )


def output_buffers(linear: nn.Module, format: str, T: int) -> QuantizedOutput:
    """Allocate buffers for T rows, with scales in the layout that the product needs. They may be
    padded to a multiple of 4 rows, which are never read."""
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


@torch.no_grad()  # scales may be parameters that require grad
def project_output(linear: nn.Module, out: QuantizedOutput, dtype: torch.dtype) -> Tensor:
    """Apply the linear to quantized outputs. Returns [T, hidden] in `dtype`."""
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
    """Whether torch multiplies these without decoding."""
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
