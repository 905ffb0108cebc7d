"""mqa_sparse: latent attention of each query token over its own rows, in one or two segments.

    rows(t) = the rows that both segments list for token t, decoded, [n, D]
    s       = scale * q_latent[t] @ rows.T
    lse     = log(sum(exp(s)))
    out     = exp(s - lse) @ rows[:, :C],  times sigmoid(lse - sink) if there is a sink

A segment lists the cached rows that a token attends to:
    slots       rows[t, j] for j < row_lens[t]; a slot is block * BS + offset
    positions   the same, as positions in the token's request, looked up in block_table
    window      the last `span` positions up to the token's own, positions[t]; a table with fewer
                columns than the request is a ring of M * BS >= span positions: p is in column
                (p // BS) % M
    prefix      entries 0 .. (positions[t] + 1) // span - 1, looked up in block_table
An entry is skipped if it is negative, past the table's columns or the cache's slots, or if its
table entry is not a block of the cache. A repeated entry counts each time it occurs. Causality is
up to the caller that selects the rows. Request b owns rows query_start_loc[b] ..
query_start_loc[b+1]-1 of q_latent; a token past query_start_loc[B], or with no row, gets out 0 and
lse -inf.
lse is natural-log, includes scale, never the sink, and is float32 (float64 for float64 queries).
A backend may split a token's rows into runs that it processes in parallel. With run_length > 0 it
splits them every run_length rows, whatever else is in the batch, so that a token's bits do not
depend on the batch.
e4m3 queries over e4m3 rows represent q_latent * q_scale: see ops/mqa_paged.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import torch
from torch import Tensor

from openmla.backends import Problem
from openmla.backends.segments import Segment, problem
from openmla.backends.segments import problem_of as problem_of_segments
from openmla.cache.format import check_pages, get_format
from openmla.errors import ShapeError
from openmla.ops._declare import Sizes, check_is_tensor, op
from openmla.ops._queries import check_products, check_queries, results
from openmla.ops._register import Cost, check_scale
from openmla.ops._shapes import bind
from openmla.ops._values import check_start_loc

__all__ = ["Segment", "cost", "mqa_sparse", "problem"]

KINDS = ("slots", "positions", "window", "prefix")
SHAPES = {
    "q_latent": "[T, H, D]",
    "cache": "[N, BS, W] row",
    "kv_scale": "[] f32",
    "block_table": "[B, M] i32",
    "rows": "[T, K] i32 row",
    "row_lens": "[T] i32",
}  # tensors of a segment, on the device of q_latent


def segments_of(
    tensors: Sequence[Tensor | None], formats: list[str], kinds: list[str], spans: list[int]
) -> tuple[Segment, ...]:
    """Return the segments of a call: five tensors each, from the fourth on."""
    made = []
    for number, (format, kind, span) in enumerate(zip(formats, kinds, spans, strict=True)):
        cache, kv_scale, table, rows, row_lens = tensors[5 * number + 3 : 5 * number + 8]
        assert cache is not None and kv_scale is not None
        made.append(Segment(cache, kv_scale, format, kind, table, rows, row_lens, span))
    return tuple(made)


def check(
    op: str, q_latent: Tensor, q_scale: Tensor | None, tensors: Sequence[Tensor | None],
    formats: list[str], kinds: list[str], spans: list[int], T: int, D: int, B: int,
) -> None:  # fmt: skip
    for segment in segments_of(tensors, formats, kinds, spans):
        if segment.kind not in KINDS:
            raise ShapeError(f"{op}: kind must be one of {', '.join(KINDS)}, got {segment.kind!r}.")
        listed = segment.kind in ("slots", "positions")
        for name, has, wanted in (
            ("block_table", segment.block_table is not None, segment.kind != "slots"),
            ("rows", segment.rows is not None, listed),
            ("row_lens", segment.row_lens is not None, listed),
            ("span", bool(segment.span), not listed),
        ):
            if has != wanted:
                verb = "be given" if wanted else "not be given"
                raise ShapeError(f"{op}: {name} must {verb} for kind {segment.kind}.")
        if segment.span < 0:
            raise ShapeError(f"{op}: span must be positive, got {segment.span}.")
        given = [q_latent, *(getattr(segment, name) for name in list(SHAPES)[1:])]
        W = get_format(segment.format, "latent").width(D)
        bind(op, SHAPES, given, {"W": W, "B": B, "T": T})
        check_pages(op, segment.cache, segment.format)
    check_queries(op, q_latent, q_scale, formats)


def check_values(op: str, query_start_loc: Tensor, T: int) -> None:
    check_start_loc(op, "query_start_loc", query_start_loc, T, "q_latent")


def call(
    run: Callable[..., Any], *args: Any, formats: list[str], kinds: list[str], spans: list[int],
    **scalars: Any,
) -> Any:  # fmt: skip
    q_latent, query_start_loc, positions, *_, sink, q_scale = args
    if q_scale is not None:  # an implementation without e4m3 queries has no such argument
        scalars["q_scale"] = q_scale
    segments = segments_of(args, formats, kinds, spans)
    return run(q_latent, query_start_loc, positions, segments, sink, **scalars)


def problem_of(
    q_latent: Tensor, tensors: Sequence[Tensor | None], formats: list[str], kinds: list[str],
    spans: list[int], C: int, run_length: int,
) -> Problem:  # fmt: skip
    segments = segments_of(tensors, formats, kinds, spans)
    return problem_of_segments(q_latent, segments, C=C, run_length=run_length)


@op(
    name="mqa_sparse",
    problem=problem_of,
    check=[check, check_products, check_scale],
    check_values=check_values,
    fake=results,
    call=call,
    no_grad=["q_latent", "sink"],
)
def _flat(
    q_latent: Annotated[Tensor, "[T, H, D] float|e4m3 row"],
    query_start_loc: Annotated[Tensor, "[B+1] i32"],
    positions: Annotated[Tensor, "[T] i64"],
    cache: Tensor,  # of the first segment, like the next four
    kv_scale: Tensor,
    block_table: Tensor | None,
    rows: Tensor | None,
    row_lens: Tensor | None,
    cache_2: Tensor | None,
    kv_scale_2: Tensor | None,
    block_table_2: Tensor | None,
    rows_2: Tensor | None,
    row_lens_2: Tensor | None,
    sink: Annotated[Tensor | None, "[H] f32"],
    q_scale: Tensor | None,
    *,
    formats: list[str],
    kinds: list[str],
    spans: Sizes,
    C: int,
    scale: float,
    run_length: int,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Signature of torch.ops.openmla.mqa_sparse, which takes the segments as tensors."""


_OP = torch.ops.openmla.mqa_sparse.default  # looked up once


def mqa_sparse(
    q_latent: Tensor,  # [T, H, D]
    query_start_loc: Tensor,  # [B+1] i32
    positions: Tensor,  # [T] i64
    first: Segment,
    second: Segment | None = None,
    sink: Tensor | None = None,  # [H] f32
    q_scale: Tensor | None = None,  # [] or [T, H] f32
    *,
    C: int,
    scale: float,
    run_length: int = 0,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:  # out_latent [T, H, C], lse [T, H] f32
    """Attend to listed rows; see the module docstring for the contract.

    Args:
        q_latent: queries in latent space.
        query_start_loc: first query row of each request, then the end.
        positions: positions of tokens in their requests.
        first: the rows to attend to.
        second: more rows, of another cache or kind.
        sink: a logit per head that takes part in the normalization.
        q_scale: scale of e4m3 queries, one for all or one per token and head.
        C: width of the latent, and of the outputs.
        scale: factor of scores.
        run_length: if not 0, split rows every run_length rows, so that bits do not depend on the
            batch.
        backend: "auto", or the name of a backend.

    Returns:
        Latent outputs [T, H, C], and lse [T, H] in float32 (float64 for float64 queries).

    Raises:
        ShapeError: an argument does not fit the contract. Values are checked on the CPU only.
        ConfigError: the format or the backend is not known, or the format cannot hold such rows.
        UnsupportedError: no backend supports the call, or q_latent or sink requires grad while
            grad mode is on.

    ```python
    import torch
    from openmla.ops import Segment, mqa_sparse

    q_latent, cache = torch.randn(2, 3, 6), torch.randn(4, 4, 6)  # 4 blocks of 4 rows
    slots = torch.tensor([[8, 9, -1], [8, 1, 2]], dtype=torch.int32)
    lens = torch.tensor([2, 3], dtype=torch.int32)
    first = Segment(cache, torch.tensor(1.0), "fp32", "slots", rows=slots, row_lens=lens)
    starts = torch.tensor([0, 2], dtype=torch.int32)
    out, lse = mqa_sparse(q_latent, starts, torch.tensor([4, 5]), first, C=4, scale=6**-0.5)
    print(out.shape, lse.shape)  # [2, 3, 4] and [2, 3]
    ```
    """
    check_is_tensor("mqa_sparse", "q_scale", q_scale)
    flat: list[Tensor | None] = []
    given = [segment for segment in (first, second) if segment is not None]
    for segment in given:
        flat += [segment.cache, segment.kv_scale, segment.block_table, segment.rows]
        flat.append(segment.row_lens)
    flat += [None] * (10 - len(flat))
    out, lse = _OP(
        q_latent, query_start_loc, positions, *flat, sink, q_scale,
        formats=[segment.format for segment in given],
        kinds=[segment.kind for segment in given],
        spans=[segment.span for segment in given],
        C=C, scale=scale, run_length=run_length, backend=backend,
    )  # fmt: skip
    return out, lse


def cost(num_pairs: int, T: int, *, H: int, D: int, C: int, format: str, itemsize: int) -> Cost:
    """Every listed row once per token that lists it; 2 * (D + C) per row and head."""
    rows = num_pairs * (get_format(format).row_bytes(D) + 4)
    return Cost(rows + T * H * ((D + C) * itemsize + 4), 2 * num_pairs * H * (D + C))
