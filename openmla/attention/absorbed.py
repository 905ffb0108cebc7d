"""Absorbed form: attention in latent space, reading the paged cache directly."""

from __future__ import annotations

import torch
from torch import Tensor

from openmla.attention.types import AbsorbedWeights, Step, rows_of, seen_nothing
from openmla.cache import PagedCache
from openmla.ops import Segment, mqa_paged, mqa_sparse, project_heads, quantize_queries
from openmla.plan import Absorbed, Group, Keys, Plan

# Up to this many tokens, torch's CPU bmm in bf16 is faster with w_uv on the left and contiguous
# rows: 0.24 instead of 1.07 ms for 1 token, 0.27 instead of 1.16 for 8, but 2.3 instead of 1.7 for
# 64 (16 heads, 512 to 128 columns, one thread).
FEW_TOKENS = 16
SEGMENTS = {"window": "window", "compressed": "entries"}  # part of the cache: its name in Step.only


def attend_absorbed(
    step: Step,
    group: Group,
    out: Tensor | None = None,  # [n, H, V]
    sink: Tensor | None = None,  # [H], applied by mqa_sparse
) -> tuple[Tensor, Tensor]:  # out [n, H, V], or [n, H, C] without weights, and lse [n, H]
    """Absorb queries, attend, and project outputs out of latent space, into `out` if given."""
    part, weights = group.part, step.weights
    assert isinstance(part, Absorbed)
    own = own_queries(step, group)
    if len(part.cuts) <= 1:
        out_latent, lse = attend_cut(step, part, own, 0, sink)
        return _project(out_latent, step, out), lse
    q = own[0]
    if out is None:
        width = step.plan.config.kv_lora_rank if weights is None else weights.w_uv.shape[2]
        out = q.new_empty((*q.shape[:2], width))
    lse = q.new_empty(out.shape[:2], dtype=torch.promote_types(out.dtype, torch.float32))
    for number, cut in enumerate(part.cuts):
        out_latent, lse[cut] = attend_cut(step, part, own, number, sink)
        room = out[cut]
        some = _project(out_latent, step, room)
        if some is not room:
            room.copy_(some)
    return out, lse


def own_queries(step: Step, group: Group) -> tuple[Tensor, ...]:
    """Return q_nope and q_pe of the group's rows, or, without weights, the latent queries."""
    if step.projected is None:
        assert step.q is not None
        if step.q_scale is not None:
            return rows_of(step.q, group.rows), rows_of(step.q_scale, group.rows)
        return (rows_of(step.q, group.rows),)
    projected = step.projected
    return rows_of(projected.q_nope, group.rows), rows_of(projected.q_pe, group.rows)


def attend_cut(
    step: Step,
    part: Absorbed,
    own: tuple[Tensor, ...],
    number: int,  # index into part.cuts
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # out_latent [n, H, C], lse [n, H]
    """Attend to one cut in latent space. `own`: own_queries() of all rows of the group."""
    cut, start_loc = None, part.start_locs[number]
    if len(part.cuts) > 1:
        cut = part.cuts[number]
        own = tuple([tensor[cut] for tensor in own])
    plan, (first, *_) = step.plan, part.reads
    q, q_scale = _latent_queries(step, own)
    if first.kind == "paged":
        rows = _rows(step, first)
        assert first.lens is not None
        out, lse = mqa_paged(
            q,
            rows.data,
            rows.kv_scale,
            first.block_table,
            first.lens,
            start_loc,
            q_scale,
            format=rows.format,
            C=plan.config.kv_lora_rank,
            scale=plan.config.scale,
            causal=part.causal,
            max_query_len=part.max_query_len,
            run_length=plan.run_length,
            backend=plan.backend("mqa_paged"),
        )
        return _in_dtype(out, own[0]), lse
    segments = [
        _segment(step, keys, cut)
        for keys in part.reads
        if step.only == "all" or step.only == SEGMENTS[keys.part]
    ]
    if not segments:  # "entries" of a layer without entries
        return seen_nothing(q, plan.config.kv_lora_rank)
    assert part.positions is not None
    out, lse = mqa_sparse(
        q,
        start_loc,
        part.positions if cut is None else part.positions[cut],
        segments[0],
        segments[1] if len(segments) > 1 else None,
        sink,
        q_scale=q_scale,
        C=plan.config.kv_lora_rank,
        scale=plan.config.scale,
        run_length=plan.run_length,
        backend=plan.backend("mqa_sparse"),
    )
    return _in_dtype(out, own[0]), lse


def _in_dtype(out: Tensor, q: Tensor) -> Tensor:
    """Cast to the dtype of the queries, unless the caller passed them in e4m3."""
    return out if q.dtype == torch.float8_e4m3fn else out.to(q.dtype)


def _rows(step: Step, keys: Keys) -> PagedCache:
    rows: PagedCache = getattr(step.cache, keys.part)
    return rows


def _segment(step: Step, keys: Keys, cut: slice | None) -> Segment:
    """Return a segment for mqa_sparse; selected keys are slots if the plan maps them."""
    rows, kind, table = _rows(step, keys), keys.kind, keys.block_table
    if kind != "listed":
        return Segment(
            rows.data, rows.kv_scale, rows.format, kind, block_table=table, span=keys.span
        )
    assert step.selection is not None
    chosen, lens = step.selection.rows, step.selection.lens
    mapped = step.plan.mapped
    return Segment(
        rows.data,
        rows.kv_scale,
        rows.format,
        "slots" if mapped else "positions",
        block_table=None if mapped else table,
        rows=chosen if cut is None else chosen[cut],
        row_lens=lens if cut is None else lens[cut],
    )


def _latent_queries(
    step: Step, own: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor | None]:  # [n, H, D], and the scale of e4m3 ones
    plan, C = step.plan, step.plan.config.kv_lora_rank
    if step.weights is None:
        (q,) = own[:1]
        if step.q_scale is not None:
            return q, own[1]
        if plan.query_dtype is None:
            return q, None
        assert step.cache.latent is not None
        return in_e4m3(q[:, :, :C], q[:, :, C:], step.cache.latent, plan)
    q_nope, q_pe = own
    assert step.cache.latent is not None
    return latent_queries(q_nope, q_pe, step.weights, step.cache.latent, plan)


def _project(out_latent: Tensor, step: Step, out: Tensor | None) -> Tensor:
    """Project out of latent space, into `out` if possible; a no-op without weights."""
    if step.weights is None:
        return out_latent
    return project_out(out_latent, step.weights, step.plan, out)


def project_out(
    out_latent: Tensor, weights: AbsorbedWeights, plan: Plan, out: Tensor | None = None
) -> Tensor:  # [n, H, V]
    """Project out of latent space with the plan's backend."""
    backend, fixed = plan.backend("project_heads"), plan.batch_invariant
    return out_of_latent(out_latent, weights, backend, fixed=fixed, out=out)


def latent_queries(
    q_nope: Tensor, q_pe: Tensor, absorbed: AbsorbedWeights, cache: PagedCache, plan: Plan
) -> tuple[Tensor, Tensor | None]:  # [n, H, D], and the scale of e4m3 ones
    """Return latent queries in q_nope's dtype, or quantized if the plan quantizes them."""
    backend, fixed = plan.backend("project_heads"), plan.batch_invariant
    if plan.query_dtype is None:
        return into_latent(q_nope, q_pe, absorbed, backend, fixed=fixed), None
    if absorbed.uk_scale is not None or fixed:
        latent = q_nope.new_empty((*q_nope.shape[:2], absorbed.w_uk.shape[2]))
        project_heads(
            latent, q_nope, absorbed.w_uk, absorbed.uk_scale, batch_invariant=fixed, backend=backend
        )
    else:
        latent = torch.bmm(q_nope.transpose(0, 1), absorbed.w_uk).transpose(0, 1)
    return in_e4m3(latent, q_pe, cache, plan)


def in_e4m3(
    latent: Tensor, q_pe: Tensor, cache: PagedCache, plan: Plan
) -> tuple[Tensor, Tensor]:  # [n, H, D], and their scale [n, H]
    """Quantize queries with one scale per token and head, or with the static scale of the cache."""
    q_scale = cache.q_scale if plan.query_dtype == "fp8_static" else None
    return quantize_queries(latent, q_pe, q_scale, backend=plan.backend("quantize_queries"))


def into_latent(
    q_nope: Tensor, q_pe: Tensor, absorbed: AbsorbedWeights, backend: str, *, fixed: bool = False
) -> Tensor:  # [n, H, D], as mqa_paged and mqa_sparse take them
    """Absorb w_uk into queries. Uses project_heads for fp8 weights or if `fixed` (batch-invariant),
    else torch.bmm."""
    if absorbed.uk_scale is not None or fixed:
        C = absorbed.w_uk.shape[2]
        q_latent = q_nope.new_empty((*q_nope.shape[:2], C + q_pe.shape[2]))
        q_latent[:, :, C:] = q_pe
        project_heads(
            q_latent[:, :, :C], q_nope, absorbed.w_uk, absorbed.uk_scale, batch_invariant=fixed,
            backend=backend,
        )  # fmt: skip
        return q_latent
    if writes_in_place(q_nope):
        C = absorbed.w_uk.shape[2]
        q_latent = q_nope.new_empty((*q_nope.shape[:2], C + q_pe.shape[2]))
        torch.bmm(q_nope.transpose(0, 1), absorbed.w_uk, out=q_latent[:, :, :C].transpose(0, 1))
        q_latent[:, :, C:] = q_pe
        return q_latent
    into_latent = torch.bmm(q_nope.transpose(0, 1), absorbed.w_uk)  # [H, n, C]
    return torch.cat([into_latent.transpose(0, 1), q_pe], dim=-1)


def writes_in_place(operand: Tensor) -> bool:
    """Whether torch.bmm writes directly into a strided view, as cuBLAS does. False in tracing."""
    return operand.is_cuda and not torch.compiler.is_compiling()


def out_of_latent(
    out_latent: Tensor,
    absorbed: AbsorbedWeights,
    backend: str,
    *,
    fixed: bool = False,
    out: Tensor | None = None,  # [n, H, V]
) -> Tensor:
    """Multiply each head by its w_uv, into `out` if given."""
    H, V = out_latent.shape[1], absorbed.w_uv.shape[2]
    scaled = absorbed.uv_scale is not None or fixed
    if out is None and (scaled or writes_in_place(out_latent)):
        out = out_latent.new_empty((out_latent.shape[0], H, V))
    if scaled:
        assert out is not None
        project_heads(
            out,
            out_latent,
            absorbed.w_uv,
            absorbed.uv_scale,
            batch_invariant=fixed,
            backend=backend,
        )
        return out
    if out is not None and writes_in_place(out_latent):
        torch.bmm(out_latent.transpose(0, 1), absorbed.w_uv, out=out.transpose(0, 1))
        return out
    bf16_on_cpu = out_latent.dtype == torch.bfloat16 and out_latent.device.type == "cpu"
    if bf16_on_cpu and out_latent.shape[0] <= FEW_TOKENS:
        columns = out_latent.permute(1, 2, 0)  # [H, C, n]
        return torch.bmm(absorbed.w_uv.transpose(1, 2), columns).permute(2, 0, 1).contiguous()
    return torch.bmm(out_latent.transpose(0, 1), absorbed.w_uv).transpose(0, 1)
