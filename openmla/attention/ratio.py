"""Scales queries and new rows for a cache whose k_pe has a separate range.

A row has one scale, but if its cache has a rope_ratio r the writing op stores k_pe / r. Queries for
such rows are q_pe * r, and in the expanded form new rows use k_pe / r too, so ops that read rows
need no change. r is a power of two, so nothing is rounded as long as the model's dtype can hold the
results; fp16, with its small exponent range, loses the last bits of the smallest values.
"""

from __future__ import annotations

from torch import Tensor

from openmla.attention.types import Projected
from openmla.cache import PagedCache
from openmla.plan import Plan


def scale_rope(projected: Projected, cache: PagedCache, plan: Plan) -> Projected:
    """Return scaled copies for rows that are written already; `projected` is not modified."""
    ratio = cache.rope_ratio
    if ratio is None:
        return projected
    expands = plan.group("expanded") is not None
    k_pe = projected.k_pe / ratio if expands else projected.k_pe
    return Projected(projected.q_nope, projected.q_pe * ratio, projected.kv_c, k_pe)


def scale_rope_of_latent(q_latent: Tensor, cache: PagedCache, C: int) -> Tensor:
    """Return scaled latent queries [T, H, C + R]."""
    ratio = cache.rope_ratio
    if ratio is None:
        return q_latent
    scaled = q_latent.clone()
    scaled[:, :, C:] *= ratio
    return scaled
