"""Absorbed form: attention in latent space, straight from the paged cache."""

from __future__ import annotations

import torch
from torch import Tensor

from openmla.attention.types import AbsorbedWeights, Projected, Selection
from openmla.cache import PagedCache
from openmla.ops import Segment, mqa_paged, mqa_sparse
from openmla.plan import DecodePlan, Plan, SparsePlan


def attend_absorbed(
    projected: Projected,
    absorbed: AbsorbedWeights,
    latent: PagedCache,
    plan: Plan,
    decode: DecodePlan,
) -> tuple[Tensor, Tensor]:  # out [n, H, V] and lse [n, H] of the rows of decode.rows
    """Queries into latent space, one mqa_paged, outputs out of it."""
    out_latent, lse = mqa_paged(
        _into_latent(projected.q_nope[decode.rows], projected.q_pe[decode.rows], absorbed),
        latent.data,
        latent.kv_scale,
        decode.block_table,
        decode.seq_lens,
        decode.query_start_loc,
        format=latent.format,
        C=plan.config.kv_lora_rank,
        scale=plan.config.scale,
        causal=True,
        max_query_len=decode.max_query_len,
        run_length=plan.run_length,
        backend=plan.called_with("mqa_paged"),
    )
    return _out_of_latent(out_latent, absorbed), lse


def attend_chosen(
    q_nope: Tensor,  # [n, H, P], the first num_absorbed sparse rows
    q_pe: Tensor,
    absorbed: AbsorbedWeights,
    latent: PagedCache,
    plan: Plan,
    sparse: SparsePlan,
    selection: Selection,
) -> tuple[Tensor, Tensor]:  # out [n, H, V], lse [n, H]
    """The same over each token's own rows, a chunk of queries at a time."""
    H, V = plan.config.num_heads, plan.config.v_head_dim
    out = q_nope.new_empty((sparse.num_absorbed, H, V))
    lse = q_nope.new_empty(out.shape[:2], dtype=torch.promote_types(out.dtype, torch.float32))
    for chunk, start_loc in zip(sparse.query_chunks, sparse.query_chunk_start_locs, strict=True):
        out_latent, lse[chunk] = mqa_sparse(
            _into_latent(q_nope[chunk], q_pe[chunk], absorbed),
            start_loc,
            sparse.positions[chunk],
            Segment(
                latent.data,
                latent.kv_scale,
                latent.format,
                "slots" if plan.mapped else "positions",
                block_table=None if plan.mapped else sparse.block_table,
                rows=selection.rows[chunk],
                row_lens=selection.lens[chunk],
            ),
            C=plan.config.kv_lora_rank,
            scale=plan.config.scale,
            run_length=plan.run_length,
            backend=plan.called_with("mqa_sparse"),
        )
        out[chunk] = _out_of_latent(out_latent, absorbed)
    return out, lse


def _into_latent(q_nope: Tensor, q_pe: Tensor, absorbed: AbsorbedWeights) -> Tensor:
    into_latent = torch.bmm(q_nope.transpose(0, 1), absorbed.w_uk)  # [H, n, C]
    return torch.cat([into_latent.transpose(0, 1), q_pe], dim=-1)


def _out_of_latent(out_latent: Tensor, absorbed: AbsorbedWeights) -> Tensor:
    return torch.bmm(out_latent.transpose(0, 1), absorbed.w_uv).transpose(0, 1)
