"""rope: rotate columns by position, in place.

    c, s = table[positions[t], :R/2], table[positions[t], R/2:]
    pairs:   (x[2i], x[2i+1])   <- (x[2i] c_i - x[2i+1] s_i,  x[2i+1] c_i + x[2i] s_i)
    halves:  (x[i], x[i+R/2])   <- (x[i] c_i - x[i+R/2] s_i,  x[i+R/2] c_i + x[i] s_i)

`inverse` rotates back (s negated). x is [T, H, R], usually a slice of wider heads: to rotate part
of a head, pass that part. Rotated columns are not reordered. The table holds cos and sin, magnitude
factors included. Arithmetic is in float32 (float64 if x or the table is), rounded once. Rows of x
past the positions [T'], T' <= T, are not touched.
"""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from openmla.backends import Problem, problem_on
from openmla.errors import ShapeError
from openmla.ops._declare import op
from openmla.ops._register import Cost
from openmla.ops._values import check_positions

PAIRINGS = ("pairs", "halves")


def check(op: str, x: Tensor, R: int, S: int, T: int) -> None:
    if R % 2:
        raise ShapeError(f"{op}: x must be [T, H, R] with R even, got {tuple(x.shape)}.")
    if S > T:
        raise ShapeError(f"{op}: positions must be at most T={T}, got {S}.")


def check_table(op: str, table: Tensor | None, pairing: str = "pairs") -> None:
    """Run the checks shared by ops that rotate."""
    if table is not None and table.dtype.itemsize < 4:
        raise ShapeError(f"{op}: table must be float32 or float64, got {table.dtype}.")
    if pairing not in PAIRINGS:
        raise ShapeError(f"{op}: pairing must be pairs or halves, got {pairing!r}.")


def problem(device: torch.device, dtype: torch.dtype) -> Problem:
    """Describe a call to the backends."""
    return problem_on(device, "rope", dtype=dtype)


@op(
    problem=problem,
    check=[check, check_table],
    check_values=check_positions,
    mutates_args=["x"],
    no_grad=["x", "table"],
)
def rope(
    x: Annotated[Tensor, "[T, H, R] float row"],
    positions: Annotated[Tensor, "[S] i64"],  # S = T' <= T
    table: Annotated[Tensor, "[Q, R] float row"],
    *,
    pairing: str,
    inverse: bool = False,
    backend: str = "auto",
) -> None:
    """Rotate T' rows; see the module docstring for the contract.

    Args:
        x: columns to rotate, in place.
        positions: positions of tokens.
        table: RoPE table, cos in the first half of a row and sin in the second.
        pairing: "pairs" rotates neighboring columns, "halves" column i with i + R/2.
        inverse: rotate back.
        backend: "auto", or the name of a backend.

    Raises:
        ShapeError: an argument does not fit the contract. Values are checked on the CPU only.
        ConfigError: the backend is not known.
        UnsupportedError: no backend supports the call, or x or table requires grad while grad mode
            is on.

    ```python
    import torch
    from openmla.ops import rope

    x = torch.tensor([[[1.0, 0.0]], [[1.0, 0.0]]])  # 2 tokens, 1 head
    angles = torch.arange(8.0)[:, None] * torch.pi / 2
    table = torch.cat((angles.cos(), angles.sin()), 1)
    rope(x, torch.tensor([0, 1]), table, pairing="pairs")
    print(x.round())  # [1, 0] and [0, 1]
    ```
    """


def cost(num_rows: int, *, H: int, R: int, itemsize: int) -> Cost:
    """x read and written once, one table row and position per token."""
    return Cost(num_rows * (2 * H * R * itemsize + 4 * R + 8), 3 * num_rows * H * R)
