"""quantize_out: quantize attention outputs [n, H, V] into the caller's buffers.

The O = H * V values x of token i are written to row rows[i], or first_row + i without rows. All
arithmetic is in float32:

    fp8       values = e4m3(x * (1 / global_scale))
    groups    a = max(1e-10, max |x| of the group);  scale = a / 448
              powers of two: scale = 2^ceil(log2(max(scale, 1e-10)))
              values = e4m3(x / scale)
    nvfp4     scale = e4m3(max |x| of 16 columns * global_scale / 6)
              values = e2m1(x * global_scale / scale), 0 where scale is 0

e4m3() and e2m1() round to nearest even and saturate, at 448 and 6; the sign of 0 is kept. For the
buffers, see openmla/outputs.py. Negative rows are skipped, and the others must be distinct; only
the values and scales of these rows are written. Quotients and the reciprocal are rounded once, so
every backend writes the same bytes.

A NaN is kept: in fp8 it is byte 0x7f; in a group, the scale and all values are NaN; in NVFP4 the
scale is 0x7f (NaN) and the group's values are 0. An infinity saturates in fp8 and NVFP4; in a group
the scale is infinite, so that the whole group is NaN when read.
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
    """Describe a call to the backends."""
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
    values: Annotated[Tensor, "[...]"],  # [T, O] e4m3, or [T, O/2] uint8
    scales: Tensor | None,  # [T, O/group] f32, swizzled e4m3, or None
    out: Annotated[Tensor, "[n, H, V] float row"],
    global_scale: Tensor | None = None,  # [] f32
    *,
    rows: Tensor | None = None,  # [n] i64
    first_row: Size = 0,
    format: str,
    backend: str = "auto",
) -> None:
    """Quantize n rows; see the module docstring for the contract.

    Args:
        values: quantized rows, written in place: e4m3, or uint8 for nvfp4.
        scales: their scales, written in place; None for format fp8.
        out: attention outputs.
        global_scale: static scale, needed by formats fp8 and nvfp4 only.
        rows: row of values for each token. Negative: not written.
        first_row: without rows, the row of values of the first token.
        format: a key of openmla.OUTPUT_FORMATS.
        backend: "auto", or the name of a backend.

    Raises:
        ShapeError: an argument does not fit the contract. Values are checked on the CPU only.
        ConfigError: the format or the backend is not known.
        UnsupportedError: no backend supports the call, or out requires grad while grad mode is on.

    ```python
    import openmla
    import torch
    from openmla.ops import quantize_out

    target = openmla.make_output("fp8_64", 5, 64)
    out = torch.randn(3, 2, 32)  # 3 tokens, 2 heads
    quantize_out(target.values, target.scales, out, first_row=2, format="fp8_64")
    print(target.scales[2:])
    ```
    """


def cost(num_rows: int, *, H: int, V: int, itemsize: int, format: str) -> Cost:
    """Outputs read once, values and scales written once."""
    return Cost(num_rows * (H * V * itemsize + row_bytes(H * V, format)), num_rows * 3 * H * V)
