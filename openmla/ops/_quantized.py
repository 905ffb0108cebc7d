"""Checks shared by ops that write quantized outputs: buffers, target rows, the global scale."""

from __future__ import annotations

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


def check_target(
    op: str, values: Tensor, scales: Tensor | None, global_scale: Tensor | None,
    rows: Tensor | None, first_row: int, format: str, n: int, H: int, V: int, traced: bool,
) -> None:  # fmt: skip
    """Check that buffers match their format and have room for n rows. While tracing, tensors have
    no address, and the range of rows is not checked."""
    buffers = QuantizedOutput(values, scales, global_scale, format)
    if traced:
        check_output_shapes(op, buffers, H * V)
        _check_rows(op, rows, n, values.device)
        return
    T = check_output(op, buffers, H * V)
    check_alignment(op, values, scales)
    _check_rows(op, rows, n, values.device)
    if rows is None and not 0 <= first_row <= T - n:
        raise ShapeError(
            f"{op}: rows {first_row} to {first_row + n - 1} must be within the T={T} of values."
        )


def _check_rows(op: str, rows: Tensor | None, n: int, device: torch.device) -> None:
    if rows is None:
        return
    if rows.shape != (n,) or rows.dtype != torch.int64:
        raise ShapeError(f"{op}: rows must be [{n}] int64, got {list(rows.shape)} {rows.dtype}.")
    if rows.numel() > 1 and rows.stride(0) != 1:
        raise ShapeError(f"{op}: rows must be contiguous, got strides {rows.stride()}.")
    if rows.device != device:
        raise ShapeError(f"{op}: rows must be on {device}, got {rows.device}.")


def check_target_values(
    op: str, values: Tensor, global_scale: Tensor | None, rows: Tensor | None
) -> None:
    """Check that rows are distinct and within range, and that the global scale is valid."""
    check_scale_value(op, global_scale)
    if rows is not None:
        check_slots(op, rows, values.shape[0], "rows")


def row_bytes(columns: int, format: str) -> int:
    """Return the bytes of one quantized row of O values, without padding."""
    layout = get_output_format(format)
    groups = columns // layout.group if layout.group else 0
    return layout.width(columns) + groups * (1 if layout.packed else 4)
