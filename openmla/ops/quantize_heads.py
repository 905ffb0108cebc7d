"""quantize_heads: quantize expanded heads to e4m3 with scales per row and head or request and head.

    x      = [x, shared]: a head's own columns, then those that all heads share
    scale  = head_scale[requests[s], h] if given, else row_scale[s, h] = 2^ceil(log2(max(|x| of the
             row, 2^-60) / 448)), which is written
    values = e4m3(x * (1 / scale))

All in float32; e4m3() rounds to nearest even and saturates at 448. `values` [S, H, P + R] may have
its columns contiguous or, as values of attention are read, its rows: allocate_heads() makes both.
`shared` may be e4m3 itself, in the units of x. Nothing but values and row_scale is written. A NaN
is the byte 0x7f; it, or an infinity, makes a row_scale NaN. Every backend gives the same bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from openmla.backends import Problem, problem_on
from openmla.errors import ShapeError
from openmla.ops._eight_bits import E4M3
from openmla.ops._register import Cost, Decided, bind, decided, refuse_grad, register
from openmla.ops._values import within

Scale = Tensor | None


def allocate_heads(
    S: int, H: int, E: int, device: torch.device, *, keys_contiguous: bool
) -> Tensor:
    """[S, H, E] e4m3, uninitialised: a head's columns contiguous, or its keys, at a pitch of 16."""
    if not keys_contiguous:
        return torch.empty((S, H, E), dtype=E4M3, device=device)
    rows = torch.empty((H, E, -(-S // 16) * 16), dtype=E4M3, device=device)
    return rows[:, :, :S].permute(2, 0, 1)


def _check(
    values: Tensor, row_scale: Scale, x: Tensor, shared: Scale, head_scale: Scale, requests: Scale
) -> dict[str, int]:
    dims = bind("quantize_heads", "x:S H P f row", (x,))
    R = 0
    if shared is not None:
        spec = "x:S H P f row, shared:S R q row"
        R = bind("quantize_heads", spec, (x, shared))["R"]
    if (row_scale is None) == (head_scale is None):
        given = "neither" if row_scale is None else "both"
        raise ShapeError(f"quantize_heads: give row_scale or head_scale, got {given}.")
    if row_scale is not None:
        bind("quantize_heads", "x:S H P, row_scale:S H f32", (x, row_scale))
    if (head_scale is None) != (requests is None):
        need, got = ("None without", "a tensor") if head_scale is None else ("given with", "None")
        raise ShapeError(f"quantize_heads: requests must be {need} head_scale, got {got}.")
    if head_scale is not None and requests is not None:
        spec = "x:S H P, head_scale:B H f32, requests:S i64"
        dims["B"] = bind("quantize_heads", spec, (x, head_scale, requests))["B"]
    if values.dtype != E4M3:
        raise ShapeError(f"quantize_heads: values must be {E4M3}, got {values.dtype}.")
    dims["E"], dims["R"] = dims["P"] + R, R
    bind("quantize_heads", "x:S H P, values:S H E", (x, values), {"E": dims["E"]})
    if min(values.shape) > 1 and values.stride(2) != 1 and values.stride(0) != 1:
        raise ShapeError(
            "quantize_heads: values must be contiguous along their last dimension or along rows, "
            f"got strides {values.stride()}."
        )
    return dims


def problem(device: torch.device, dtype: torch.dtype) -> Problem:
    """A call, as backends are asked about it."""
    return problem_on(device, "quantize_heads", dtype=dtype)


def _check_values(B: int, requests: Tensor) -> None:
    if requests.numel() and not within(requests, B):
        low, high = (int(value) for value in requests.aminmax())
        raise ShapeError(
            f"quantize_heads: requests must be rows of head_scale (0..{B - 1}), got {low}..{high}."
        )


def _decide(
    values: Tensor, row_scale: Scale, x: Tensor, shared: Scale, head_scale: Scale,
    requests: Scale = None, *, backend: str,
) -> Decided:  # fmt: skip
    dims = _check(values, row_scale, x, shared, head_scale, requests)
    return decided(dims, problem(x.device, x.dtype), backend)


def _run(
    known: Decided, values: Tensor, row_scale: Scale, x: Tensor, shared: Scale, head_scale: Scale,
    requests: Scale = None,
) -> None:  # fmt: skip
    refuse_grad("quantize_heads", (x,))
    if requests is not None and requests.device.type == "cpu":
        _check_values(known.dims["B"], requests)
    known.runner.run(values, row_scale, x, shared, head_scale, requests)


def _fake(
    values: Tensor, row_scale: Scale, x: Tensor, shared: Scale, head_scale: Scale,
    requests: Scale = None, *, backend: str,
) -> None:  # fmt: skip
    _check(values, row_scale, x, shared, head_scale, requests)


_OP = register(
    "quantize_heads(Tensor(a!) values, Tensor(b!)? row_scale, Tensor x, Tensor? shared,"
    " Tensor? head_scale, Tensor? requests=None, *, str backend) -> ()",
    _decide,
    _run,
    _fake,
)


def quantize_heads(
    values: Tensor,  # [S, H, P + R] e4m3, written in place
    row_scale: Tensor | None,  # [S, H] f32, written in place, or None
    x: Tensor,  # [S, H, P]
    shared: Tensor | None = None,  # [S, R]
    head_scale: Tensor | None = None,  # [B, H] f32, positive
    requests: Tensor | None = None,  # [S] i64, the row of head_scale that each row of x is under
    *,
    backend: str = "auto",
) -> None:
    """Quantise all rows; see the module's text for the contract."""
    _OP(values, row_scale, x, shared, head_scale, requests, backend=backend)


def cost(S: int, *, H: int, P: int, R: int = 0, itemsize: int) -> Cost:
    """Heads read once and written once; shared columns are read once for all heads."""
    return Cost(S * (H * P * itemsize + R * itemsize + H * (P + R)), 2 * S * H * (P + R))
