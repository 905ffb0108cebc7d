"""project_quantize: multiply latent outputs by w_uv and quantize them into the caller's buffers.

    x[t, h] = out_latent[t, h] @ (w_uv[h] * its scales)
    rows of values and scales = quantize_out of x

x has V columns per head, O = H * V in total. It is the output of project_heads, rounded to
out_latent's dtype, and the input of quantize_out: where sums are equal, the bytes equal those of
the two ops in sequence. But x is not written. Weights and their scales are as in
ops/project_heads.py; buffers, rows and results for NaN are as in ops/quantize_out.py. With no
tokens, nothing is written.
"""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from openmla.backends import Problem, problem_on
from openmla.ops._declare import Size, op
from openmla.ops._quantized import check_target, check_target_values, row_bytes
from openmla.ops._register import Cost
from openmla.ops.project_heads import E4M3, check_scales, check_weight, rows_per_scale


def check(op: str, out_latent: Tensor, w_uv: Tensor, w_scale: Tensor | None) -> None:
    check_weight(op, "w_uv", w_uv, w_scale, out_latent)


def problem(
    device: torch.device, dtype: torch.dtype, format: str, *, eight_bits: bool, block: int, C: int,
    V: int,
) -> Problem:  # fmt: skip
    """Describe a call to the backends; `format` is that of the output, and `block` rows of w_uv
    share a scale (all if there is none)."""
    kinds = ("fp8",) if eight_bits else ()
    return problem_on(
        device, "project_quantize", dtype=dtype, format=format, kinds=kinds, BS=block, C=C, V=V
    )


def problem_of(out_latent: Tensor, w_uv: Tensor, w_scale: Tensor | None, format: str) -> Problem:
    return problem(
        out_latent.device, out_latent.dtype, format, eight_bits=w_uv.dtype == E4M3,
        block=rows_per_scale(w_uv, w_scale), C=w_uv.shape[1], V=w_uv.shape[2],
    )  # fmt: skip


@op(
    problem=problem_of,
    check=[check, check_target],
    check_values=[check_target_values, check_scales],
    mutates_args=["values", "scales"],
    no_grad=["out_latent", "w_uv", "w_scale"],
)
def project_quantize(
    values: Annotated[Tensor, "[...]"],  # [T, O] e4m3, or [T, O/2] uint8
    scales: Tensor | None,  # [T, O/group] f32, swizzled e4m3, or None
    out_latent: Annotated[Tensor, "[n, H, C] float row"],
    w_uv: Annotated[Tensor, "[H, C, V] float|e4m3"],
    w_scale: Tensor | None = None,  # [H, KB, NB] f32
    global_scale: Tensor | None = None,  # [] f32
    *,
    rows: Tensor | None = None,  # [n] i64
    first_row: Size = 0,
    format: str,
    backend: str = "auto",
) -> None:
    """Project and quantize n rows; see the module docstring for the contract.

    Args:
        values: quantized rows, written in place: e4m3, or uint8 for nvfp4.
        scales: their scales, written in place; None for format fp8.
        out_latent: outputs in latent space.
        w_uv: a matrix per head, of out_latent's dtype or e4m3.
        w_scale: scales of blocks of e4m3 weights.
        global_scale: static scale, needed by formats fp8 and nvfp4 only.
        rows: row of values for each token. Negative: not written.
        first_row: without rows, the row of values of the first token.
        format: a key of openmla.OUTPUT_FORMATS.
        backend: "auto", or the name of a backend.

    Raises:
        ShapeError: an argument does not fit the contract. Values are checked on the CPU only.
        ConfigError: the format or the backend is not known.
        UnsupportedError: no backend supports the call, or out_latent, w_uv or w_scale requires
            grad while grad mode is on.

    ```python
    import openmla
    import torch
    from openmla.ops import project_quantize

    target = openmla.make_output("fp8_64", 3, 64)
    out_latent, w_uv = torch.randn(3, 2, 8), torch.randn(2, 8, 32)  # 3 tokens, 2 heads
    project_quantize(target.values, target.scales, out_latent, w_uv, format="fp8_64")
    print(target.values.shape, target.scales.shape)  # [3, 64] and [3, 1]
    ```
    """


def cost(
    num_rows: int, *, H: int, C: int, V: int, itemsize: int, w_itemsize: int, format: str
) -> Cost:
    """Weights and latent outputs read once, values and scales written once."""
    num_bytes = H * C * (V * w_itemsize + num_rows * itemsize)
    return Cost(num_bytes + num_rows * row_bytes(H * V, format), 2 * num_rows * H * C * V)
