"""Writes this step's rows to the cache, normalizing and rotating raw rows first."""

from __future__ import annotations

import torch
from torch import Tensor

from openmla.attention.products import rms_normed
from openmla.attention.types import RawProjections
from openmla.cache import PagedCache
from openmla.ops import cache_write, latent_write, rope
from openmla.plan import Plan


def write_rows(
    kv_c: Tensor, k_pe: Tensor, raw: RawProjections | None, cache: PagedCache, plan: Plan
) -> None:
    """Write kv_c and k_pe, or with `raw` the tensors that they are views of."""
    if raw is not None and in_one_launch(cache, plan):
        latent_write(
            cache.data,
            raw.q,
            raw.kv,
            raw.norm_weight,
            raw.positions,
            plan.slot_mapping,
            cache.kv_scale,
            raw.table,
            cache.rope_ratio,
            cache.clamped,
            format=cache.format,
            pairing=raw.pairing,
            eps=raw.eps,
            factor=raw.factor,
            norm_queries=raw.norm_queries,
            backend=plan.backend("latent_write"),
        )
        return
    if raw is not None:
        finish(raw, plan)
    cache_write(
        cache.data,
        kv_c,
        k_pe,
        plan.slot_mapping,
        cache.kv_scale,
        cache.rope_ratio,
        cache.clamped,
        format=cache.format,
        backend=plan.backend("cache_write"),
    )


def in_one_launch(cache: PagedCache, plan: Plan) -> bool:
    """Whether latent_write is used: its reference reads slots on the host, which syncs a GPU."""
    return plan.backend("latent_write") != "reference" or not cache.data.is_cuda


def finish(raw: RawProjections, plan: Plan) -> None:
    """Apply the norms and rotations of latent_write op by op."""
    C = raw.norm_weight.shape[0]
    normed = raw.norm_weight * rms_normed(raw.kv[:, :C], raw.eps, plan.fixed_by)
    raw.kv[:, :C] = normed * raw.factor if raw.factor != 1 else normed
    if raw.norm_queries:
        raw.q.copy_(rms_normed(raw.q, raw.eps, plan.fixed_by))
    if raw.table is None:
        return
    R = raw.table.shape[1]
    q_pe, k_pe = raw.q[:, :, raw.q.shape[2] - R :], raw.kv[:, raw.kv.shape[1] - R :]
    rotate(q_pe, k_pe, raw.positions, raw.table, raw.pairing, plan)


def rotate(
    q_pe: Tensor,  # [T, H, R]
    k_pe: Tensor | None,  # [T, R]
    positions: Tensor,
    table: Tensor,
    pairing: str,
    plan: Plan,
) -> None:
    """Rotate queries and shared keys in place."""
    for turned in (q_pe,) if k_pe is None else (q_pe, k_pe[:, None]):
        rope(turned, positions, table, pairing=pairing, backend=plan.backend("rope"))


def read_rows(cache: PagedCache, plan: Plan, dtype: torch.dtype) -> Tensor:  # [T, D]
    """Read this step's rows back, as a layer does that has none of its own. Rows of padding
    tokens have any value."""
    slots, config = plan.slot_mapping.clamp(min=0), plan.config
    rows = cache.layout.read(cache.data, slots, cache.kv_scale, dtype, config.latent_dim)
    if cache.rope_ratio is not None:
        rows[:, config.kv_lora_rank :] *= cache.rope_ratio
    return rows
