"""index_logits_ragged: scores of the lightning indexer over packed keys.

    out[t, j] = k_scale[j] * sum over h of w_idx[t, h] * relu(q_idx[t, h] . k_idx[j])
                for starts[t] <= j < ends[t],  -inf elsewhere

Keys of several requests stand one after another in k_idx [S, DI]; each token's row names its own
range, empty where ends <= starts. k_scale is positive, so it commutes with relu: 1 for keys that
are not quantised. Arithmetic and out are float32 (float64 for float64 queries); products of fp8
and fp8 as in index_logits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from openmla.backends import Problem, problem_on
from openmla.errors import ShapeError
from openmla.ops._register import Cost, Decided, bind, decided, refuse_grad, register
from openmla.ops.index_logits import scores_dtype

_SPEC = (
    "q_idx:T HI DI q row, w_idx:T HI row, k_idx:S DI q row, k_scale:S f32, starts:T i32, ends:T i32"
)


def _check(tensors: tuple[Tensor, ...]) -> dict[str, int]:
    q_idx, w_idx = tensors[:2]
    dims = bind("index_logits_ragged", _SPEC, tensors)
    if w_idx.dtype != scores_dtype(q_idx.dtype):
        wanted = scores_dtype(q_idx.dtype)
        raise ShapeError(f"index_logits_ragged: w_idx must be {wanted}, got {w_idx.dtype}.")
    return dims


def problem(device: torch.device, dtype: torch.dtype, *, HI: int, DI: int) -> Problem:
    """A call, as backends are asked about it."""
    return problem_on(device, "index_logits_ragged", dtype=dtype, H=HI, D=DI)


def _decide(*tensors: Tensor, backend: str) -> Decided:
    q_idx, dims = tensors[0], _check(tensors)
    asked = problem(q_idx.device, q_idx.dtype, HI=dims["HI"], DI=dims["DI"])
    return decided(dims, asked, backend)


def _run(known: Decided, *tensors: Tensor) -> Tensor:
    q_idx, w_idx, _, _, starts, ends = tensors
    refuse_grad("index_logits_ragged", (q_idx, w_idx))
    S = known.dims["S"]
    if q_idx.device.type == "cpu" and ((starts < 0) | (ends > S)).any():
        raise ShapeError(
            f"index_logits_ragged: starts and ends must be within the S={S} keys, "
            f"got {int(starts.min())} and {int(ends.max())}."
        )
    logits: Tensor = known.runner.run(*tensors)
    return logits


def _fake(*tensors: Tensor, backend: str) -> Tensor:
    dims = _check(tensors)
    return tensors[0].new_empty((dims["T"], dims["S"]), dtype=scores_dtype(tensors[0].dtype))


_OP = register(
    "index_logits_ragged(Tensor q_idx, Tensor w_idx, Tensor k_idx, Tensor k_scale, Tensor starts,"
    " Tensor ends, *, str backend) -> Tensor",
    _decide,
    _run,
    _fake,
)


def index_logits_ragged(
    q_idx: Tensor,  # [T, HI, DI], fp8 or wider
    w_idx: Tensor,  # [T, HI] f32
    k_idx: Tensor,  # [S, DI], fp8 or wider
    k_scale: Tensor,  # [S] f32
    starts: Tensor,  # [T] i32
    ends: Tensor,  # [T] i32
    *,
    backend: str = "auto",
) -> Tensor:  # [T, S] f32
    """Score packed keys; see the module's text for the contract."""
    logits: Tensor = _OP(q_idx, w_idx, k_idx, k_scale, starts, ends, backend=backend)
    return logits


def cost(lens: Sequence[int], *, S: int, HI: int, DI: int, itemsize: int) -> Cost:
    """Keys and queries once, logits written once; lens is the keys each token sees."""
    T, pairs = len(lens), sum(lens)
    return Cost(
        S * (DI * itemsize + 4) + T * HI * (DI * itemsize + 4) + 4 * pairs,
        2 * pairs * HI * (DI + 1),
    )
