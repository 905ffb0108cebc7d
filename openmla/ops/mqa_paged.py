"""mqa_paged: latent attention (absorbed form) of several query tokens over a paged cache.

    rows = the seq_lens[b] cached rows of request b, [S, D], decoded
    s    = scale * q_latent @ rows.T           query token i of n sees rows j <= S - n + i
    lse  = log(sum(exp(s)))                    (causal; all S rows otherwise)
    out  = exp(s - lse) @ rows[:, :C]

Request b owns query rows query_start_loc[b] .. query_start_loc[b+1]-1; if causal, they are the last
tokens of its sequence, whose own rows are already in the cache. A query that sees no row, and every
query row past query_start_loc[B] (graph padding), gets out 0 and lse -inf.
lse is natural-log, includes scale, and is float32 (float64 for float64 queries).
Only the rows above are read: page tails, unused blocks and block_table columns from
ceil(seq_len / BS) on may hold anything.
max_query_len bounds the queries per request. Kernels split keys among programs depending on the
lengths. With run_length > 0 they are split every run_length keys instead, so that a query's bits
depend only on its own row, whatever else is in the batch.

Queries may be e4m3 over e4m3 rows (fp8, fp8_ds_mla): they represent q_latent * q_scale, with one
scale for all or one per token and head, and out is bf16. Over fp8, kernels then multiply fp8 by fp8
with the tensor cores' reduced-precision accumulation; openmla/testing/budgets.py has its cost in
accuracy. Over fp8_ds_mla they widen queries, which is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import torch
from torch import Tensor

from openmla.backends import Problem, bucketed, problem_on
from openmla.backends.segments import alignment, query_alignment
from openmla.cache.format import check_pages, get_format
from openmla.ops._declare import Size, op
from openmla.ops._queries import E4M3, check_products, check_queries, results
from openmla.ops._register import Cost, check_scale
from openmla.ops._shapes import row_width
from openmla.ops._values import check_block_table, check_query_lens, check_start_loc


def sizes(q_latent: Tensor, format: str) -> dict[str, int]:
    return {"W": row_width(get_format(format), q_latent)}


def check(op: str, q_latent: Tensor, q_scale: Tensor | None, cache: Tensor, format: str) -> None:
    check_queries(op, q_latent, q_scale, [format])
    check_pages(op, cache, format)


def check_values(
    op: str, block_table: Tensor, seq_lens: Tensor, query_start_loc: Tensor, max_query_len: int,
    causal: bool, T: int, N: int, BS: int,
) -> None:  # fmt: skip
    starts = check_start_loc(op, "query_start_loc", query_start_loc, T, "q_latent")
    check_query_lens(op, starts, seq_lens, max_query_len, causal)
    check_block_table(op, block_table, None, seq_lens, N, BS)


def call(run: Callable[..., Any], *args: Any, **scalars: Any) -> Any:
    *tensors, q_scale = args
    if q_scale is not None:  # an implementation without e4m3 queries has no such argument
        scalars["q_scale"] = q_scale
    return run(*tensors, **scalars)


def problem(
    device: torch.device, dtype: torch.dtype, format: str, *, H: int, D: int, C: int, BS: int,
    tokens: int, max_query_len: int, run_length: int, aligned: frozenset[str],
    head_scales: bool = True,
) -> Problem:  # fmt: skip
    """Describe a call to the backends; `head_scales` is for e4m3 queries."""
    return problem_on(
        device, "mqa_paged", dtype=dtype, format=format, H=H, D=D, C=C, BS=BS, aligned=aligned,
        tokens=bucketed(tokens), max_query_len=bucketed(max_query_len), run_length=run_length,
        head_scales=head_scales and dtype == E4M3,
    )  # fmt: skip


def problem_of(
    q_latent: Tensor, q_scale: Tensor | None, cache: Tensor, format: str, C: int,
    max_query_len: int, run_length: int,
) -> Problem:  # fmt: skip
    T, H, D = q_latent.shape
    return problem(
        q_latent.device, q_latent.dtype, format, H=H, D=D, C=C, BS=cache.shape[1], tokens=T,
        max_query_len=max_query_len, run_length=run_length,
        aligned=alignment([cache]) | query_alignment(q_latent),
        head_scales=q_scale is not None and q_scale.dim() > 0,
    )  # fmt: skip


@op(
    problem=problem_of,
    sizes=sizes,
    check=[check, check_products, check_scale],
    check_values=check_values,
    fake=results,
    call=call,
    no_grad=["q_latent"],
)
def mqa_paged(
    q_latent: Annotated[Tensor, "[T, H, D] float|e4m3 row"],
    cache: Annotated[Tensor, "[N, BS, W] row"],
    kv_scale: Annotated[Tensor, "[] f32"],
    block_table: Annotated[Tensor, "[B, M] i32"],
    seq_lens: Annotated[Tensor, "[B] i32"],
    query_start_loc: Annotated[Tensor, "[B+1] i32"],
    q_scale: Tensor | None = None,  # [] or [T, H] f32
    *,
    format: str,
    C: int,
    scale: float,
    causal: bool,
    max_query_len: Size,
    run_length: int = 0,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:  # out_latent [T, H, C], lse [T, H] f32
    """Attend in latent space; see the module docstring for the contract.

    Args:
        q_latent: queries in latent space.
        cache: pages of latent rows.
        kv_scale: scale of format fp8; other formats ignore it.
        block_table: block numbers of each request's rows.
        seq_lens: keys of each request, with those of this step.
        query_start_loc: first query row of each request, then the end.
        q_scale: scale of e4m3 queries, one for all or one per token and head.
        format: the cache format, a key of openmla.FORMATS.
        C: width of the latent, and of the outputs.
        scale: factor of scores.
        causal: hide rows of later tokens.
        max_query_len: upper bound on the queries of a request.
        run_length: if not 0, split keys every run_length keys, so that bits do not depend on the
            batch.
        backend: "auto", or the name of a backend.

    Returns:
        Latent outputs [T, H, C], and lse [T, H] in float32 (float64 for float64 queries).

    Raises:
        ShapeError: an argument does not fit the contract. Values are checked on the CPU only.
        ConfigError: the format or the backend is not known, or the format cannot hold such rows.
        UnsupportedError: no backend supports the call, or q_latent requires grad while grad mode
            is on.

    ```python
    import torch
    from openmla.ops import mqa_paged

    q_latent, cache = torch.randn(3, 2, 6), torch.randn(4, 4, 6)  # 4 blocks of 4 rows
    block_table = torch.tensor([[2, 0], [3, -1]], dtype=torch.int32)
    seq_lens = torch.tensor([6, 3], dtype=torch.int32)
    starts = torch.tensor([0, 1, 3], dtype=torch.int32)  # 1 and 2 queries
    out, lse = mqa_paged(
        q_latent, cache, torch.tensor(1.0), block_table, seq_lens, starts,
        format="fp32", C=4, scale=6**-0.5, causal=True, max_query_len=2,
    )
    print(out.shape, lse.shape)  # [3, 2, 4] and [3, 2]
    ```
    """


def cost(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    *,
    H: int,
    D: int,
    C: int,
    format: str,
    itemsize: int,
    causal: bool,
) -> Cost:
    """Each request's rows once, queries and outputs once; 2 * (D + C) per query, key and head."""
    row_bytes = get_format(format).row_bytes(D)
    num_bytes = num_pairs = 0
    for n, S in zip(query_lens, seq_lens, strict=True):
        num_bytes += S * row_bytes + n * H * ((D + C) * itemsize + 4)
        num_pairs += n * S - (n * (n - 1) // 2 if causal else 0)
    return Cost(num_bytes, 2 * num_pairs * H * (D + C))
