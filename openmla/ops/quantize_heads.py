"""quantize_heads: quantize expanded heads to e4m3 with scales per row and head or request and head.

    x      = [x, shared]: the head's own columns, then those shared by all heads
    scale  = head_scale[requests[s], h] if given, else row_scale[s, h] = 2^ceil(log2(max(|x| of the
             row, 2^-60) / 448)), which is written
    values = e4m3(x * (1 / scale))

Arithmetic is in float32; e4m3() rounds to nearest even and saturates at 448. `values`
[S, H, P + R] may be contiguous along columns or, as attention reads V, along rows; allocate_heads()
makes both. `shared` may itself be e4m3, in the units of x. Only values and row_scale are written. A
NaN is the byte 0x7f; a NaN or an infinity makes row_scale NaN. Every backend writes the same bytes.
"""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from openmla.backends import Problem, problem_on
from openmla.errors import ShapeError
from openmla.ops._declare import op
from openmla.ops._eight_bits import E4M3
from openmla.ops._register import Cost
from openmla.ops._shapes import bind
from openmla.ops._values import within


def allocate_heads(
    S: int, H: int, E: int, device: torch.device, *, keys_contiguous: bool
) -> Tensor:
    """Return uninitialized [S, H, E] e4m3: columns contiguous, or keys at a pitch of 16."""
    if not keys_contiguous:
        return torch.empty((S, H, E), dtype=E4M3, device=device)
    rows = torch.empty((H, E, -(-S // 16) * 16), dtype=E4M3, device=device)
    return rows[:, :, :S].permute(2, 0, 1)


def check(
    op: str, values: Tensor, row_scale: Tensor | None, x: Tensor, head_scale: Tensor | None,
    requests: Tensor | None, P: int, R: int = 0,
) -> None:  # fmt: skip
    if (row_scale is None) == (head_scale is None):
        given = "neither" if row_scale is None else "both"
        raise ShapeError(f"{op}: give row_scale or head_scale, got {given}.")
    if (head_scale is None) != (requests is None):
        need, got = ("None without", "a tensor") if head_scale is None else ("given with", "None")
        raise ShapeError(f"{op}: requests must be {need} head_scale, got {got}.")
    if values.dtype != E4M3:
        raise ShapeError(f"{op}: values must be {E4M3}, got {values.dtype}.")
    written = {"x": "[S, H, P]", "values": "[S, H, E]", "row_scale": "[S, H] f32"}
    bind(op, written, (x, values, row_scale), {"E": P + R})
    if min(values.shape) > 1 and values.stride(2) != 1 and values.stride(0) != 1:
        raise ShapeError(
            f"{op}: values must be contiguous along their last dimension or along rows, "
            f"got strides {values.stride()}."
        )


def check_requests(op: str, requests: Tensor | None, B: int = 0) -> None:
    if requests is not None and requests.numel() and not within(requests, B):
        low, high = (int(value) for value in requests.aminmax())
        raise ShapeError(
            f"{op}: requests must be rows of head_scale (0..{B - 1}), got {low}..{high}."
        )


def problem(device: torch.device, dtype: torch.dtype) -> Problem:
    """Describe a call to the backends."""
    return problem_on(device, "quantize_heads", dtype=dtype)


@op(
    problem=problem,
    dtype_of="x",
    check=check,
    check_values=check_requests,
    mutates_args=["values", "row_scale"],
    no_grad=["x"],
    optional=["requests"],
)
def quantize_heads(
    values: Tensor,  # [S, H, P + R] e4m3
    row_scale: Tensor | None,  # [S, H] f32
    x: Annotated[Tensor, "[S, H, P] float row"],
    shared: Annotated[Tensor | None, "[S, R] float|e4m3 row"] = None,
    head_scale: Annotated[Tensor | None, "[B, H] f32"] = None,
    requests: Annotated[Tensor | None, "[S] i64"] = None,
    *,
    backend: str = "auto",
) -> None:
    """Quantize all rows; see the module docstring for the contract.

    Args:
        values: e4m3 heads, written in place.
        row_scale: scale of each row and head, written in place. None with head_scale.
        x: heads to quantize.
        shared: columns that all heads share, after those of x.
        head_scale: positive scales of each request and head, instead of row_scale.
        requests: with head_scale, the request of each row.
        backend: "auto", or the name of a backend.

    Raises:
        ShapeError: an argument does not fit the contract. Values are checked on the CPU only.
        ConfigError: the backend is not known.
        UnsupportedError: no backend supports the call, or x requires grad while grad mode is on.

    ```python
    import torch
    from openmla.ops import quantize_heads

    x = torch.randn(3, 2, 8)  # 3 rows, 2 heads
    values = torch.empty(3, 2, 8, dtype=torch.float8_e4m3fn)
    row_scale = torch.empty(3, 2)
    quantize_heads(values, row_scale, x)
    print(values.float() * row_scale[..., None] - x)  # rounding errors
    ```
    """


def cost(S: int, *, H: int, P: int, R: int = 0, itemsize: int) -> Cost:
    """Heads read once and written once; shared columns are read once for all heads."""
    return Cost(S * (H * P * itemsize + R * itemsize + H * (P + R)), 2 * S * H * (P + R))
