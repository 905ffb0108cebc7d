"""Expanded form: ordinary attention over keys and values made from latents, context in chunks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from openmla.attention.products import multiply
from openmla.attention.types import AbsorbedWeights, Projected, rows_of, seen_nothing
from openmla.cache import PagedCache
from openmla.ops import cache_gather, merge_states, mha_ragged
from openmla.ops.mha_ragged import joined
from openmla.plan import ContextChunk, KeyChunk, Plan, PrefillPlan

# What takes a chunk's partial: out, lse, the partial's, the chunk.
Merge = Callable[[Tensor, Tensor, tuple[Tensor, Tensor], ContextChunk], None]


def attend_expanded(
    projected: Projected,
    absorbed: AbsorbedWeights,
    latent: PagedCache,
    plan: Plan,
    prefill: PrefillPlan,
    merge: Merge | None = None,
) -> tuple[Tensor, Tensor]:  # out [n, H, V] and lse [n, H] of the rows of prefill.rows
    """New rows causally and context beside them: in one call if it fits, else chunk by chunk. Over
    a part of the keys, context alone. `merge` takes a chunk's partial in merge_states' place.

    New rows are used as projected, context as the cache holds it, whatever the route: with a lossy
    format all routes round the same values.
    """
    q = rows_of(whole_queries(projected), prefill.rows)
    kv_c, k_pe = rows_of(projected.kv_c, prefill.rows), rows_of(projected.k_pe, prefill.rows)
    if prefill.one_shot is not None:
        assert prefill.new_rows is not None
        rows = gather(latent, plan, prefill.one_shot, kv_c.dtype)
        rows.index_copy_(0, prefill.new_rows, torch.cat([kv_c, k_pe], dim=1))
        return attend_rows(q, rows, absorbed, plan, prefill.one_shot, causal=True)
    out, lse = _attend_new(q, kv_c, k_pe, absorbed, plan, prefill)
    for chunk in prefill.chunks:
        rows = gather(latent, plan, chunk, kv_c.dtype)
        part = attend_rows(q[chunk.rows], rows, absorbed, plan, chunk, causal=False)
        if merge is None:
            sides = out[chunk.rows], lse[chunk.rows], *part
            merge_states(*sides, backend=plan.backends["merge_states"])
        else:
            merge(out, lse, part, chunk)
    return out, lse


def merge_rows(
    out: Tensor,
    lse: Tensor,
    part: tuple[Tensor, Tensor],  # of a chunk's rows
    rows: slice,  # some of them
    all_rows: slice,
    plan: Plan,
) -> None:
    """A chunk's partial into some of its rows."""
    sides = out[rows], lse[rows], *part_of(part, rows, all_rows)
    merge_states(*sides, backend=plan.backends["merge_states"])


def part_of(part: tuple[Tensor, Tensor], rows: slice, all_rows: slice) -> tuple[Tensor, Tensor]:
    """Of a partial of all_rows, that of some of them."""
    mine = slice(rows.start - all_rows.start, rows.stop - all_rows.start)
    return part[0][mine], part[1][mine]


def whole_queries(projected: Projected) -> Tensor:  # [T, H, P + R]
    """Both parts of queries as one tensor: the one they are views of, if it is one."""
    q_nope, q_pe = projected.q_nope, projected.q_pe
    behind = q_nope.shape[2] * q_nope.element_size()
    if (
        type(q_nope) is Tensor  # a tracer's have no addresses
        and not torch.compiler.is_compiling()
        and q_nope.stride() == q_pe.stride()
        and q_pe.data_ptr() == q_nope.data_ptr() + behind
    ):
        T, H, P = q_nope.shape
        return q_nope.as_strided((T, H, P + q_pe.shape[2]), q_nope.stride())
    return torch.cat([q_nope, q_pe], dim=-1)


def _attend_new(
    q: Tensor,
    kv_c: Tensor,
    k_pe: Tensor,
    absorbed: AbsorbedWeights,
    plan: Plan,
    prefill: PrefillPlan,
) -> tuple[Tensor, Tensor]:
    """This step's rows, causally; where none of them is a key, what sees nothing."""
    if prefill.route == "context":
        return seen_nothing(q, plan.config.v_head_dim)
    k, v = expand(kv_c, absorbed, plan)
    starts, longest = prefill.query_start_loc, prefill.max_query_len
    return _mha(q, k, k_pe, v, plan, starts, starts, longest, longest, causal=True)


def gather(latent: PagedCache, plan: Plan, chunk: KeyChunk, dtype: torch.dtype) -> Tensor:
    """[num_keys, D]: a chunk's cached rows, in the workspace if there is one."""
    if plan.workspace is not None:
        rows = plan.workspace.rows[: chunk.num_keys]
    else:
        shape = (chunk.num_keys, plan.config.latent_dim)
        rows = torch.empty(shape, dtype=dtype, device=latent.data.device)
    target = rows
    if plan.workspace is not None and torch.compiler.is_compiling():
        # of a slice that is written, the compiler would ask whether it is all of the workspace
        target = plan.workspace.rows
    cache_gather(
        target,
        latent.data,
        latent.kv_scale,
        chunk.block_table,
        chunk.starts,
        chunk.key_start_loc,
        format=latent.format,
        backend=plan.backends["cache_gather"],
    )
    return rows


def expand(kv_c: Tensor, absorbed: AbsorbedWeights, plan: Plan) -> tuple[Tensor, Tensor]:
    """Each head's own columns of keys [S, H, P], and values [S, H, V]: views of the expansion."""
    config = plan.config
    S, H, P = kv_c.shape[0], config.num_heads, config.qk_nope_head_dim
    if plan.workspace is not None:
        expanded = plan.workspace.expanded[:S]
    else:
        expanded = kv_c.new_empty((S, H * (P + config.v_head_dim)))
    if plan.fixed_by is not None:  # not by its linear, which is a library's product
        multiply(kv_c, absorbed.dense(kv_c.dtype), plan.fixed_by, out=expanded)
    elif absorbed.linear is None:
        torch.mm(kv_c, absorbed.dense(kv_c.dtype).T, out=expanded)
    else:
        with torch.no_grad():  # its scales may be parameters that want one
            expanded.copy_(absorbed.linear(kv_c.contiguous()))
    k, v = expanded.view(S, H, -1).split([P, config.v_head_dim], dim=-1)
    return k, v


def whole_keys(k: Tensor, k_pe: Tensor, plan: Plan) -> Tensor:  # [S, H, P + R]
    """For backends that do not read the shared columns by themselves; in the workspace if there is
    one."""
    return joined(k, k_pe, None if plan.workspace is None else plan.workspace.keys[: len(k)])


def attend_rows(
    q: Tensor,
    rows: Tensor,
    absorbed: AbsorbedWeights,
    plan: Plan,
    chunk: ContextChunk,
    *,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """Queries over gathered rows, expanded for the plan's heads."""
    C = plan.config.kv_lora_rank
    k, v = expand(rows[:, :C], absorbed, plan)
    return _mha(
        q, k, rows[:, C:], v, plan, chunk.query_start_loc, chunk.key_start_loc,
        chunk.max_query_len, chunk.max_key_len, causal=causal,
    )  # fmt: skip


def _mha(
    q: Tensor,
    k: Tensor,
    k_pe: Tensor,
    v: Tensor,
    plan: Plan,
    query_start_loc: Tensor,
    key_start_loc: Tensor,
    max_query_len: int,
    max_key_len: int,
    *,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    rope: Tensor | None = k_pe
    if not plan.keys_apart:
        k, rope = whole_keys(k, k_pe, plan), None
    return mha_ragged(
        q,
        k,
        v,
        query_start_loc,
        key_start_loc,
        rope,
        scale=plan.config.scale,
        causal=causal,
        max_query_len=max_query_len,
        max_key_len=max_key_len,
        batch_invariant=plan.batch_invariant,
        backend=plan.backends["mha_ragged"],
    )
