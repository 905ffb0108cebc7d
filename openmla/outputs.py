"""Layouts of quantized attention outputs. OUTPUT_FORMATS is the dict of all formats.

The output of a step is [T, O], O = H * V, as o_proj reads it. Quantized it is `values` [T, O] and
their scales:

    fp8                  e4m3, one scale for all: x = value * global_scale
    fp8_128, fp8_64      e4m3, a float32 scale per token and 128 (64) columns: x = value * scale
    fp8_128_pow2, ...    the same, scales rounded up to powers of two
    nvfp4                e2m1, two in a byte (the even column in the low half), an e4m3 scale per
                         token and 16 columns: x = value * scale / global_scale

Group scales are [T, O/group], row-major or column-major; readers use the strides. For NVFP4 they
are [T', K'] bytes, T rounded up to 128 and O/16 up to 4, in the order in which tensor cores read
them: swizzled_offset() returns the offset of each, and the rest is zero. ops/quantize_out.py
defines how they are computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from openmla.errors import ConfigError, ShapeError

FP4_MAX = 6.0  # largest e2m1
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # e2m1 values by their three lower bits
FP4_GROUP = 16  # columns that share a scale in nvfp4
LAYOUTS = ("row", "column", "tma")  # strides of group scales; "tma": column-major, padded to 4


@dataclass(frozen=True)
class OutputFormat:
    """A format of quantized attention outputs. openmla.OUTPUT_FORMATS has all formats.

    Attributes:
        name: the key in OUTPUT_FORMATS.
        dtype: dtype of the values; uint8 holds two e2m1 values.
        group: columns that share a scale; 0 if all columns share global_scale.
        power_of_two: whether scales are rounded up to powers of two.
    """

    name: str
    dtype: torch.dtype
    group: int = 0
    power_of_two: bool = False

    @property
    def packed(self) -> bool:
        """Whether a byte holds two values, and scales are swizzled bytes."""
        return self.dtype == torch.uint8

    @property
    def global_scale(self) -> bool:
        """Whether the caller gives a scale: the fp8 values' divisor, or NVFP4's multiplier."""
        return self.packed or self.group == 0

    def width(self, columns: int) -> int:
        """Return the stored elements of a row of O values."""
        return columns // 2 if self.packed else columns

    def scales_shape(self, T: int, columns: int) -> tuple[int, int] | None:
        """Return the shape of stored scales; None if there are none."""
        if self.packed:
            return -(-T // 128) * 128, -(-columns // (4 * FP4_GROUP)) * 4
        return (T, columns // self.group) if self.group else None

    @property
    def scales_dtype(self) -> torch.dtype:
        return torch.float8_e4m3fn if self.packed else torch.float32


OUTPUT_FORMATS: dict[str, OutputFormat] = {
    format.name: format
    for format in (
        OutputFormat("fp8", torch.float8_e4m3fn),
        OutputFormat("fp8_128", torch.float8_e4m3fn, 128),
        OutputFormat("fp8_64", torch.float8_e4m3fn, 64),
        OutputFormat("fp8_128_pow2", torch.float8_e4m3fn, 128, power_of_two=True),
        OutputFormat("fp8_64_pow2", torch.float8_e4m3fn, 64, power_of_two=True),
        OutputFormat("nvfp4", torch.uint8, FP4_GROUP),
    )
}


def get_output_format(name: str) -> OutputFormat:
    """Return OUTPUT_FORMATS[name], or raise a ConfigError that lists the names."""
    found = OUTPUT_FORMATS.get(name) if isinstance(name, str) else None
    if found is None:
        known = ", ".join(OUTPUT_FORMATS)
        raise ConfigError(f"output: format {name!r} is not known. Known: {known}.")
    return found


class QuantizedOutput(NamedTuple):
    """The buffers of a quantized attention output, made by make_output().

    Attributes:
        values: [T, O] e4m3, or [T, O/2] uint8 for nvfp4.
        scales: [T, O/group] float32, swizzled e4m3 bytes for nvfp4, or None.
        global_scale: [] float32, for fp8 and nvfp4.
        format: a key of OUTPUT_FORMATS.

    ```python
    import openmla, torch

    values = torch.empty(3, 256, dtype=torch.float8_e4m3fn)  # memory of your engine
    out = openmla.QuantizedOutput(values, None, torch.tensor(0.02), "fp8")
    heads = torch.randn(3, 2, 128)
    openmla.ops.quantize_out(out.values, out.scales, heads, out.global_scale, format=out.format)
    print((openmla.decode_output(out) - heads.flatten(1)).abs().max())  # the rounding error
    ```
    """

    values: Tensor  # [T, O] e4m3, or [T, O/2] uint8
    scales: Tensor | None  # [T, O/group] f32, swizzled e4m3 bytes, or None
    global_scale: Tensor | None  # [] f32
    format: str


def make_output(
    format: str,
    T: int,
    columns: int,
    *,
    global_scale: float | Tensor | None = None,
    layout: str = "row",
    device: torch.device | str = "cpu",
) -> QuantizedOutput:
    """Allocate buffers for T rows of quantized outputs, for attend_step(out=...).

    Args:
        format: a key of openmla.OUTPUT_FORMATS.
        T: the number of rows.
        columns: O = H * V, the columns of a row.
        global_scale: the divisor of fp8 values, or the multiplier of NVFP4.
        layout: strides of group scales. "row", "column", or "tma", which is column-major with
            columns a multiple of 4 apart.
        device: where to allocate.

    Returns:
        Buffers that are not initialized, except the padding of NVFP4's scales, which is zero.

    Raises:
        ConfigError: an option does not suit the format.
        ShapeError: the columns are not a multiple of the format's group.

    ```python
    import openmla, torch

    out = openmla.make_output("fp8_128", 3, 256)
    openmla.ops.quantize_out(out.values, out.scales, torch.randn(3, 2, 128), format="fp8_128")
    print(out.values.dtype, out.scales.shape)  # e4m3, and a scale per 128 columns
    ```
    """
    wanted = get_output_format(format)
    if layout not in LAYOUTS:
        raise ConfigError(f"output: layout must be one of {', '.join(LAYOUTS)}, got {layout!r}.")
    if layout != "row" and (wanted.packed or not wanted.group):
        raise ConfigError(f"output: layout must be 'row' for format {format}, got {layout!r}.")
    if T < 0:
        raise ConfigError(f"output: T must be at least 0, got {T}.")
    scalar = isinstance(global_scale, (int, float)) and not isinstance(global_scale, bool)
    if global_scale is not None and not scalar and not isinstance(global_scale, Tensor):
        raise ConfigError(f"output: global_scale must be a number, got {global_scale!r}.")
    check_width("output", wanted, columns)
    values = torch.empty(T, wanted.width(columns), dtype=wanted.dtype, device=device)
    scales = None
    if wanted.packed:
        padded = wanted.scales_shape(T, columns)
        assert padded is not None
        scales = torch.zeros(padded, dtype=torch.uint8, device=device).view(wanted.scales_dtype)
    elif wanted.group and layout == "row":
        scales = torch.empty(T, columns // wanted.group, device=device)
    elif wanted.group:
        apart = T if layout == "column" else -(-T // 4) * 4
        scales = torch.empty(columns // wanted.group, apart, device=device).t()[:T]
    if isinstance(global_scale, (int, float)):
        check_scale_value("output", global_scale)
        global_scale = torch.full((), global_scale, dtype=torch.float32, device=device)
    made = QuantizedOutput(values, scales, global_scale, format)
    check_output("output", made, columns)
    return made


def check_width(where: str, format: OutputFormat, columns: int) -> None:
    """Raise unless rows split evenly into groups."""
    if format.group and columns % format.group:
        raise ShapeError(
            f"{where}: columns must be a multiple of {format.group} for format {format.name}, got "
            f"{columns}."
        )


def check_output(where: str, out: QuantizedOutput, columns: int) -> int:
    """Raise unless buffers fit their format and rows of O values. Returns T; reads metadata
    only."""
    T = check_output_shapes(where, out, columns)
    values = out.values
    if T > 1 and values.stride(0) < values.shape[1]:
        raise ShapeError(
            f"{where}: rows of values must not overlap, got strides {values.stride()} for "
            f"{values.shape[1]} columns."
        )
    if out.scales is not None:
        _check_scale_strides(where, get_output_format(out.format), out.scales)
    return T


def check_output_shapes(where: str, out: QuantizedOutput, columns: int) -> int:
    """Same as check_output() without strides of scales, which would specialize symbols in
    tracing."""
    format = get_output_format(out.format)
    check_width(where, format, columns)
    values, scales = out.values, out.scales
    T, width = values.shape[0] if values.dim() else 0, format.width(columns)
    _check_tensor(where, "values", values, (T, width), format.dtype, values.device)
    if width > 1 and values.stride(1) != 1:
        raise ShapeError(
            f"{where}: values must be contiguous along its last dimension, "
            f"got strides {values.stride()}."
        )
    shape = format.scales_shape(T, columns)
    if (scales is None) != (shape is None):
        wanted = "None" if shape is None else f"a tensor {list(shape)}"
        got = "None" if scales is None else f"a tensor {list(scales.shape)}"
        raise ShapeError(f"{where}: scales must be {wanted} for format {format.name}, got {got}.")
    if scales is not None and shape is not None:
        _check_tensor(where, "scales", scales, shape, format.scales_dtype, values.device)
    _check_global_scale(where, format, out.global_scale, values.device)
    return T


def _check_tensor(
    where: str,
    name: str,
    tensor: Tensor,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    if tensor.shape != shape:
        raise ShapeError(f"{where}: {name} must be {list(shape)}, got {list(tensor.shape)}.")
    if tensor.dtype != dtype:
        raise ShapeError(f"{where}: {name} must be {dtype}, got {tensor.dtype}.")
    if tensor.device != device:
        raise ShapeError(f"{where}: {name} must be on {device}, got {tensor.device}.")


def _check_scale_strides(where: str, format: OutputFormat, scales: Tensor) -> None:
    """Check strides: group scales contiguous in one dimension without overlap, swizzled
    contiguous."""
    (T, G), (row, column) = scales.shape, scales.stride()
    if T == 0 or G == 0:
        return
    if format.packed:
        if not scales.is_contiguous():
            raise ShapeError(
                f"{where}: scales must be contiguous for format {format.name}, "
                f"got strides {scales.stride()}."
            )
        return
    row_major = (G == 1 or column == 1) and (T == 1 or row >= G)
    column_major = (T == 1 or row == 1) and (G == 1 or column >= T)
    if not row_major and not column_major:
        raise ShapeError(
            f"{where}: scales must be row-major ({G}, 1) or column-major (1, {T} or more), "
            f"got strides {scales.stride()}."
        )


def _check_global_scale(
    where: str, format: OutputFormat, global_scale: Tensor | None, device: torch.device
) -> None:
    if (global_scale is not None) != format.global_scale:
        wanted = "a float32 scalar" if format.global_scale else "None"
        got = "None" if global_scale is None else "a tensor"
        raise ShapeError(
            f"{where}: global_scale must be {wanted} for format {format.name}, got {got}."
        )
    if global_scale is not None:
        _check_tensor(where, "global_scale", global_scale, (), torch.float32, device)


def check_alignment(where: str, values: Tensor, scales: Tensor | None) -> None:
    """Raise unless buffers are 16-byte aligned, as readers require. Not for traced tensors."""
    for name, tensor in (("values", values), ("scales", scales)):
        if tensor is not None and tensor.data_ptr() % 16:
            raise ShapeError(
                f"{where}: {name} must be aligned to 16 bytes, got an address with remainder "
                f"{tensor.data_ptr() % 16}."
            )


def check_scale_value(where: str, global_scale: float | Tensor | None) -> None:
    """Raise unless a scale is positive, finite and normal; tensors are only read on the CPU."""
    if global_scale is None:
        return
    if isinstance(global_scale, Tensor) and global_scale.device.type != "cpu":
        return
    value, single = float(global_scale), torch.finfo(torch.float32)
    if not single.tiny <= value <= single.max:
        raise ShapeError(f"{where}: global_scale must be positive and finite, got {value}.")


def swizzled_offset(row: Tensor, column: Tensor, columns: int) -> Tensor:
    """Return the byte offset of NVFP4's scale (row, column of O/16) in its buffer: tiles of 128 x
    4, in which rows 32 apart are adjacent."""
    tiles = -(-columns // (4 * FP4_GROUP))
    tile = row // 128 * tiles + column // 4
    return tile * 512 + row % 32 * 16 + row // 32 % 4 * 4 + column % 4


def decode_output(out: QuantizedOutput, dtype: torch.dtype = torch.float32) -> Tensor:
    """Decode quantized outputs to values [T, O], computed in float32 (float64 if dtype is).

    Args:
        out: the buffers.
        dtype: dtype of the result.

    Returns:
        [T, O] values of `dtype`.

    Raises:
        ConfigError: the format is not known.

    ```python
    import openmla, torch

    out = openmla.make_output("fp8", 1, 4, global_scale=0.5)
    out.values.copy_(torch.tensor([[0.0, 1.0, -2.0, 8.0]]))
    print(openmla.decode_output(out))  # 0, 0.5, -1 and 4
    ```
    """
    format = get_output_format(out.format)
    wide = torch.promote_types(dtype, torch.float32)
    if not format.group:
        assert out.global_scale is not None
        return (out.values.to(wide) * out.global_scale.to(wide)).to(dtype)
    assert out.scales is not None
    if not format.packed:
        groups = out.values.to(wide).unflatten(1, (-1, format.group))
        return (groups * out.scales.to(wide)[:, :, None]).flatten(1).to(dtype)
    assert out.global_scale is not None
    T, columns, device = out.values.shape[0], 2 * out.values.shape[1], out.values.device
    codes = torch.stack([out.values & 0xF, out.values >> 4], 2).flatten(1).long()
    table = torch.tensor([*FP4_VALUES, *(-value for value in FP4_VALUES)], dtype=wide).to(device)
    at = swizzled_offset(
        torch.arange(T, device=device)[:, None],
        torch.arange(columns // FP4_GROUP, device=device)[None, :],
        columns,
    )
    scales = out.scales.view(torch.uint8).flatten()[at].view(torch.float8_e4m3fn).to(wide)
    groups = table[codes].unflatten(1, (-1, FP4_GROUP)) * scales[:, :, None]
    return (groups.flatten(1) / out.global_scale.to(wide)).to(dtype)
