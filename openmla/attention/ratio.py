"""Queries and new rows in the units of a cache whose k_pe has a range of its own.

A row has one scale, but where its cache has a rope_ratio r the writing op stores k_pe / r. Queries
that meet such rows are q_pe * r, and new rows that stand beside them, in the expanded form, are
k_pe / r too: what reads rows knows nothing of it. r is a power of two, so nothing is rounded as
long as the model's type can hold the results; fp16, which has few exponents, loses the last bits of
the smallest.
"""

from __future__ import annotations

from torch import Tensor

from openmla.attention.types import Projected
from openmla.cache import PagedCache
from openmla.plan import Plan


def scale_rope(projected: Projected, cache: PagedCache, plan: Plan) -> Projected:
    """Of rows that are written already, as they were projected; those stay as they are."""
    ratio = cache.rope_ratio
    if ratio is None:
        return projected
    expands = plan.group("expanded") is not None
    k_pe = projected.k_pe / ratio if expands else projected.k_pe
    return Projected(projected.q_nope, projected.q_pe * ratio, projected.kv_c, k_pe)


def scale_rope_of_latent(q_latent: Tensor, cache: PagedCache, C: int) -> Tensor:
    """The same of queries [T, H, C + R] that are in latent space already."""
    ratio = cache.rope_ratio
    if ratio is None:
        return q_latent
    scaled = q_latent.clone()
    scaled[:, :, C:] *= ratio
    return scaled
