"""quantize_out: quantize attention outputs [n, H, V] into the caller's buffers.

A token's O = H * V values x go into row rows[i], or first_row + i without rows. All in float32:

    fp8       values = e4m3(x * (1 / global_scale))
    groups    a = max(1e-10, max |x| of the group);  scale = a / 448
              powers of two: scale = 2^ceil(log2(max(scale, 1e-10)))
              values = e4m3(x / scale)
    nvfp4     scale = e4m3(max |x| of 16 columns * global_scale / 6)
              values = e2m1(x * global_scale / scale), 0 where scale is 0

e4m3() and e2m1() round to nearest even and saturate, at 448 and 6; the sign of 0 is kept. What the
buffers are: openmla/outputs.py. Negative rows are not written, others at most once; nothing but
these rows' values and scales is. Quotients and the reciprocal are rounded once: every backend gives
the same bytes.

A NaN stays one: byte 0x7f in fp8; in a group its scale is NaN and so are all its values; in NVFP4
the scale is 0x7f, NaN, and the group's values are 0. An infinity saturates in fp8 and NVFP4; in a
group the scale is infinite, so that all of it is NaN for a reader.
"""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from openmla.backends import Problem, problem_on
from openmla.ops._declare import Size, op
from openmla.ops._quantized import check_target, check_target_values, row_bytes
from openmla.ops._register import Cost


def problem(device: torch.device, dtype: torch.dtype, format: str) -> Problem:
    """A call, as backends are asked about it."""
    return problem_on(device, "quantize_out", dtype=dtype, format=format)


@op(
    problem=problem,
    dtype_of="out",
    check=check_target,
    check_values=check_target_values,
    mutates_args=["values", "scales"],
    no_grad=["out"],
)
def quantize_out(
    values: Annotated[Tensor, "[...]"],  # [T, O] e4m3, or [T, O/2] uint8; rows written in place
    scales: Tensor | None,  # [T, O/group] f32, swizzled e4m3, or None; written in place
    out: Annotated[Tensor, "[n, H, V] float row"],
    global_scale: Tensor | None = None,  # [] f32
    *,
    rows: Tensor | None = None,  # [n] i64; negative: not written
    first_row: Size = 0,
    format: str,
    backend: str = "auto",
) -> None:
    """Quantise n rows; see the module's text for the contract."""


def cost(num_rows: int, *, H: int, V: int, itemsize: int, format: str) -> Cost:
    """Outputs read once, values and scales written once."""
    return Cost(num_rows * (H * V * itemsize + row_bytes(H * V, format)), num_rows * 3 * H * V)
