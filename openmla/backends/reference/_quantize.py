"""Quantize attention outputs: rows [n, O] into the values and scales of every format.

Arithmetic is in float32, with quotients instead of products with reciprocals unless the definition
has a reciprocal. ops/quantize_out.py is the specification. In e4m3, NaN of either sign is the byte
0x7f.
"""

from __future__ import annotations

import torch
from torch import Tensor

from openmla.cache.format import FP8_MAX, power_of_two, raw_view, to_fp8
from openmla.outputs import FP4_GROUP, FP4_MAX, get_output_format, swizzled_offset

SMALLEST = 1e-10  # lower bound of a group's max and of a scale rounded to a power of two
MIDDLES = ((0.25, 0.75), (1.25, 1.75), (2.5, 3.5), (5.0,))  # between e2m1 values; ties: down, up


def write_quantized(
    values: Tensor,
    scales: Tensor | None,
    x: Tensor,  # [n, O]
    global_scale: Tensor | None,
    *,
    rows: Tensor | None,
    first_row: int,
    format: str,
) -> None:
    """Quantize x into `rows` of the buffers (negative ones skipped), or from first_row on."""
    if rows is None:
        rows = torch.arange(first_row, first_row + x.shape[0], device=x.device)
    kept = rows >= 0
    rows, x = rows[kept], x[kept]
    codes, factors = quantize(x, global_scale, format=format)
    values.view(torch.uint8)[rows] = codes
    if factors is not None and scales is not None:
        if get_output_format(format).packed:
            groups = torch.arange(factors.shape[1], device=x.device)
            at = swizzled_offset(rows[:, None], groups[None, :], x.shape[1])
            scales.view(torch.uint8).view(-1)[at] = factors.view(torch.uint8)
        else:
            raw_view(scales)[rows] = raw_view(factors)


def quantize(
    x: Tensor, global_scale: Tensor | None, *, format: str
) -> tuple[Tensor, Tensor | None]:
    """Return the value bytes [n, O or O/2] of x [n, O], and the scales [n, groups] if any."""
    layout, x = get_output_format(format), x.to(torch.float32)
    if not layout.group:
        assert global_scale is not None
        return encode_fp8(x * global_scale.reciprocal()), None
    if layout.packed:
        assert global_scale is not None
        return _quantize_fp4(x, global_scale)
    groups = x.unflatten(1, (-1, layout.group))
    scales = _over(groups.abs().amax(-1).clamp_min(SMALLEST), FP8_MAX)
    if layout.power_of_two:
        scales = power_of_two(scales.clamp_min(SMALLEST))
    return encode_fp8(groups / scales[:, :, None]).flatten(1), scales


def _quantize_fp4(x: Tensor, global_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize to e2m1; groups whose scale is 0 or NaN become zeros."""
    groups = x.unflatten(1, (-1, FP4_GROUP))
    stored = encode_fp8(_over(groups.abs().amax(-1) * global_scale, FP4_MAX))
    scales = stored.view(torch.float8_e4m3fn).to(torch.float32)[:, :, None]
    codes = encode_fp4(groups * global_scale / scales)
    codes = codes.where(scales > 0, 0).flatten(1)
    return codes[:, 0::2] | codes[:, 1::2] << 4, stored.view(torch.float8_e4m3fn)


def encode_fp8(values: Tensor) -> Tensor:
    """Convert float32 to e4m3 bytes: nearest even, saturated, NaN as 0x7f."""
    return to_fp8(values).view(torch.uint8).where(~values.isnan(), 0x7F)


def encode_fp4(values: Tensor) -> Tensor:
    """Convert float32 to e2m1 codes, one byte each: nearest, ties to the even code, saturated."""
    codes = torch.zeros_like(values, dtype=torch.uint8)
    magnitudes = values.abs()
    for down, *up in MIDDLES:
        codes += magnitudes > down
        for middle in up:
            codes += magnitudes >= middle
    return codes | values.signbit().to(torch.uint8) << 3


def _over(values: Tensor, number: float) -> Tensor:
    """Divide exactly: torch on a GPU multiplies by the reciprocal of a Python number."""
    return values / torch.full((), number, dtype=values.dtype, device=values.device)
