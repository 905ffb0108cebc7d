"""mqa_paged: latent attention (absorbed form) of several query tokens over a paged cache.

    rows = the seq_lens[b] cached rows of request b, [S, D], decoded
    s    = scale * q_latent @ rows.T           query token i of n sees rows j <= S - n + i
    lse  = log(sum(exp(s)))                    (causal; all S rows otherwise)
    out  = exp(s - lse) @ rows[:, :C]

Request b owns query rows query_start_loc[b] .. query_start_loc[b+1]-1; causal, the last tokens of
its sequence, whose own rows are in the cache already. A query that sees no row, and every query row
past query_start_loc[B] (graph padding), gets out 0 and lse -inf.
lse is natural-log, includes scale, and is float32 (float64 for float64 queries).
Read are only the rows above: page tails, unused blocks and block_table columns from
ceil(seq_len / BS) on may hold anything.
max_query_len bounds the queries per request. Kernels split keys among programs as the lengths want;
with run_length > 0 they are cut after every so many keys instead, so that a query's bits depend on
nothing but its own row, whatever else is in the batch.

Queries may be e4m3, over rows of e4m3 (fp8, fp8_ds_mla): they stand for q_latent * q_scale, one
scale for all or one per token and head, and out is bf16. Over fp8 kernels multiply fp8 by fp8 then,
with the tensor cores' short sums: see openmla/testing/budgets.py for what that costs. Over
fp8_ds_mla they widen queries, which is exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from openmla.backends import Problem, bucketed, problem_on
from openmla.backends.segments import alignment, query_alignment
from openmla.cache.format import check_pages, get_format
from openmla.errors import ShapeError
from openmla.ops._queries import E4M3, check_queries, check_scale_kind, out_dtype
from openmla.ops._register import Cost, Decided, bind, check_scale, decided, refuse_grad, register
from openmla.ops._values import check_block_table, check_query_lens, check_start_loc

_SPEC = (
    "q_latent:T H D q row, cache:N BS W row, kv_scale: f32, block_table:B M i32, seq_lens:B i32,"
    " query_start_loc:B+1 i32"
)


def _check(tensors: tuple[Tensor | None, ...], format: str, C: int) -> dict[str, int]:
    given = cast("tuple[Tensor, ...]", tensors[:-1])
    q_latent, cache, _, block_table, *_ = given
    layout = get_format(format)
    W = layout.width(q_latent.shape[-1]) if q_latent.dim() else 0
    B1 = block_table.shape[0] + 1 if block_table.dim() else 0
    dims = bind("mqa_paged", _SPEC, given, {"W": W, "B+1": B1})
    check_queries("mqa_paged", q_latent, tensors[-1], [format])
    check_pages("mqa_paged", cache, format)
    if not 0 < C <= dims["D"]:
        raise ShapeError(f"mqa_paged: C must be within 1..D={dims['D']}, got {C}.")
    return dims


def _check_values(
    dims: Mapping[str, int], tensors: tuple[Tensor, ...], max_query_len: int, causal: bool
) -> None:
    block_table, seq_lens, query_start_loc = tensors[3:6]
    starts = check_start_loc("mqa_paged", "query_start_loc", query_start_loc, dims["T"], "q_latent")
    check_query_lens("mqa_paged", starts, seq_lens, max_query_len, causal)
    check_block_table("mqa_paged", block_table, None, seq_lens, dims["N"], dims["BS"])


def problem(
    device: torch.device, dtype: torch.dtype, format: str, *, H: int, D: int, C: int, BS: int,
    tokens: int, max_query_len: int, run_length: int, aligned: frozenset[str],
    head_scales: bool = True,
) -> Problem:  # fmt: skip
    """A call, as backends are asked about it; `head_scales` of e4m3 queries."""
    return problem_on(
        device, "mqa_paged", dtype=dtype, format=format, H=H, D=D, C=C, BS=BS, aligned=aligned,
        tokens=bucketed(tokens), max_query_len=bucketed(max_query_len), run_length=run_length,
        head_scales=head_scales and dtype == E4M3,
    )  # fmt: skip


def _decide(
    *tensors: Any,
    format: str,
    C: int,
    scale: float,
    causal: bool,
    max_query_len: int,
    run_length: int,
    backend: str,
) -> Decided:
    q_latent, cache = tensors[:2]
    dims = _check(tensors, format, C)
    if run_length < 0:
        raise ShapeError(f"mqa_paged: run_length must not be negative, got {run_length}.")
    check_scale("mqa_paged", scale)
    asked = problem(
        q_latent.device, q_latent.dtype, format, H=dims["H"], D=dims["D"], C=C, BS=dims["BS"],
        tokens=dims["T"], max_query_len=max_query_len, run_length=run_length,
        aligned=alignment([cache]) | query_alignment(q_latent),
        head_scales=tensors[6] is not None and tensors[6].dim() > 0,
    )  # fmt: skip
    return decided(dims, asked, backend)


def _run(
    known: Decided, *args: Any, causal: bool, max_query_len: int, **scalars: Any
) -> tuple[Tensor, Tensor]:
    *tensors, q_scale = args
    refuse_grad("mqa_paged", tensors[:1])
    if tensors[0].device.type == "cpu":
        _check_values(known.dims, tuple(tensors), max_query_len, causal)
    if q_scale is not None:
        scalars["q_scale"] = q_scale
    result: tuple[Tensor, Tensor] = known.runner.run(
        *tensors, causal=causal, max_query_len=max_query_len, **scalars
    )
    return result


def _fake(*tensors: Any, format: str, C: int, **_: object) -> tuple[Tensor, Tensor]:
    q_latent = tensors[0]
    dims = _check(tensors, format, C)
    lse_dtype = torch.promote_types(out_dtype(q_latent.dtype), torch.float32)
    return (
        q_latent.new_empty((dims["T"], dims["H"], C), dtype=out_dtype(q_latent.dtype)),
        q_latent.new_empty((dims["T"], dims["H"]), dtype=lse_dtype),
    )


_OP = register(
    "mqa_paged(Tensor q_latent, Tensor cache, Tensor kv_scale, Tensor block_table,"
    " Tensor seq_lens, Tensor query_start_loc, Tensor? q_scale, *, str format, int C,"
    " float scale, bool causal, SymInt max_query_len, int run_length, str backend)"
    " -> (Tensor, Tensor)",
    _decide,
    _run,
    _fake,
)


def mqa_paged(
    q_latent: Tensor,  # [T, H, D]
    cache: Tensor,  # [N, BS, W]
    kv_scale: Tensor,  # [] f32
    block_table: Tensor,  # [B, M] i32
    seq_lens: Tensor,  # [B] i32, keys including this step's
    query_start_loc: Tensor,  # [B+1] i32
    q_scale: Tensor | None = None,  # [] or [T, H] f32, of e4m3 queries
    *,
    format: str,
    C: int,
    scale: float,
    causal: bool,
    max_query_len: int,
    run_length: int = 0,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:  # out_latent [T, H, C], lse [T, H] f32
    """Attend in latent space; see the module's text for the contract."""
    check_scale_kind("mqa_paged", q_scale)
    out, lse = _OP(
        q_latent,
        cache,
        kv_scale,
        block_table,
        seq_lens,
        query_start_loc,
        q_scale,
        format=format,
        C=C,
        scale=scale,
        causal=causal,
        max_query_len=max_query_len,
        run_length=run_length,
        backend=backend,
    )
    return out, lse


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
