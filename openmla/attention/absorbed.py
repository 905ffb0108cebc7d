"""Absorbed form: attention in latent space, straight from the paged cache."""

from __future__ import annotations

import torch
from torch import Tensor

from openmla.attention.types import Absorbed, Projected
from openmla.cache import PagedCache
from openmla.ops import mqa_paged
from openmla.plan import DecodePlan, Plan


def attend_absorbed(
    projected: Projected, absorbed: Absorbed, latent: PagedCache, plan: Plan, decode: DecodePlan
) -> Tensor:  # [n, H, V], the rows of decode.rows
    """Queries into latent space, one mqa_paged, outputs out of it."""
    q_nope, q_pe = projected.q_nope[decode.rows], projected.q_pe[decode.rows]
    into_latent = torch.bmm(q_nope.transpose(0, 1), absorbed.w_uk)  # [H, n, C]
    q_latent = torch.cat([into_latent.transpose(0, 1), q_pe], dim=-1)
    out_latent, _ = mqa_paged(
        q_latent,
        latent.data,
        latent.kv_scale,
        decode.block_table,
        decode.seq_lens,
        decode.query_start_loc,
        decode.split_starts,
        format=latent.format,
        C=plan.config.kv_lora_rank,
        scale=plan.config.scale,
        causal=True,
        max_query_len=decode.max_query_len,
        backend=plan.backends["mqa_paged"],
    )
    return torch.bmm(out_latent.transpose(0, 1), absorbed.w_uv).transpose(0, 1)
