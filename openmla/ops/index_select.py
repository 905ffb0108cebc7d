"""index_select: index_logits and index_topk in one pass, which need not store all logits.

    logits = index_logits(q_idx, w_idx, cache, block_table, query_start_loc, row_lens)
    topk_positions, topk_lens = index_topk(logits, 0, row_lens)

Both contracts hold, ties included. `num_keys` bounds row_lens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import torch
from torch import Tensor

from openmla.backends import Problem, problem_on
from openmla.ops._declare import Size, op
from openmla.ops._register import Cost
from openmla.ops.index_logits import check, check_values, check_weights, sizes
from openmla.ops.index_logits import cost as logits_cost
from openmla.ops.index_topk import check as check_k
from openmla.ops.index_topk import fake


def problem(device: torch.device, dtype: torch.dtype, format: str, *, HI: int, DI: int) -> Problem:
    """Describe a call to the backends."""
    return problem_on(device, "index_select", dtype=dtype, format=format, H=HI, D=DI)


@op(
    problem=problem,
    sizes=sizes,
    check=[check, check_weights, check_k],
    check_values=check_values,
    fake=fake,
    no_grad=["q_idx", "w_idx"],
)
def index_select(
    q_idx: Annotated[Tensor, "[T, HI, DI] float|e4m3 row"],
    w_idx: Annotated[Tensor, "[T, HI] row"],  # f32
    cache: Annotated[Tensor, "[N, BS, W] row"],  # an index format
    block_table: Annotated[Tensor, "[B, M] i32"],
    query_start_loc: Annotated[Tensor, "[B+1] i32"],
    row_lens: Annotated[Tensor, "[T] i32"],  # keys each token sees
    *,
    format: str,
    num_keys: Size,
    K: int,
    sorted: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:  # topk_positions [T, K] i32, topk_lens [T] i32
    """Score and select; see the module docstring for the contract."""


def cost(
    query_lens: Sequence[int], row_lens: Sequence[int], *, HI: int, DI: int, K: int, format: str
) -> Cost:
    """As index_logits, but positions are written instead of logits."""
    scored = logits_cost(query_lens, row_lens, HI=HI, DI=DI, format=format)
    return Cost(scored.bytes - 4 * sum(row_lens) + 4 * K * len(row_lens), scored.flops)
