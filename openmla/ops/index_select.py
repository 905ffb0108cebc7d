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
    cache: Annotated[Tensor, "[N, BS, W] row"],
    block_table: Annotated[Tensor, "[B, M] i32"],
    query_start_loc: Annotated[Tensor, "[B+1] i32"],
    row_lens: Annotated[Tensor, "[T] i32"],
    *,
    format: str,
    num_keys: Size,
    K: int,
    sorted: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:  # topk_positions [T, K] i32, topk_lens [T] i32
    """Score and select; see the module docstring for the contract.

    Args:
        q_idx: indexer queries.
        w_idx: weights of indexer heads, with all scales multiplied in.
        cache: pages of indexer keys.
        block_table: block numbers of each request's keys.
        query_start_loc: first query row of each request, then the end.
        row_lens: number of keys that each token sees.
        format: the cache format, a key of openmla.FORMATS that holds index rows.
        num_keys: upper bound on row_lens.
        K: keys to select.
        sorted: return positions in ascending order.
        backend: "auto", or the name of a backend.

    Returns:
        Positions [T, K] int32, padded with -1, and their number per token, [T] int32.

    Raises:
        ShapeError: an argument does not fit the contract. Values are checked on the CPU only.
        ConfigError: the format or the backend is not known, or the format cannot hold such rows.
        UnsupportedError: no backend supports the call, or q_idx or w_idx requires grad while grad
            mode is on.

    ```python
    import torch
    from openmla.ops import index_select

    q_idx, w_idx = torch.randn(2, 3, 8), torch.rand(2, 3)  # 2 tokens, 3 heads
    cache = torch.randn(3, 4, 8)  # 3 blocks of 4 keys
    block_table = torch.tensor([[2, 0]], dtype=torch.int32)
    starts = torch.tensor([0, 2], dtype=torch.int32)
    row_lens = torch.tensor([2, 6], dtype=torch.int32)
    positions, lens = index_select(
        q_idx, w_idx, cache, block_table, starts, row_lens, format="index_fp32", num_keys=6, K=3
    )
    print(positions, lens)  # lens is 2, 3
    ```
    """


def cost(
    query_lens: Sequence[int], row_lens: Sequence[int], *, HI: int, DI: int, K: int, format: str
) -> Cost:
    """As index_logits, but positions are written instead of logits."""
    scored = logits_cost(query_lens, row_lens, HI=HI, DI=DI, format=format)
    return Cost(scored.bytes - 4 * sum(row_lens) + 4 * K * len(row_lens), scored.flops)
