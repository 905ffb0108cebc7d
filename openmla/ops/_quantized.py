"""What the ops that write quantised outputs check alike: buffers, target rows, the global scale."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from openmla.errors import ShapeError
from openmla.ops._values import check_slots
from openmla.outputs import (
    QuantizedOutput,
    check_alignment,
    check_output,
    check_output_shapes,
    check_scale_value,
    get_output_format,
)


class Target(NamedTuple):
    """Where n tokens go: buffers, and their rows."""

    values: Tensor
    scales: Tensor | None
    global_scale: Tensor | None
    rows: Tensor | None
    first_row: int
    format: str

    @property
    def buffers(self) -> QuantizedOutput:
        return QuantizedOutput(self.values, self.scales, self.global_scale, self.format)


def check_target(op: str, target: Target, n: int, columns: int) -> None:
    """Metadata of a call: buffers as their format has them, and n rows of them."""
    T = check_output(op, target.buffers, columns)
    check_alignment(op, target.values, target.scales)
    _check_rows(op, target, n)
    first = target.first_row
    if target.rows is None and not 0 <= first <= T - n:
        raise ShapeError(
            f"{op}: rows {first} to {first + n - 1} must be within the T={T} of values."
        )


def check_traced_target(op: str, target: Target, n: int, columns: int) -> None:
    """The same while tracing: tensors have no address, and how far rows reach is not compared."""
    check_output_shapes(op, target.buffers, columns)
    _check_rows(op, target, n)


def _check_rows(op: str, target: Target, n: int) -> None:
    rows, device = target.rows, target.values.device
    if rows is None:
        return
    if rows.shape != (n,) or rows.dtype != torch.int64:
        raise ShapeError(f"{op}: rows must be [{n}] int64, got {list(rows.shape)} {rows.dtype}.")
    if rows.numel() > 1 and rows.stride(0) != 1:
        raise ShapeError(f"{op}: rows must be contiguous, got strides {rows.stride()}.")
    if rows.device != device:
        raise ShapeError(f"{op}: rows must be on {device}, got {rows.device}.")


def check_target_values(op: str, target: Target) -> None:
    """What can be looked at for free: on the CPU, rows are distinct and there, the scale one."""
    if target.values.device.type != "cpu":
        return
    check_scale_value(op, target.global_scale)
    if target.rows is not None:
        check_slots(op, target.rows, target.values.shape[0], "rows")


def check_same_device(op: str, values: Tensor, inputs: dict[str, Tensor]) -> None:
    """Inputs are where the buffers are."""
    for name, tensor in inputs.items():
        if tensor.device != values.device:
            raise ShapeError(f"{op}: {name} must be on {values.device}, got {tensor.device}.")


def row_bytes(columns: int, format: str) -> int:
    """Bytes that one quantised row of O values takes, padding not counted."""
    layout = get_output_format(format)
    groups = columns // layout.group if layout.group else 0
    return layout.width(columns) + groups * (1 if layout.packed else 4)
