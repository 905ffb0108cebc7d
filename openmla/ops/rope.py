"""rope: rotate columns by position, in place.

    c, s = table[positions[t], :R/2], table[positions[t], R/2:]
    pairs:   (x[2i], x[2i+1])   <- (x[2i] c_i - x[2i+1] s_i,  x[2i+1] c_i + x[2i] s_i)
    halves:  (x[i], x[i+R/2])   <- (x[i] c_i - x[i+R/2] s_i,  x[i+R/2] c_i + x[i] s_i)

`inverse` rotates back (s negated). x is [T, H, R], usually a slice of wider heads: rotating part
of a head means passing that part. Rotated columns stay where they are. The table holds cos and
sin, magnitude factors included. Arithmetic is in float32 (float64 if x or the table is), rounded
once. Rows of x past the positions [T'], T' <= T, are not touched.
"""

from __future__ import annotations

import torch
from torch import Tensor

from openmla.backends import Problem, problem_on
from openmla.errors import ShapeError
from openmla.ops._register import Cost, Decided, bind, decided, refuse_grad, register

PAIRINGS = ("pairs", "halves")
_SPEC = "x:T H R f row, positions:S i64, table:Q R f row"


def _check(tensors: tuple[Tensor, ...], pairing: str) -> dict[str, int]:
    x, _, table = tensors
    dims = bind("rope", _SPEC, tensors)
    if dims["R"] % 2:
        raise ShapeError(f"rope: x must be [T, H, R] with R even, got {tuple(x.shape)}.")
    if dims["S"] > dims["T"]:
        raise ShapeError(f"rope: positions must be at most T={dims['T']}, got {dims['S']}.")
    if table.dtype.itemsize < 4:
        raise ShapeError(f"rope: table must be float32 or float64, got {table.dtype}.")
    if pairing not in PAIRINGS:
        raise ShapeError(f"rope: pairing must be pairs or halves, got {pairing!r}.")
    return dims


def problem(device: torch.device, dtype: torch.dtype) -> Problem:
    """A call, as backends are asked about it."""
    return problem_on(device, "rope", dtype=dtype)


def _decide(*tensors: Tensor, pairing: str, inverse: bool, backend: str) -> Decided:
    x = tensors[0]
    return decided(_check(tensors, pairing), problem(x.device, x.dtype), backend)


def _run(known: Decided, *tensors: Tensor, pairing: str, inverse: bool) -> None:
    x, positions, table = tensors
    refuse_grad("rope", (x, table))
    if x.device.type == "cpu" and positions.numel():
        low, high = positions.aminmax()
        if low < 0 or high >= known.dims["Q"]:
            raise ShapeError(
                f"rope: positions must be within the table's 0..{known.dims['Q'] - 1}, "
                f"got {int(low)}..{int(high)}."
            )
    known.runner.run(*tensors, pairing=pairing, inverse=inverse)


def _fake(*tensors: Tensor, pairing: str, **_: object) -> None:
    _check(tensors, pairing)


_OP = register(
    "rope(Tensor(a!) x, Tensor positions, Tensor table, *, str pairing, bool inverse,"
    " str backend) -> ()",
    _decide,
    _run,
    _fake,
)


def rope(
    x: Tensor,  # [T, H, R], rotated in place
    positions: Tensor,  # [T'] i64, T' <= T
    table: Tensor,  # [Q, R] f32: cos in the first half of a row, sin in the second
    *,
    pairing: str,
    inverse: bool = False,
    backend: str = "auto",
) -> None:
    """Rotate T' rows; see the module's text for the contract."""
    _OP(x, positions, table, pairing=pairing, inverse=inverse, backend=backend)


def cost(num_rows: int, *, H: int, R: int, itemsize: int) -> Cost:
    """x read and written once, one table row and position per token."""
    return Cost(num_rows * (2 * H * R * itemsize + 4 * R + 8), 3 * num_rows * H * R)
