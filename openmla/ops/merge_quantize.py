"""merge_quantize: merge two partial attentions over disjoint keys and quantize the result.

    x = (exp(lse - m) * out + exp(other_lse - m) * other_out) / z,  m and z as in merge_states
    rows of values and scales = quantize_out of x

x is what merge_states would leave in out, rounded to its dtype: of one backend, the two ops one
after the other write the same bytes. But no x is written, and no lse. A side whose lse is -inf saw
no key: its out is not looked at; both so: x is 0. A side whose lse is NaN or +inf makes its head's
x NaN. lse may have any strides. The merge is in float32 (float64 if any input is). Buffers, rows
and what NaN becomes: as in ops/quantize_out.py. With base=2 both lse are logarithms to base 2.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from openmla.backends import Problem, problem_on
from openmla.errors import ShapeError
from openmla.ops._quantized import (
    Target,
    check_same_device,
    check_target,
    check_target_values,
    check_traced_target,
    row_bytes,
)
from openmla.ops._register import Cost, Decided, bind, decided, refuse_grad, register
from openmla.ops.merge_states import in_nats

_SPEC = "out:n H V f row, lse:n H f, other_out:n H V f row, other_lse:n H f"


def _check_sides(sides: tuple[Tensor, ...]) -> dict[str, int]:
    dims = bind("merge_quantize", _SPEC, sides)
    for name, tensor in (("lse", sides[1]), ("other_lse", sides[3])):
        if tensor.dtype.itemsize < 4:
            raise ShapeError(
                f"merge_quantize: {name} must be float32 or float64, got {tensor.dtype}. "
                "16-bit lse costs percents of weight."
            )
    return dims


def problem(device: torch.device, dtype: torch.dtype, format: str) -> Problem:
    """A call, as backends are asked about it."""
    return problem_on(device, "merge_quantize", dtype=dtype, format=format)


def _decide(
    values: Tensor,
    scales: Tensor | None,
    out: Tensor,
    lse: Tensor,
    other_out: Tensor,
    other_lse: Tensor,
    global_scale: Tensor | None,
    rows: Tensor | None,
    *,
    first_row: int,
    format: str,
    backend: str,
) -> Decided:
    dims = _check_sides((out, lse, other_out, other_lse))
    target = Target(values, scales, global_scale, rows, first_row, format)
    check_same_device("merge_quantize", values, {"out": out})
    check_target("merge_quantize", target, dims["n"], dims["H"] * dims["V"])
    return decided(dims, problem(out.device, out.dtype, format), backend)


def _run(
    known: Decided,
    values: Tensor,
    scales: Tensor | None,
    out: Tensor,
    lse: Tensor,
    other_out: Tensor,
    other_lse: Tensor,
    global_scale: Tensor | None,
    rows: Tensor | None,
    *,
    first_row: int,
    format: str,
) -> None:
    sides = (out, lse, other_out, other_lse)
    refuse_grad("merge_quantize", sides)
    target = Target(values, scales, global_scale, rows, first_row, format)
    check_target_values("merge_quantize", target)
    known.runner.run(
        values, scales, *sides, global_scale, rows=rows, first_row=first_row, format=format
    )


def _fake(
    values: Tensor,
    scales: Tensor | None,
    out: Tensor,
    lse: Tensor,
    other_out: Tensor,
    other_lse: Tensor,
    global_scale: Tensor | None,
    rows: Tensor | None,
    *,
    first_row: int,
    format: str,
    backend: str,
) -> None:
    dims = _check_sides((out, lse, other_out, other_lse))
    target = Target(values, scales, global_scale, rows, first_row, format)
    check_same_device("merge_quantize", values, {"out": out})
    check_traced_target("merge_quantize", target, dims["n"], dims["H"] * dims["V"])


_OP = register(
    "merge_quantize(Tensor(a!) values, Tensor(b!)? scales, Tensor out, Tensor lse,"
    " Tensor other_out, Tensor other_lse, Tensor? global_scale, Tensor? rows, *,"
    " SymInt first_row, str format, str backend) -> ()",
    _decide,
    _run,
    _fake,
)


def merge_quantize(
    values: Tensor,  # [T, O] e4m3, or [T, O/2] uint8; rows written in place
    scales: Tensor | None,  # [T, O/group] f32, swizzled e4m3, or None; written in place
    out: Tensor,  # [n, H, V]
    lse: Tensor,  # [n, H] f32
    other_out: Tensor,  # [n, H, V]
    other_lse: Tensor,  # [n, H] f32
    global_scale: Tensor | None = None,  # [] f32
    *,
    rows: Tensor | None = None,  # [n] i64; negative: not written
    first_row: int = 0,
    format: str,
    base: float = math.e,  # of both lse: math.e or 2
    backend: str = "auto",
) -> None:
    """Merge and quantise n rows; see the module's text for the contract."""
    lse, other_lse = in_nats("merge_quantize", base, lse, other_lse)
    _OP(
        values,
        scales,
        out,
        lse,
        other_out,
        other_lse,
        global_scale,
        rows,
        first_row=first_row,
        format=format,
        backend=backend,
    )


def cost(num_rows: int, *, H: int, V: int, itemsize: int, format: str) -> Cost:
    """Both sides read once, values and scales written once."""
    read = 2 * H * (V * itemsize + 4)
    return Cost(num_rows * (read + row_bytes(H * V, format)), num_rows * 6 * H * V)
