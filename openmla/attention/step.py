"""attend_step: write this step's rows, then attend, each request in the form its plan says."""

from __future__ import annotations

from torch import Tensor

from openmla.attention.absorbed import attend_absorbed
from openmla.attention.expanded import attend_expanded
from openmla.attention.types import Absorbed, Projected
from openmla.cache import LayerCache
from openmla.errors import ConfigError, ShapeError
from openmla.ops import cache_write
from openmla.plan import Plan


def attend_step(
    projected: Projected, absorbed: Absorbed, cache: LayerCache, plan: Plan
) -> Tensor:  # [T, H, V]
    """One layer's attention over the step's T tokens, in the caller's order.

    All new rows are written first, so that absorbed queries find their own row in the cache.
    """
    latent = cache.latent
    if latent is None:
        raise ConfigError("step: cache must have latent rows, got none.")
    config, T = plan.config, plan.num_tokens
    shape = (T, config.num_heads, config.qk_nope_head_dim)
    if projected.q_nope.shape != shape:
        raise ShapeError(
            f"step: q_nope must be [T, H, P] with {shape} as planned, "
            f"got {tuple(projected.q_nope.shape)}."
        )
    cache_write(
        latent.data,
        projected.kv_c,
        projected.k_pe,
        plan.slot_mapping,
        latent.kv_scale,
        format=latent.format,
        backend=plan.backends["cache_write"],
    )
    decode, prefill = plan.decode, plan.prefill
    if prefill is None:
        assert decode is not None
        return attend_absorbed(projected, absorbed, latent, plan, decode)
    out = projected.q_nope.new_empty((T, config.num_heads, config.v_head_dim))
    out[prefill.rows] = attend_expanded(projected, absorbed, latent, plan, prefill)
    if decode is not None:
        out[decode.rows] = attend_absorbed(projected, absorbed, latent, plan, decode)
    return out
