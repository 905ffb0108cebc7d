"""project_quantize: multiply latent outputs by w_uv and quantize them into the caller's buffers.

    x[t, h] = out_latent[t, h] @ (w_uv[h] * its scales)
    rows of values and scales = quantize_out of x

x has V columns a head, O = H * V in all. It is what project_heads gives, rounded to out_latent's
dtype, and what quantize_out is given: wherever sums are the same, so are the bytes of the two ops
one after the other. But no x is written. Weights and their scales are as in ops/project_heads.py;
buffers, rows and what NaN becomes, as in ops/quantize_out.py. No tokens: nothing is written.
"""

from __future__ import annotations

import torch
from torch import Tensor

from openmla.backends import Problem, problem_on
from openmla.ops._quantized import (
    Target,
    check_same_device,
    check_target,
    check_target_values,
    check_traced_target,
    row_bytes,
)
from openmla.ops._register import Cost, Decided, bind, decided, refuse_grad, register
from openmla.ops._values import check_positive
from openmla.ops.project_heads import E4M3, check_weight

_SPEC = "out_latent:n H C f row, w_uv:H C V q"


def _check(out_latent: Tensor, w_uv: Tensor, w_scale: Tensor | None) -> dict[str, int]:
    dims = bind("project_quantize", _SPEC, (out_latent, w_uv))
    dims["KB"], _ = check_weight("project_quantize", "w_uv", w_uv, w_scale, out_latent)
    return dims


def problem(
    device: torch.device, dtype: torch.dtype, format: str, *, eight_bits: bool, block: int, C: int,
    V: int,
) -> Problem:  # fmt: skip
    """A call, as backends are asked about it: `format` is the output's; `block` rows of w_uv share
    a scale, all without."""
    kinds = ("fp8",) if eight_bits else ()
    return problem_on(
        device, "project_quantize", dtype=dtype, format=format, kinds=kinds, BS=block, C=C, V=V
    )


def _decide(
    values: Tensor,
    scales: Tensor | None,
    out_latent: Tensor,
    w_uv: Tensor,
    w_scale: Tensor | None,
    global_scale: Tensor | None,
    rows: Tensor | None,
    *,
    first_row: int,
    format: str,
    backend: str,
) -> Decided:
    dims = _check(out_latent, w_uv, w_scale)
    target = Target(values, scales, global_scale, rows, first_row, format)
    check_target("project_quantize", target, dims["n"], dims["H"] * dims["V"])
    check_same_device("project_quantize", values, {"out_latent": out_latent})
    asked = problem(
        out_latent.device, out_latent.dtype, format, eight_bits=w_uv.dtype == E4M3,
        block=dims["C"] // dims["KB"], C=dims["C"], V=dims["V"],
    )  # fmt: skip
    return decided(dims, asked, backend)


def _run(
    known: Decided,
    values: Tensor,
    scales: Tensor | None,
    out_latent: Tensor,
    w_uv: Tensor,
    w_scale: Tensor | None,
    global_scale: Tensor | None,
    rows: Tensor | None,
    *,
    first_row: int,
    format: str,
) -> None:
    refuse_grad("project_quantize", [t for t in (out_latent, w_uv, w_scale) if t is not None])
    target = Target(values, scales, global_scale, rows, first_row, format)
    check_target_values("project_quantize", target)
    if w_scale is not None and w_scale.device.type == "cpu":
        check_positive("project_quantize", "w_scale", w_scale)
    known.runner.run(
        values, scales, out_latent, w_uv, w_scale, global_scale,
        rows=rows, first_row=first_row, format=format,
    )  # fmt: skip


def _fake(
    values: Tensor,
    scales: Tensor | None,
    out_latent: Tensor,
    w_uv: Tensor,
    w_scale: Tensor | None,
    global_scale: Tensor | None,
    rows: Tensor | None,
    *,
    first_row: int,
    format: str,
    backend: str,
) -> None:
    dims = _check(out_latent, w_uv, w_scale)
    target = Target(values, scales, global_scale, rows, first_row, format)
    check_traced_target("project_quantize", target, dims["n"], dims["H"] * dims["V"])


_OP = register(
    "project_quantize(Tensor(a!) values, Tensor(b!)? scales, Tensor out_latent, Tensor w_uv,"
    " Tensor? w_scale, Tensor? global_scale, Tensor? rows, *, SymInt first_row, str format,"
    " str backend) -> ()",
    _decide,
    _run,
    _fake,
)


def project_quantize(
    values: Tensor,  # [T, O] e4m3, or [T, O/2] uint8; rows written in place
    scales: Tensor | None,  # [T, O/group] f32, swizzled e4m3, or None; written in place
    out_latent: Tensor,  # [n, H, C]
    w_uv: Tensor,  # [H, C, V], out_latent's dtype or e4m3
    w_scale: Tensor | None = None,  # [H, KB, NB] f32, of e4m3
    global_scale: Tensor | None = None,  # [] f32
    *,
    rows: Tensor | None = None,  # [n] i64; negative: not written
    first_row: int = 0,
    format: str,
    backend: str = "auto",
) -> None:
    """Project and quantise n rows; see the module's text for the contract."""
    _OP(
        values,
        scales,
        out_latent,
        w_uv,
        w_scale,
        global_scale,
        rows,
        first_row=first_row,
        format=format,
        backend=backend,
    )


def cost(
    num_rows: int, *, H: int, C: int, V: int, itemsize: int, w_itemsize: int, format: str
) -> Cost:
    """Weights and latent outputs read once, values and scales written once."""
    num_bytes = H * C * (V * w_itemsize + num_rows * itemsize)
    return Cost(num_bytes + num_rows * row_bytes(H * V, format), 2 * num_rows * H * C * V)
