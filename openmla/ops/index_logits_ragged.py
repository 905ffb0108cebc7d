"""index_logits_ragged: scores of the lightning indexer over packed keys.

    out[t, j] = k_scale[j] * sum over h of w_idx[t, h] * relu(q_idx[t, h] . k_idx[j])
                for starts[t] <= j < ends[t],  -inf elsewhere

Keys of several requests are packed one after another in k_idx [S, DI]; each token has its own
range, empty where ends <= starts. k_scale is positive, so it commutes with relu; it is 1 for keys
that are not quantized. Arithmetic and out are float32 (float64 for float64 queries); products of
fp8 queries and fp8 keys are as in index_logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import torch
from torch import Tensor

from openmla.backends import Problem, problem_on
from openmla.errors import ShapeError
from openmla.ops._declare import op
from openmla.ops._register import Cost
from openmla.ops.index_logits import check_weights, scores_dtype


def check_values(op: str, starts: Tensor, ends: Tensor, S: int) -> None:
    if ((starts < 0) | (ends > S)).any():
        raise ShapeError(
            f"{op}: starts and ends must be within the S={S} keys, "
            f"got {int(starts.min())} and {int(ends.max())}."
        )


def fake(q_idx: Tensor, T: int, S: int) -> Tensor:
    return q_idx.new_empty((T, S), dtype=scores_dtype(q_idx.dtype))


def problem(device: torch.device, dtype: torch.dtype, *, HI: int, DI: int) -> Problem:
    """Describe a call to the backends."""
    return problem_on(device, "index_logits_ragged", dtype=dtype, H=HI, D=DI)


@op(
    problem=problem,
    check=check_weights,
    check_values=check_values,
    fake=fake,
    no_grad=["q_idx", "w_idx"],
)
def index_logits_ragged(
    q_idx: Annotated[Tensor, "[T, HI, DI] float|e4m3 row"],
    w_idx: Annotated[Tensor, "[T, HI] row"],  # f32
    k_idx: Annotated[Tensor, "[S, DI] float|e4m3 row"],
    k_scale: Annotated[Tensor, "[S] f32"],
    starts: Annotated[Tensor, "[T] i32"],
    ends: Annotated[Tensor, "[T] i32"],
    *,
    backend: str = "auto",
) -> Tensor:  # [T, S] f32
    """Score packed keys; see the module docstring for the contract.

    Args:
        q_idx: indexer queries.
        w_idx: weights of indexer heads, with all scales multiplied in.
        k_idx: packed indexer keys.
        k_scale: scale of each key; 1 if keys are not quantized.
        starts: first key of each token.
        ends: end of each token's keys.
        backend: "auto", or the name of a backend.

    Returns:
        Scores [T, S], float32 (float64 for float64 queries).

    Raises:
        ShapeError: an argument does not fit the contract. Values are checked on the CPU only.
        ConfigError: the backend is not known.
        UnsupportedError: no backend supports the call, or q_idx or w_idx requires grad while grad
            mode is on.

    ```python
    import torch
    from openmla.ops import index_logits_ragged

    q_idx, w_idx = torch.randn(2, 3, 8), torch.rand(2, 3)  # 2 tokens, 3 heads
    k_idx, k_scale = torch.randn(5, 8), torch.ones(5)
    starts = torch.tensor([0, 3], dtype=torch.int32)
    ends = torch.tensor([3, 5], dtype=torch.int32)
    logits = index_logits_ragged(q_idx, w_idx, k_idx, k_scale, starts, ends)
    print(logits)  # [0, 3:] and [1, :3] are -inf
    ```
    """


def cost(lens: Sequence[int], *, S: int, HI: int, DI: int, itemsize: int) -> Cost:
    """Keys and queries once, logits written once; lens holds the number of keys per token."""
    T, pairs = len(lens), sum(lens)
    return Cost(
        S * (DI * itemsize + 4) + T * HI * (DI * itemsize + 4) + 4 * pairs,
        2 * pairs * HI * (DI + 1),
    )
