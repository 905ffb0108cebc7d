"""index_select: index_logits and index_topk in one pass, which need not store all logits.

    logits = index_logits(q_idx, w_idx, cache, block_table, query_start_loc, row_lens)
    topk_positions, topk_lens = index_topk(logits, 0, row_lens)

Both contracts hold, ties included. `num_keys` bounds row_lens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from openmla.backends import Problem, problem_on
from openmla.errors import ShapeError
from openmla.ops._register import Cost, Decided, decided, refuse_grad, register
from openmla.ops.index_logits import check_paged, check_paged_values
from openmla.ops.index_logits import cost as logits_cost


def _check(tensors: tuple[Tensor, ...], format: str, num_keys: int, K: int) -> dict[str, int]:
    if K < 1:
        raise ShapeError(f"index_select: K must be positive, got {K}.")
    return check_paged("index_select", tensors, format, num_keys)


def problem(device: torch.device, dtype: torch.dtype, format: str, *, HI: int, DI: int) -> Problem:
    """A call, as backends are asked about it."""
    return problem_on(device, "index_select", dtype=dtype, format=format, H=HI, D=DI)


def _decide(
    *tensors: Tensor, format: str, num_keys: int, K: int, sorted: bool, backend: str
) -> Decided:
    q_idx, dims = tensors[0], _check(tensors, format, num_keys, K)
    asked = problem(q_idx.device, q_idx.dtype, format, HI=dims["HI"], DI=dims["DI"])
    return decided(dims, asked, backend)


def _run(
    known: Decided, *tensors: Tensor, format: str, num_keys: int, K: int, sorted: bool
) -> tuple[Tensor, Tensor]:
    refuse_grad("index_select", tensors[:2])
    if tensors[0].device.type == "cpu":
        check_paged_values("index_select", known.dims, tensors, num_keys)
    found: tuple[Tensor, Tensor] = known.runner.run(
        *tensors, format=format, num_keys=num_keys, K=K, sorted=sorted
    )
    return found


def _fake(
    *tensors: Tensor, format: str, num_keys: int, K: int, sorted: bool, backend: str
) -> tuple[Tensor, Tensor]:
    dims = _check(tensors, format, num_keys, K)
    empty = tensors[0].new_empty
    return empty((dims["T"], K), dtype=torch.int32), empty((dims["T"],), dtype=torch.int32)


_OP = register(
    "index_select(Tensor q_idx, Tensor w_idx, Tensor cache, Tensor block_table,"
    " Tensor query_start_loc, Tensor row_lens, *, str format, SymInt num_keys, int K, bool sorted,"
    " str backend) -> (Tensor, Tensor)",
    _decide,
    _run,
    _fake,
)


def index_select(
    q_idx: Tensor,  # [T, HI, DI], fp8 or wider
    w_idx: Tensor,  # [T, HI] f32
    cache: Tensor,  # [N, BS, W], an index format
    block_table: Tensor,  # [B, M] i32
    query_start_loc: Tensor,  # [B+1] i32
    row_lens: Tensor,  # [T] i32, keys each token sees
    *,
    format: str,
    num_keys: int,
    K: int,
    sorted: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:  # topk_positions [T, K] i32, topk_lens [T] i32
    """Score and select; see the module's text for the contract."""
    tensors = (q_idx, w_idx, cache, block_table, query_start_loc, row_lens)
    positions, lens = _OP(
        *tensors, format=format, num_keys=num_keys, K=K, sorted=sorted, backend=backend
    )
    return positions, lens


def cost(
    query_lens: Sequence[int], row_lens: Sequence[int], *, HI: int, DI: int, K: int, format: str
) -> Cost:
    """As index_logits, but positions are written instead of logits."""
    scored = logits_cost(query_lens, row_lens, HI=HI, DI=DI, format=format)
    return Cost(scored.bytes - 4 * sum(row_lens) + 4 * K * len(row_lens), scored.flops)
