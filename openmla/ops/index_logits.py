"""index_logits: scores of the lightning indexer over a paged cache of indexer keys.

    keys      = the cached keys of request b, decoded, at positions j < row_lens[t]
    out[t, j] = sum over heads h of w_idx[t, h] * relu(q_idx[t, h] . keys[j]),  -inf elsewhere

Request b owns rows query_start_loc[b] .. query_start_loc[b+1]-1; rows past query_start_loc[B]
(graph padding) and columns from row_lens[t] on are -inf. `row_lens` sets how many keys each token
sees, so any number of speculative tokens is one row each. w_idx includes all scales: that of the
query if it is fp8, DI^-0.5 and HI^-0.5. `num_keys` is the width of out and bounds row_lens.
Arithmetic and out are float32 (float64 for float64 queries). For products of fp8 queries and fp8
keys, a backend may use matrix units that accumulate with fewer bits; out then has an error of at
most 2^-12 * sum over h of |w_idx| * (|q_idx| . |keys|). Columns of block_table past the longest
row are not read. With batch_invariant, a score's bits depend only on its token and its key.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import torch
from torch import Tensor

from openmla.backends import Problem, problem_on
from openmla.cache.format import check_pages, get_format
from openmla.errors import ShapeError
from openmla.ops._declare import Size, op
from openmla.ops._register import Cost
from openmla.ops._shapes import row_width
from openmla.ops._values import check_block_table, check_row_lens, check_start_loc


def sizes(q_idx: Tensor, format: str) -> dict[str, int]:
    return {"W": row_width(get_format(format, "index"), q_idx)}


def check(op: str, cache: Tensor, format: str, num_keys: int) -> None:
    check_pages(op, cache, format)
    if num_keys < 0:
        raise ShapeError(f"{op}: num_keys must not be negative, got {num_keys}.")


def check_weights(op: str, q_idx: Tensor, w_idx: Tensor) -> None:
    wanted = scores_dtype(q_idx.dtype)
    if w_idx.dtype != wanted:
        raise ShapeError(f"{op}: w_idx must be {wanted}, got {w_idx.dtype}.")


def check_values(
    op: str, block_table: Tensor, query_start_loc: Tensor, row_lens: Tensor, num_keys: int,
    T: int, B: int, N: int, BS: int,
) -> None:  # fmt: skip
    check_start_loc(op, "query_start_loc", query_start_loc, T, "q_idx")
    check_row_lens(op, row_lens, num_keys)
    requests = torch.arange(B).repeat_interleave(query_start_loc.diff().long())
    longest = torch.zeros(B, dtype=torch.int32)
    longest.scatter_reduce_(0, requests, row_lens[: requests.shape[0]], "amax")
    check_block_table(op, block_table, None, longest, N, BS)


def scores_dtype(queries: torch.dtype) -> torch.dtype:
    return torch.float64 if queries == torch.float64 else torch.float32


def fake(q_idx: Tensor, T: int, num_keys: int) -> Tensor:
    return q_idx.new_empty((T, num_keys), dtype=scores_dtype(q_idx.dtype))


def problem(
    device: torch.device, dtype: torch.dtype, format: str, *, HI: int, DI: int,
    batch_invariant: bool = False,
) -> Problem:  # fmt: skip
    """Describe a call to the backends."""
    return problem_on(
        device, "index_logits", dtype=dtype, format=format, H=HI, D=DI,
        batch_invariant=batch_invariant,
    )  # fmt: skip


@op(
    problem=problem,
    sizes=sizes,
    check=[check, check_weights],
    check_values=check_values,
    fake=fake,
    no_grad=["q_idx", "w_idx"],
    optional=["batch_invariant"],
)
def index_logits(
    q_idx: Annotated[Tensor, "[T, HI, DI] float|e4m3 row"],
    w_idx: Annotated[Tensor, "[T, HI] row"],  # f32
    cache: Annotated[Tensor, "[N, BS, W] row"],
    block_table: Annotated[Tensor, "[B, M] i32"],
    query_start_loc: Annotated[Tensor, "[B+1] i32"],
    row_lens: Annotated[Tensor, "[T] i32"],
    *,
    format: str,
    num_keys: Size,
    batch_invariant: bool = False,
    backend: str = "auto",
) -> Tensor:  # [T, num_keys] f32
    """Score cached keys; see the module docstring for the contract.

    Args:
        q_idx: indexer queries.
        w_idx: weights of indexer heads, with all scales multiplied in.
        cache: pages of indexer keys.
        block_table: block numbers of each request's keys.
        query_start_loc: first query row of each request, then the end.
        row_lens: number of keys that each token sees.
        format: the cache format, a key of openmla.FORMATS that holds index rows.
        num_keys: width of the result.
        batch_invariant: make results independent of the batch, bit for bit.
        backend: "auto", or the name of a backend.

    Returns:
        Scores [T, num_keys], float32 (float64 for float64 queries).

    Raises:
        ShapeError: an argument does not fit the contract. Values are checked on the CPU only.
        ConfigError: the format or the backend is not known, or the format cannot hold such rows.
        UnsupportedError: no backend supports the call, or q_idx or w_idx requires grad while grad
            mode is on.

    ```python
    import torch
    from openmla.ops import index_logits

    q_idx, w_idx = torch.randn(2, 3, 8), torch.rand(2, 3)  # 2 tokens, 3 heads
    cache = torch.randn(3, 4, 8)  # 3 blocks of 4 keys
    block_table = torch.tensor([[2, 0]], dtype=torch.int32)
    starts = torch.tensor([0, 2], dtype=torch.int32)
    row_lens = torch.tensor([5, 6], dtype=torch.int32)
    logits = index_logits(
        q_idx, w_idx, cache, block_table, starts, row_lens, format="index_fp32", num_keys=6
    )
    print(logits)  # [0, 5] is -inf
    ```
    """


def cost(
    query_lens: Sequence[int], row_lens: Sequence[int], *, HI: int, DI: int, format: str
) -> Cost:
    """Each request's keys once, queries once, logits written once; row_lens is one per token."""
    key_bytes = get_format(format, "index").row_bytes(DI)
    num_bytes, first = 0, 0
    for n in query_lens:
        seen = row_lens[first : first + n]
        num_bytes += max(seen, default=0) * key_bytes + n * HI * (DI + 4) + 4 * sum(seen)
        first += n
    return Cost(num_bytes, 2 * sum(row_lens) * HI * (DI + 1))
