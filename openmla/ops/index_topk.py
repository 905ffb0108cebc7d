"""index_topk: select the K highest scores of each row, as positions.

Row t's scores are logits[t, row_starts[t] : row_starts[t] + row_lens[t]]; what stands elsewhere is
not looked at. positions[t] are relative to row_starts[t]. Of equal scores the lower position wins,
so the answer is one set, on every backend and in every batch. topk_lens[t] = min(row_lens[t], K);
entries from there on are -1. A row no longer than K is 0, 1, 2, ... without looking at its scores.
NaN counts as -inf. Entries come in rising order of position if `sorted`, in any order
otherwise.
"""

from __future__ import annotations

import torch
from torch import Tensor

from openmla.backends import Problem, problem_on
from openmla.errors import ShapeError
from openmla.ops._register import Cost, Decided, bind, decided, register

_SPEC = "logits:T S f row, row_starts:T i32, row_lens:T i32"


def _check(tensors: tuple[Tensor, ...], K: int) -> dict[str, int]:
    dims = bind("index_topk", _SPEC, tensors)
    if K < 1:
        raise ShapeError(f"index_topk: K must be positive, got {K}.")
    return dims


def problem(device: torch.device, dtype: torch.dtype) -> Problem:
    """A call, as backends are asked about it."""
    return problem_on(device, "index_topk", dtype=dtype)


def _decide(*tensors: Tensor, K: int, sorted: bool, backend: str) -> Decided:
    logits = tensors[0]
    return decided(_check(tensors, K), problem(logits.device, logits.dtype), backend)


def _run(known: Decided, *tensors: Tensor, K: int, sorted: bool) -> tuple[Tensor, Tensor]:
    logits, row_starts, row_lens = tensors
    if logits.device.type == "cpu":
        S = known.dims["S"]
        wrong = (row_starts < 0) | (row_lens < 0) | (row_starts.long() + row_lens > S)
        if wrong.any():
            t = int(wrong.nonzero()[0])
            raise ShapeError(
                f"index_topk: row {t} must lie within the S={S} columns, got "
                f"{int(row_lens[t])} from {int(row_starts[t])} on."
            )
    found: tuple[Tensor, Tensor] = known.runner.run(*tensors, K=K, sorted=sorted)
    return found


def _fake(*tensors: Tensor, K: int, sorted: bool, backend: str) -> tuple[Tensor, Tensor]:
    dims = _check(tensors, K)
    empty = tensors[0].new_empty
    return empty((dims["T"], K), dtype=torch.int32), empty((dims["T"],), dtype=torch.int32)


_OP = register(
    "index_topk(Tensor logits, Tensor row_starts, Tensor row_lens, *, int K, bool sorted,"
    " str backend) -> (Tensor, Tensor)",
    _decide,
    _run,
    _fake,
)


def index_topk(
    logits: Tensor,  # [T, S] f32
    row_starts: Tensor,  # [T] i32
    row_lens: Tensor,  # [T] i32
    *,
    K: int,
    sorted: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:  # topk_positions [T, K] i32, topk_lens [T] i32
    """Select; see the module's text for the contract."""
    positions, lens = _OP(logits, row_starts, row_lens, K=K, sorted=sorted, backend=backend)
    return positions, lens


def cost(num_rows: int, num_scores: int, *, K: int, itemsize: int = 4) -> Cost:
    """Every score read once, positions written once; num_scores is over all rows."""
    return Cost(num_scores * itemsize + num_rows * (4 * K + 12), num_scores)
