"""index_topk: select the K highest scores of each row, as positions.

Row t's scores are logits[t, row_starts[t] : row_starts[t] + row_lens[t]]; all others are ignored.
positions[t] are relative to row_starts[t]. Ties go to the lower position, so the selected set is
the same on every backend and in every batch. topk_lens[t] = min(row_lens[t], K); entries from that
index on are -1. A row no longer than K is 0, 1, 2, ... without reading its scores. NaN counts as
-inf. Entries are in ascending order of position if `sorted`, in any order otherwise.
"""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from openmla.backends import Problem, problem_on
from openmla.errors import ShapeError
from openmla.ops._declare import op
from openmla.ops._register import Cost


def check(op: str, K: int) -> None:
    if K < 1:
        raise ShapeError(f"{op}: K must be positive, got {K}.")


def check_values(op: str, row_starts: Tensor, row_lens: Tensor, S: int) -> None:
    wrong = (row_starts < 0) | (row_lens < 0) | (row_starts.long() + row_lens > S)
    if wrong.any():
        t = int(wrong.nonzero()[0])
        raise ShapeError(
            f"{op}: row {t} must lie within the S={S} columns, got "
            f"{int(row_lens[t])} from {int(row_starts[t])} on."
        )


def fake(row_lens: Tensor, T: int, K: int) -> tuple[Tensor, Tensor]:
    return row_lens.new_empty((T, K)), row_lens.new_empty((T,))


def problem(device: torch.device, dtype: torch.dtype) -> Problem:
    """Describe a call to the backends."""
    return problem_on(device, "index_topk", dtype=dtype)


@op(problem=problem, check=check, check_values=check_values, fake=fake)
def index_topk(
    logits: Annotated[Tensor, "[T, S] float row"],
    row_starts: Annotated[Tensor, "[T] i32"],
    row_lens: Annotated[Tensor, "[T] i32"],
    *,
    K: int,
    sorted: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:  # topk_positions [T, K] i32, topk_lens [T] i32
    """Select the top K; see the module docstring for the contract.

    Args:
        logits: scores.
        row_starts: first column of each row's scores.
        row_lens: number of scores of each row.
        K: scores to select.
        sorted: return positions in ascending order.
        backend: "auto", or the name of a backend.

    Returns:
        Positions [T, K] int32, padded with -1, and their number per row, [T] int32.

    Raises:
        ShapeError: an argument does not fit the contract. Values are checked on the CPU only.
        ConfigError: the backend is not known.
        UnsupportedError: no backend supports the call.

    ```python
    import torch
    from openmla.ops import index_topk

    logits = torch.tensor([[0.1, 0.9, 0.4, 0.7], [0.8, 0.2, 0.0, 0.0]])
    row_starts = torch.tensor([0, 1], dtype=torch.int32)
    row_lens = torch.tensor([4, 1], dtype=torch.int32)
    positions, lens = index_topk(logits, row_starts, row_lens, K=2, sorted=True)
    print(positions, lens)  # [[1, 3], [0, -1]] and [2, 1]
    ```
    """


def cost(num_rows: int, num_scores: int, *, K: int, itemsize: int = 4) -> Cost:
    """Every score read once, positions written once; num_scores is over all rows."""
    return Cost(num_scores * itemsize + num_rows * (4 * K + 12), num_scores)
