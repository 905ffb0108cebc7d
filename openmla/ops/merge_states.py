"""merge_states: merge two partial attentions over disjoint keys, in place.

    m   = max(lse, other_lse)
    out = (exp(lse - m) * out + exp(other_lse - m) * other_out) / z,  z = the sum of both weights
    lse = m + log(z)

A side whose lse is -inf saw no key: its out is ignored, whatever it holds. If both sides are empty,
out is 0 and lse is -inf. A side whose lse is NaN or +inf makes out and lse of its row NaN. If a
package writes +inf for a query without keys, convert it to -inf first.
The order of merging does not matter beyond rounding. other_out and other_lse may be the same
tensors as out and lse. lse may have any strides. Arithmetic is in float32 (float64 if any input
is). With base=2, both lse and the merged lse are logarithms to base 2, as in FlashInfer; they are
converted before and after, in three small launches.
"""

from __future__ import annotations

import math
from typing import Annotated

import torch
from torch import Tensor

from openmla.backends import Problem, problem_on
from openmla.errors import ShapeError
from openmla.ops._declare import op
from openmla.ops._register import Cost


def check_lse(op: str, lse: Tensor, other_lse: Tensor) -> None:
    for name, tensor in (("lse", lse), ("other_lse", other_lse)):
        if tensor.dtype.itemsize < 4:
            raise ShapeError(
                f"{op}: {name} must be float32 or float64, got {tensor.dtype}. "
                "16-bit lse costs percents of weight."
            )


def in_nats(op: str, base: float, lse: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Convert both lse to natural logarithms; return them unchanged for base e."""
    if base == math.e:
        return lse, other_lse
    if base != 2:
        raise ShapeError(f"{op}: base must be math.e or 2, got {base!r}.")
    return lse * math.log(2), other_lse * math.log(2)


def problem(device: torch.device, dtype: torch.dtype) -> Problem:
    """Describe a call to the backends."""
    return problem_on(device, "merge_states", dtype=dtype)


@op(
    problem=problem,
    check=check_lse,
    mutates_args=["out", "lse"],
    no_grad=["out", "lse", "other_out", "other_lse"],
    host_args=["base"],
)
def merge_states(
    out: Annotated[Tensor, "[T, H, V] float row"],
    lse: Annotated[Tensor, "[T, H] float"],  # f32
    other_out: Annotated[Tensor, "[T, H, V] float row"],
    other_lse: Annotated[Tensor, "[T, H] float"],  # f32
    *,
    base: float = math.e,
    backend: str = "auto",
) -> None:
    """Merge the other partial into out and lse; see the module docstring for the contract.

    Args:
        out: outputs of one partial attention, merged in place.
        lse: lse of that attention, merged in place.
        other_out: outputs of the other.
        other_lse: its lse.
        base: base of both lse, math.e or 2.
        backend: "auto", or the name of a backend.

    Raises:
        ShapeError: an argument does not fit the contract.
        ConfigError: the backend is not known.
        UnsupportedError: no backend supports the call, or out, lse, other_out or other_lse
            requires grad while grad mode is on.

    ```python
    import torch
    from openmla.ops import merge_states

    out, lse = torch.ones(2, 3, 4), torch.zeros(2, 3)  # 2 tokens, 3 heads
    other_out, other_lse = torch.zeros(2, 3, 4), torch.zeros(2, 3)
    merge_states(out, lse, other_out, other_lse)
    print(out[0, 0], lse[0, 0])  # 0.5 and log(2)
    ```
    """
    own, other_lse = in_nats("merge_states", base, lse, other_lse)
    if own is not lse:
        merge_states(out, own, other_out, other_lse, backend=backend)
        lse.copy_(own / math.log(2))
        return
    if torch.compiler.is_compiling():
        # Merging a slice in place would compile two graphs: one for slices that cover their whole
        # tensor, and one for the others.
        merged = out.clone(), lse.clone()
        _OP(*merged, other_out, other_lse, backend=backend)
        out.copy_(merged[0])
        lse.copy_(merged[1])
        return
    _OP(out, lse, other_out, other_lse, backend=backend)


_OP = torch.ops.openmla.merge_states.default  # looked up once


def cost(num_rows: int, *, H: int, V: int, itemsize: int) -> Cost:
    """Both sides read once, one written once."""
    return Cost(num_rows * H * 3 * (V * itemsize + 4), num_rows * H * 3 * V)
