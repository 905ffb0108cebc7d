"""Sparse prefill in expanded form: all keys computed, a bit per pair says which count."""

from __future__ import annotations

from torch import Tensor

from openmla.attention.eight_bits import queries_of
from openmla.attention.expanded import gather, keys_of, latents_of
from openmla.attention.types import AbsorbedWeights, Projected, Selection, seen_nothing
from openmla.cache import PagedCache
from openmla.ops import merge_states, mha_masked, pack_mask
from openmla.plan import Plan, SparsePlan


def attend_masked(
    q: Tensor,  # [n, H, P + R], the sparse rows from num_absorbed on
    projected: Projected,
    absorbed: AbsorbedWeights,
    latent: PagedCache,
    plan: Plan,
    sparse: SparsePlan,
    selection: Selection,
) -> tuple[Tensor, Tensor]:  # out [n, H, V], lse [n, H]
    """Chunk by chunk of keys, each read from the cache and expanded once, merged."""
    C = plan.config.kv_lora_rank
    out, lse = seen_nothing(q, plan.config.v_head_dim)
    queries, unit = queries_of(q, plan), latent.kv_scale if plan.keeps_codes else None
    for chunk in sparse.masked:
        rows = gather(latent, plan, chunk, projected.kv_c.dtype)
        kv_c = latents_of(rows[:, :C], projected.kv_c.dtype)
        keys = keys_of(kv_c, rows[:, C:], chunk.key_start_loc, absorbed, plan, unit)
        for group in chunk.groups:
            mask = pack_mask(
                selection.positions[group.rows],
                group.key_starts,
                group.key_lens,
                num_words=-(-chunk.max_key_len // 32),
                backend=plan.backends["pack_mask"],
            )
            mine = slice(
                group.rows.start - sparse.num_absorbed, group.rows.stop - sparse.num_absorbed
            )
            asking = queries.of(mine)
            part = mha_masked(
                asking.values,
                keys.k,
                keys.v,
                group.query_start_loc,
                chunk.key_start_loc,
                mask,
                asking.scale,
                keys.k_scale,
                keys.v_scale,
                scale=plan.config.scale,
                max_query_len=chunk.max_query_len,
                max_key_len=chunk.max_key_len,
                batch_invariant=plan.batch_invariant,
                out_dtype=None if asking.scale is None else asking.dtype,
                backend=plan.backends["mha_masked"],
            )
            merge_states(out[mine], lse[mine], *part, backend=plan.backends["merge_states"])
    return out, lse
