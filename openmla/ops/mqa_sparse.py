"""mqa_sparse: latent attention of each query token over its own rows, in one or two segments.

    rows(t) = the rows both segments name for token t, decoded, [n, D]
    s       = scale * q_latent[t] @ rows.T
    lse     = log(sum(exp(s)))
    out     = exp(s - lse) @ rows[:, :C],  times sigmoid(lse - sink) where there is a sink

A segment says which cached rows a token attends to:
    slots       rows[t, j] for j < row_lens[t]; a slot is block * BS + offset
    positions   the same within the token's request, looked up in block_table
    window      the last `span` positions up to the token's own, positions[t]; a table with fewer
                columns than the request is a ring of M * BS >= span positions: p is in column
                (p // BS) % M
    prefix      entries 0 .. (positions[t] + 1) // span - 1, looked up in block_table
An entry is skipped where it is negative, past the table's columns or the cache's slots, or where
the table names no block of the cache. Repeated entries count as often as they stand. Causality is
whoever chose the rows'. Request b owns rows query_start_loc[b] .. query_start_loc[b+1]-1 of
q_latent; a token past query_start_loc[B], or with no row, gets out 0 and lse -inf.
lse is natural-log, includes scale, never the sink, and is float32 (float64 for float64 queries).
A backend may cut a token's rows into runs that it works on side by side. With run_length > 0 it
cuts them after every so many, whatever comes in the same batch: a token's bits are its own then.
e4m3 queries, over rows of e4m3, stand for q_latent * q_scale: see ops/mqa_paged.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from openmla.backends.segments import Segment, problem, problem_of
from openmla.cache.format import check_pages, get_format
from openmla.errors import ShapeError
from openmla.ops._queries import check_queries, check_scale_kind, out_dtype
from openmla.ops._register import Cost, Decided, bind, check_scale, decided, refuse_grad, register
from openmla.ops._values import check_start_loc

__all__ = ["Segment", "cost", "mqa_sparse", "problem"]

KINDS = ("slots", "positions", "window", "prefix")
_QUERY_SPEC = "q_latent:T H D q row, query_start_loc:B+1 i32, positions:T i64"


def _check(
    q_latent: Tensor,
    query_start_loc: Tensor,
    positions: Tensor,
    segments: tuple[Segment, ...],
    sink: Tensor | None,
    q_scale: Tensor | None,
    C: int,
) -> dict[str, int]:
    op = "mqa_sparse"
    dims = bind(op, _QUERY_SPEC, (q_latent, query_start_loc, positions))
    B = dims["B+1"] - 1
    for segment in segments:
        if segment.kind not in KINDS:
            raise ShapeError(f"{op}: kind must be one of {', '.join(KINDS)}, got {segment.kind!r}.")
        listed = segment.kind in ("slots", "positions")
        for name, given, wanted in (
            ("block_table", segment.block_table is not None, segment.kind != "slots"),
            ("rows", segment.rows is not None, listed),
            ("row_lens", segment.row_lens is not None, listed),
            ("span", bool(segment.span), not listed),
        ):
            if given != wanted:
                verb = "be given" if wanted else "not be given"
                raise ShapeError(f"{op}: {name} must {verb} for kind {segment.kind}.")
        if segment.span < 0:
            raise ShapeError(f"{op}: span must be positive, got {segment.span}.")
        W = get_format(segment.format, "latent").width(dims["D"])
        spec, tensors = "q_latent:T H D, cache:N BS W row, kv_scale: f32", [q_latent]
        tensors += [segment.cache, segment.kv_scale]
        for text, tensor in (
            ("block_table:B M i32", segment.block_table),
            ("rows:T K i32 row", segment.rows),
            ("row_lens:T i32", segment.row_lens),
        ):
            if tensor is not None:
                spec += f", {text}"
                tensors.append(tensor)
        bind(op, spec, tensors, {"W": W, "B": B, "T": dims["T"]})
        check_pages(op, segment.cache, segment.format)
    if sink is not None:
        bind(op, "q_latent:T H D, sink:H f32", (q_latent, sink))
    check_queries(op, q_latent, q_scale, [segment.format for segment in segments])
    if not 0 < C <= dims["D"]:
        raise ShapeError(f"{op}: C must be within 1..D={dims['D']}, got {C}.")
    return dims


def _segments(
    flat: tuple[Tensor | None, ...], formats: list[str], kinds: list[str], spans: list[int]
) -> tuple[Segment, ...]:
    """The segments of a flattened call, five tensors each."""
    made = []
    for number, (format, kind, span) in enumerate(zip(formats, kinds, spans, strict=True)):
        cache, kv_scale, table, rows, row_lens = flat[5 * number : 5 * number + 5]
        assert cache is not None and kv_scale is not None
        made.append(Segment(cache, kv_scale, format, kind, table, rows, row_lens, span))
    return tuple(made)


def _decide(
    q_latent: Tensor,
    query_start_loc: Tensor,
    positions: Tensor,
    *flat: Tensor | None,
    formats: list[str],
    kinds: list[str],
    spans: list[int],
    C: int,
    scale: float,
    run_length: int,
    backend: str,
) -> Decided:
    parts = _segments(flat[:-2], formats, kinds, spans)
    dims = _check(q_latent, query_start_loc, positions, parts, flat[-2], flat[-1], C)
    check_scale("mqa_sparse", scale)
    if run_length < 0:
        raise ShapeError(f"mqa_sparse: run_length must not be negative, got {run_length}.")
    return decided(dims, problem_of(q_latent, parts, C=C, run_length=run_length), backend)


def _run(
    known: Decided,
    q_latent: Tensor,
    query_start_loc: Tensor,
    positions: Tensor,
    *flat: Tensor | None,
    formats: list[str],
    kinds: list[str],
    spans: list[int],
    C: int,
    scale: float,
    run_length: int,
) -> tuple[Tensor, Tensor]:
    parts, (sink, q_scale) = _segments(flat[:-2], formats, kinds, spans), flat[-2:]
    refuse_grad("mqa_sparse", (q_latent,) if sink is None else (q_latent, sink))
    if q_latent.device.type == "cpu":
        T = known.dims["T"]
        check_start_loc("mqa_sparse", "query_start_loc", query_start_loc, T, "q_latent")
    queries = {} if q_scale is None else {"q_scale": q_scale}
    result: tuple[Tensor, Tensor] = known.runner.run(
        q_latent, query_start_loc, positions, parts, sink, C=C, scale=scale, run_length=run_length,
        **queries,
    )  # fmt: skip
    return result


def _fake(
    q_latent: Tensor,
    query_start_loc: Tensor,
    positions: Tensor,
    *flat: Tensor | None,
    formats: list[str],
    kinds: list[str],
    spans: list[int],
    C: int,
    **_: object,
) -> tuple[Tensor, Tensor]:
    parts = _segments(flat[:-2], formats, kinds, spans)
    dims = _check(q_latent, query_start_loc, positions, parts, flat[-2], flat[-1], C)
    lse_dtype = torch.promote_types(out_dtype(q_latent.dtype), torch.float32)
    return (
        q_latent.new_empty((dims["T"], dims["H"], C), dtype=out_dtype(q_latent.dtype)),
        q_latent.new_empty((dims["T"], dims["H"]), dtype=lse_dtype),
    )


_OP = register(
    "mqa_sparse(Tensor q_latent, Tensor query_start_loc, Tensor positions,"
    " Tensor cache, Tensor kv_scale, Tensor? block_table, Tensor? rows, Tensor? row_lens,"
    " Tensor? cache_2, Tensor? kv_scale_2, Tensor? block_table_2, Tensor? rows_2,"
    " Tensor? row_lens_2, Tensor? sink, Tensor? q_scale, *, str[] formats, str[] kinds,"
    " SymInt[] spans, int C,"
    " float scale, int run_length, str backend) -> (Tensor, Tensor)",
    _decide,
    _run,
    _fake,
)


def mqa_sparse(
    q_latent: Tensor,  # [T, H, D]
    query_start_loc: Tensor,  # [B+1] i32
    positions: Tensor,  # [T] i64, of the tokens in their requests
    first: Segment,
    second: Segment | None = None,
    sink: Tensor | None = None,  # [H] f32
    q_scale: Tensor | None = None,  # [] or [T, H] f32, of e4m3 queries
    *,
    C: int,
    scale: float,
    run_length: int = 0,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:  # out_latent [T, H, C], lse [T, H] f32
    """Attend to listed rows; see the module's text for the contract."""
    check_scale_kind("mqa_sparse", q_scale)
    flat: list[Tensor | None] = []
    given = [segment for segment in (first, second) if segment is not None]
    for segment in given:
        flat += [segment.cache, segment.kv_scale, segment.block_table, segment.rows]
        flat.append(segment.row_lens)
    flat += [None] * (10 - len(flat))
    out, lse = _OP(
        q_latent,
        query_start_loc,
        positions,
        *flat,
        sink,
        q_scale,
        formats=[segment.format for segment in given],
        kinds=[segment.kind for segment in given],
        spans=[segment.span for segment in given],
        C=C,
        scale=scale,
        run_length=run_length,
        backend=backend,
    )
    return out, lse


def cost(num_pairs: int, T: int, *, H: int, D: int, C: int, format: str, itemsize: int) -> Cost:
    """Every listed row once per token that lists it; 2 * (D + C) per row and head."""
    rows = num_pairs * (get_format(format).row_bytes(D) + 4)
    return Cost(rows + T * H * ((D + C) * itemsize + 4), 2 * num_pairs * H * (D + C))
