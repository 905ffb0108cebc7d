"""This step's rows into the cache, finished on their way where they are raw."""

from __future__ import annotations

from torch import Tensor

from openmla.attention.types import Raw
from openmla.cache import PagedCache
from openmla.ops import cache_write, latent_write
from openmla.plan import Plan


def write_rows(kv_c: Tensor, k_pe: Tensor, raw: Raw | None, cache: PagedCache, plan: Plan) -> None:
    """kv_c and k_pe, or with `raw` what they are views of."""
    if raw is None:
        cache_write(
            cache.data,
            kv_c,
            k_pe,
            plan.slot_mapping,
            cache.kv_scale,
            format=cache.format,
            backend=plan.backends["cache_write"],
        )
        return
    latent_write(
        cache.data,
        raw.q,
        raw.kv,
        raw.norm_weight,
        raw.positions,
        plan.slot_mapping,
        cache.kv_scale,
        raw.table,
        format=cache.format,
        pairing=raw.pairing,
        eps=raw.eps,
        factor=raw.factor,
        norm_queries=raw.norm_queries,
        backend=plan.backends["latent_write"],
    )
