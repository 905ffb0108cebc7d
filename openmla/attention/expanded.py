"""Expanded form: ordinary attention over keys and values expanded from latents, chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from openmla.attention.eight_bits import HeadKeys, Queries, quantize_keys, queries_of
from openmla.attention.products import multiply
from openmla.attention.types import AbsorbedWeights, Projected, Step, rows_of, seen_nothing
from openmla.cache import PagedCache
from openmla.ops import cache_gather, merge_states, mha_masked, mha_ragged, pack_mask
from openmla.ops.mha_ragged import joined
from openmla.plan import Expanded, Group, KeyChunk, Plan
from openmla.plan.across import brought_shapes
from openmla.plan.types import Ask, Brought, num_words
from openmla.ranks.collectives import all_gather

# Merges a chunk's partial result. Arguments: out, lse, the partial's (out, lse), the chunk.
Merge = Callable[[Tensor, Tensor, tuple[Tensor, Tensor], KeyChunk], None]


def attend_expanded(
    step: Step, group: Group, merge: Merge | None = None
) -> tuple[Tensor, Tensor]:  # out [n, H, V] and lse [n, H] of the group's rows
    """Attend causally to new rows and in full to context: in one call if it fits, else chunk by
    chunk. In a plan over part of the keys, to context only. `merge` replaces merge_states for
    chunks.

    On every route, new rows are used as projected and context as stored in the cache, so that all
    routes round the same values in a lossy format. With masks all keys are used as stored.
    """
    part, plan, projected, weights = group.part, step.plan, step.projected, step.weights
    assert isinstance(part, Expanded) and projected is not None and weights is not None
    latent = step.cache.latent
    assert latent is not None
    q = queries_of(_queries(projected, group), plan)
    unit = latent.kv_scale if plan.keeps_codes else None
    dtype = projected.kv_c.dtype
    if part.new_rows is not None:
        (chunk,) = part.chunks
        rows = gather(latent, plan, chunk, dtype)
        new = [rows_of(tensor, group.rows) for tensor in (projected.kv_c, projected.k_pe)]
        rows.index_copy_(0, part.new_rows, torch.cat(new, dim=1))
        return attend_rows(q, rows, weights, plan, chunk, causal=True)
    if part.new is not None:
        kv_c, k_pe = rows_of(projected.kv_c, group.rows), rows_of(projected.k_pe, group.rows)
        ask = part.new
        locs = ask.query_start_loc, ask.max_query_len
        out, lse = _mha(q, kv_c, k_pe, weights, plan, ask, *locs, causal=True)
    else:
        out, lse = seen_nothing(q.values, plan.config.v_head_dim, q.dtype)
    for chunk in part.chunks:
        codes = unit if chunk.brought is None else None
        if chunk.brought is None:
            rows = gather(latent, plan, chunk, dtype)
        else:
            rows = gather_brought(latent, plan, chunk, chunk.brought, dtype)
        if part.route == "masked":
            _attend_masked(step, group, q, rows, chunk, codes, out, lse)
            continue
        (ask,) = chunk.asks
        one = attend_rows(q.of(ask.rows), rows, weights, plan, chunk, causal=False, unit=codes)
        if merge is None:
            sides = out[ask.rows], lse[ask.rows], *one
            merge_states(*sides, backend=plan.backend("merge_states"))
        else:
            merge(out, lse, one, chunk)
    return out, lse


def _queries(projected: Projected, group: Group) -> Tensor:  # [n, H, P + R]
    if group.form == "masked":
        own = rows_of(projected.q_nope, group.rows), rows_of(projected.q_pe, group.rows)
        return torch.cat(own, dim=-1)
    return rows_of(whole_queries(projected), group.rows)


def _attend_masked(
    step: Step,
    group: Group,
    q: Queries,
    rows: Tensor,
    chunk: KeyChunk,
    unit: Tensor | None,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Expand a chunk of keys once and attend to it with a bit mask per (query, key) pair."""
    plan, weights, C = step.plan, step.weights, step.plan.config.kv_lora_rank
    assert weights is not None and step.selection is not None
    selected = step.selection.positions[group.selected]
    kv_c = latents_of(rows[:, :C], q.dtype)
    keys = keys_of(kv_c, rows[:, C:], chunk.key_start_loc, weights, plan, unit)
    for ask in chunk.asks:
        assert ask.key_starts is not None and ask.key_lens is not None
        mask = pack_mask(
            selected[ask.rows],
            ask.key_starts,
            ask.key_lens,
            num_words=num_words(chunk.max_key_len),
            backend=plan.backend("pack_mask"),
        )
        asking = q.of(ask.rows)
        one = mha_masked(
            asking.values,
            keys.k,
            keys.v,
            ask.query_start_loc,
            chunk.key_start_loc,
            mask,
            asking.scale,
            keys.k_scale,
            keys.v_scale,
            scale=plan.config.scale,
            max_query_len=ask.max_query_len,
            max_key_len=chunk.max_key_len,
            batch_invariant=plan.batch_invariant,
            out_dtype=None if asking.scale is None else asking.dtype,
            backend=plan.backend("mha_masked"),
        )
        merge_states(out[ask.rows], lse[ask.rows], *one, backend=plan.backend("merge_states"))


def merge_rows(
    out: Tensor,
    lse: Tensor,
    part: tuple[Tensor, Tensor],  # partial of a chunk's rows
    rows: slice,  # a subset of all_rows
    all_rows: slice,
    plan: Plan,
) -> None:
    """Merge a chunk's partial into some of its rows."""
    sides = out[rows], lse[rows], *part_of(part, rows, all_rows)
    merge_states(*sides, backend=plan.backend("merge_states"))


def part_of(part: tuple[Tensor, Tensor], rows: slice, all_rows: slice) -> tuple[Tensor, Tensor]:
    """Slice a partial of `all_rows` to `rows`."""
    mine = slice(rows.start - all_rows.start, rows.stop - all_rows.start)
    return part[0][mine], part[1][mine]


def whole_queries(projected: Projected) -> Tensor:  # [T, H, P + R]
    """Return both parts of queries as one tensor: without a copy if they are views of one."""
    q_nope, q_pe = projected.q_nope, projected.q_pe
    behind = q_nope.shape[2] * q_nope.element_size()
    if (
        type(q_nope) is Tensor  # traced tensors have no addresses
        and not torch.compiler.is_compiling()
        and q_nope.stride() == q_pe.stride()
        and q_pe.data_ptr() == q_nope.data_ptr() + behind
    ):
        T, H, P = q_nope.shape
        return q_nope.as_strided((T, H, P + q_pe.shape[2]), q_nope.stride())
    return torch.cat([q_nope, q_pe], dim=-1)


def gather(latent: PagedCache, plan: Plan, chunk: KeyChunk, dtype: torch.dtype) -> Tensor:
    """Return a chunk's cached rows [num_keys, D], in the workspace if there is one. Rows of an fp8
    cache stay codes if the plan keeps them."""
    D = plan.config.latent_dim
    dtype = torch.float8_e4m3fn if plan.keeps_codes else dtype
    if plan.workspace is not None:
        room = plan.workspace.rows
        if plan.keeps_codes:
            room = room.view(dtype)[:, :D]
        rows = room[: chunk.num_keys]
    else:
        rows = room = torch.empty((chunk.num_keys, D), dtype=dtype, device=latent.data.device)
    target = rows
    if plan.workspace is not None and torch.compiler.is_compiling():
        # For a written slice, the compiler would guard on whether it spans the whole workspace.
        target = room
    cache_gather(
        target,
        latent.data,
        latent.kv_scale,
        chunk.block_table,
        chunk.starts,
        chunk.key_start_loc,
        format=latent.format,
        backend=plan.backend("cache_gather"),
    )
    return rows


def gather_brought(
    latent: PagedCache, plan: Plan, chunk: KeyChunk, brought: Brought, dtype: torch.dtype
) -> Tensor:  # [num_keys, D]
    """Gather a chunk's rows from all ranks, decoded and in order, into the workspace of the ranks,
    or of the plan if it has one."""
    ranks, space, device = plan.ranks, plan.workspace, latent.data.device
    assert ranks is not None
    sizes = brought.num_rows, chunk.num_keys
    shapes = brought_shapes(*sizes, plan.config, space, ranks.shard.size)
    rows, every, keys = ranks.workspace.split(device, dtype, *shapes)
    if space is not None:
        keys = space.rows[: chunk.num_keys]
    cache_gather(
        rows,
        latent.data,
        latent.kv_scale,
        chunk.block_table,
        brought.starts,
        brought.key_start_loc,
        format=latent.format,
        backend=plan.backend("cache_gather"),
    )
    every = all_gather(rows, ranks.link, out=every).view(-1, rows.shape[1])
    return torch.index_select(every, 0, brought.order, out=keys)


def expand(kv_c: Tensor, absorbed: AbsorbedWeights, plan: Plan) -> tuple[Tensor, Tensor]:
    """Return each head's own columns of keys [S, H, P], and values [S, H, V], as views."""
    config = plan.config
    S, H, P = kv_c.shape[0], config.num_heads, config.qk_nope_head_dim
    if plan.workspace is not None:
        expanded = plan.workspace.expanded[:S]
    else:
        expanded = kv_c.new_empty((S, H * (P + config.v_head_dim)))
    if plan.fixed_by is not None:  # `linear` calls a library, which is not batch-invariant
        multiply(kv_c, absorbed.dense(kv_c.dtype), plan.fixed_by, out=expanded)
    elif absorbed.linear is None:
        torch.mm(kv_c, absorbed.dense(kv_c.dtype).T, out=expanded)
    else:
        with torch.no_grad():  # its scales may be parameters that require grad
            expanded.copy_(absorbed.linear(kv_c.contiguous()))
    k, v = expanded.view(S, H, -1).split([P, config.v_head_dim], dim=-1)
    return k, v


def whole_keys(k: Tensor, k_pe: Tensor, plan: Plan) -> Tensor:  # [S, H, P + R]
    """Join k and k_pe for backends that do not read the shared columns themselves; in the workspace
    if there is one."""
    return joined(k, k_pe, None if plan.workspace is None else plan.workspace.keys[: len(k)])


def attend_rows(
    q: Queries,
    rows: Tensor,
    absorbed: AbsorbedWeights,
    plan: Plan,
    chunk: KeyChunk,
    *,
    causal: bool,
    unit: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Expand gathered rows for the plan's heads and attend to them. `unit`: scale of rows that are
    still codes."""
    C = plan.config.kv_lora_rank
    return _mha(
        q, latents_of(rows[:, :C], q.dtype), rows[:, C:], absorbed, plan, chunk.asks[0],
        chunk.key_start_loc, chunk.max_key_len, causal=causal, unit=unit,
    )  # fmt: skip


def latents_of(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return inputs of kv_b_proj: fp8 codes are cast to `dtype`, which is exact."""
    return rows if rows.dtype == dtype else rows.to(dtype)


def keys_of(
    kv_c: Tensor,
    k_pe: Tensor,
    key_start_loc: Tensor,
    absorbed: AbsorbedWeights,
    plan: Plan,
    unit: Tensor | None,
) -> HeadKeys:
    """Return whole expanded keys, and values."""
    k, v = expand(kv_c, absorbed, plan)
    if plan.prefill_dtype is None:
        return HeadKeys(whole_keys(k, k_pe, plan), v, None, None)
    return quantize_keys(kv_c, k, k_pe, v, key_start_loc, absorbed, plan, unit)


def _mha(
    q: Queries,
    kv_c: Tensor,
    k_pe: Tensor,
    absorbed: AbsorbedWeights,
    plan: Plan,
    ask: Ask,
    key_start_loc: Tensor,
    max_key_len: int,
    *,
    causal: bool,
    unit: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    rope: Tensor | None = None
    if plan.calls["mha_ragged"].keys_apart:
        keys, rope = HeadKeys(*expand(kv_c, absorbed, plan), None, None), k_pe
    else:
        keys = keys_of(kv_c, k_pe, key_start_loc, absorbed, plan, unit)
    return mha_ragged(
        q.values,
        keys.k,
        keys.v,
        ask.query_start_loc,
        key_start_loc,
        rope,
        q.scale,
        keys.k_scale,
        keys.v_scale,
        scale=plan.config.scale,
        causal=causal,
        max_query_len=ask.max_query_len,
        max_key_len=max_key_len,
        batch_invariant=plan.batch_invariant,
        out_dtype=None if q.scale is None else q.dtype,
        backend=plan.backend("mha_ragged"),
    )
