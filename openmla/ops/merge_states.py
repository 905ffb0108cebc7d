"""merge_states: merge two partial attentions over disjoint keys, in place.

    m   = max(lse, other_lse)
    out = (exp(lse - m) * out + exp(other_lse - m) * other_out) / z,  z = the two weights' sum
    lse = m + log(z)

A side whose lse is -inf saw no key: its out is not looked at, whatever it holds. Both sides empty:
out 0, lse -inf. A side whose lse is NaN or +inf makes out and lse of its row NaN. Packages that
write +inf for a query without keys need it converted to -inf first.
The order of merging does not matter beyond rounding. other_out and other_lse may be the very
tensors out and lse. lse may have any strides. Arithmetic is in float32 (float64 if any input is).
With base=2 both lse are logarithms to base 2, as FlashInfer's are, and so is the one written:
they are converted before and after, three small launches.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from openmla.backends import Problem, problem_on
from openmla.errors import ShapeError
from openmla.ops._register import Cost, Decided, bind, decided, refuse_grad, register

_SPEC = "out:T H V f row, lse:T H f, other_out:T H V f row, other_lse:T H f"


def _check(tensors: tuple[Tensor, ...]) -> dict[str, int]:
    dims = bind("merge_states", _SPEC, tensors)
    for name, tensor in (("lse", tensors[1]), ("other_lse", tensors[3])):
        if tensor.dtype.itemsize < 4:
            raise ShapeError(
                f"merge_states: {name} must be float32 or float64, got {tensor.dtype}. "
                "16-bit lse costs percents of weight."
            )
    return dims


def in_nats(op: str, base: float, lse: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Two lse of a base as natural logarithms; base e as they are."""
    if base == math.e:
        return lse, other_lse
    if base != 2:
        raise ShapeError(f"{op}: base must be math.e or 2, got {base!r}.")
    return lse * math.log(2), other_lse * math.log(2)


def problem(device: torch.device, dtype: torch.dtype) -> Problem:
    """A call, as backends are asked about it."""
    return problem_on(device, "merge_states", dtype=dtype)


def _decide(*tensors: Tensor, backend: str) -> Decided:
    out = tensors[0]
    return decided(_check(tensors), problem(out.device, out.dtype), backend)


def _run(known: Decided, *tensors: Tensor) -> None:
    refuse_grad("merge_states", tensors)
    known.runner.run(*tensors)


def _fake(*tensors: Tensor, backend: str) -> None:
    _check(tensors)


_OP = register(
    "merge_states(Tensor(a!) out, Tensor(b!) lse, Tensor other_out, Tensor other_lse, *,"
    " str backend) -> ()",
    _decide,
    _run,
    _fake,
)


def merge_states(
    out: Tensor,  # [T, H, V], merged into in place
    lse: Tensor,  # [T, H] f32, merged into in place
    other_out: Tensor,  # [T, H, V]
    other_lse: Tensor,  # [T, H] f32
    *,
    base: float = math.e,  # of both lse: math.e or 2
    backend: str = "auto",
) -> None:
    """Merge the other partial into out and lse; see the module's text for the contract."""
    own, other_lse = in_nats("merge_states", base, lse, other_lse)
    if own is not lse:
        merge_states(out, own, other_out, other_lse, backend=backend)
        lse.copy_(own / math.log(2))
        return
    if torch.compiler.is_compiling():
        # Written in place, a slice would be compared with its tensor: a graph for those that are
        # all of it, and one for the others.
        merged = out.clone(), lse.clone()
        _OP(*merged, other_out, other_lse, backend=backend)
        out.copy_(merged[0])
        lse.copy_(merged[1])
        return
    _OP(out, lse, other_out, other_lse, backend=backend)


def cost(num_rows: int, *, H: int, V: int, itemsize: int) -> Cost:
    """Both sides read once, one written once."""
    return Cost(num_rows * H * 3 * (V * itemsize + 4), num_rows * H * 3 * V)
