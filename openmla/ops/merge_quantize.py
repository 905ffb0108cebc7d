"""merge_quantize: merge two partial attentions over disjoint keys and quantize the result.

    x = (exp(lse - m) * out + exp(other_lse - m) * other_out) / z,  m and z as in merge_states
    rows of values and scales = quantize_out of x

x is what merge_states would write to out, rounded to its dtype: on one backend, the two ops in
sequence write the same bytes. This op writes neither x nor lse. A side whose lse is -inf saw no
key, and its out is ignored; if both are -inf, x is 0. A side whose lse is NaN or +inf makes x of
its head NaN. lse may have any strides. The merge is in float32 (float64 if any input is). Buffers,
rows and results for NaN are as in ops/quantize_out.py. With base=2 both lse are logarithms to
base 2.
"""

from __future__ import annotations

import math
from typing import Annotated

import torch
from torch import Tensor

from openmla.backends import Problem, problem_on
from openmla.ops._declare import Size, op
from openmla.ops._quantized import check_target, check_target_values, row_bytes
from openmla.ops._register import Cost
from openmla.ops.merge_states import check_lse, in_nats


def problem(device: torch.device, dtype: torch.dtype, format: str) -> Problem:
    """Describe a call to the backends."""
    return problem_on(device, "merge_quantize", dtype=dtype, format=format)


@op(
    problem=problem,
    dtype_of="out",
    check=[check_lse, check_target],
    check_values=check_target_values,
    mutates_args=["values", "scales"],
    no_grad=["out", "lse", "other_out", "other_lse"],
    host_args=["base"],
)
def merge_quantize(
    values: Annotated[Tensor, "[...]"],  # [T, O] e4m3, or [T, O/2] uint8
    scales: Tensor | None,  # [T, O/group] f32, swizzled e4m3, or None
    out: Annotated[Tensor, "[n, H, V] float row"],
    lse: Annotated[Tensor, "[n, H] float"],  # f32
    other_out: Annotated[Tensor, "[n, H, V] float row"],
    other_lse: Annotated[Tensor, "[n, H] float"],  # f32
    global_scale: Tensor | None = None,  # [] f32
    *,
    rows: Tensor | None = None,  # [n] i64
    first_row: Size = 0,
    format: str,
    base: float = math.e,
    backend: str = "auto",
) -> None:
    """Merge and quantize n rows; see the module docstring for the contract.

    Args:
        values: quantized rows, written in place: e4m3, or uint8 for nvfp4.
        scales: their scales, written in place; None for format fp8.
        out: outputs of one partial attention.
        lse: lse of that attention.
        other_out: outputs of the other.
        other_lse: its lse.
        global_scale: static scale, needed by formats fp8 and nvfp4 only.
        rows: row of values for each token. Negative: not written.
        first_row: without rows, the row of values of the first token.
        format: a key of openmla.OUTPUT_FORMATS.
        base: base of both lse, math.e or 2.
        backend: "auto", or the name of a backend.

    Raises:
        ShapeError: an argument does not fit the contract. Values are checked on the CPU only.
        ConfigError: the format or the backend is not known.
        UnsupportedError: no backend supports the call, or out, lse, other_out or other_lse
            requires grad while grad mode is on.

    ```python
    import openmla
    import torch
    from openmla.ops import merge_quantize

    target = openmla.make_output("fp8_64", 2, 64)
    out, other_out = torch.randn(2, 2, 2, 32)  # of 2 tokens, 2 heads and 32 columns
    lse, other_lse = torch.randn(2, 2, 2)
    merge_quantize(
        target.values, target.scales, out, lse, other_out, other_lse, format="fp8_64"
    )
    print(target.values.shape, target.scales.shape)  # [2, 64] and [2, 1]
    ```
    """
    lse, other_lse = in_nats("merge_quantize", base, lse, other_lse)
    _OP(
        values, scales, out, lse, other_out, other_lse, global_scale, rows,
        first_row=first_row, format=format, backend=backend,
    )  # fmt: skip


_OP = torch.ops.openmla.merge_quantize.default  # looked up once


def cost(num_rows: int, *, H: int, V: int, itemsize: int, format: str) -> Cost:
    """Both sides read once, values and scales written once."""
    read = 2 * H * (V * itemsize + 4)
    return Cost(num_rows * (read + row_bytes(H * V, format)), num_rows * 6 * H * V)
