"""Expanded heads in e4m3: scales found on the device, heads quantised, attention over them.

Keys and values share a scale per head: the next power of two that holds what a head's weights can
make of the longest latent (Cauchy-Schwarz) and the largest k_pe, so that nothing is cut off and no
value is looked at twice. It may be some 10 times what is there: e4m3 is floating point, and rounds
all but the smallest values alike. Queries have a scale per row and head. A latent that is not
finite has no say: what it makes is NaN or saturates by itself.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from openmla.attention.types import AbsorbedWeights
from openmla.cache.format import FP8_MAX, power_of_two
from openmla.ops import quantize_heads
from openmla.ops.quantize_heads import allocate_heads
from openmla.plan import Plan

MARGIN = 1.0625  # over the bound, for what products round
SMALLEST = 2.0**-60


class Queries(NamedTuple):
    """Queries as mha_ragged and mha_masked take them: scales only where they are e4m3."""

    values: Tensor  # [n, H, E]
    scale: Tensor | None  # [n, H]
    dtype: torch.dtype  # of outputs

    def of(self, rows: slice) -> Queries:
        scale = None if self.scale is None else self.scale[rows]
        return Queries(self.values[rows], scale, self.dtype)


class Keys(NamedTuple):
    """Keys and values, and what heads in e4m3 are multiplied by."""

    k: Tensor  # [S, H, E]
    v: Tensor  # [S, H, V]
    k_scale: Tensor | None  # [H]
    v_scale: Tensor | None


def queries_of(q: Tensor, plan: Plan) -> Queries:
    """As the plan wants them."""
    if plan.prefill_dtype is None:
        return Queries(q, None, q.dtype)
    T, H, E = q.shape
    values = allocate_heads(T, H, E, q.device, keys_contiguous=False)
    scale = torch.empty((T, H), dtype=torch.float32, device=q.device)
    quantize_heads(values, scale, q, backend=plan.backends["quantize_heads"])
    return Queries(values, scale, q.dtype)


def quantize_keys(
    kv_c: Tensor,  # [S, C], what k and v are made of
    k: Tensor,  # [S, H, P]
    k_pe: Tensor,  # [S, R], e4m3 itself where the cache's rows are
    v: Tensor,  # [S, H, V]
    absorbed: AbsorbedWeights,
    plan: Plan,
    unit: Tensor | None,  # [] f32: kv_scale of rows that were not multiplied by it
    *,
    keys_contiguous: bool,
) -> Keys:
    """Whole keys, and values as the backend reads them."""
    S, H, P = k.shape
    R, V, device = k_pe.shape[1], v.shape[2], k.device
    k_scale, v_scale = head_scales(kv_c, k_pe, absorbed, H, P)
    keys = allocate_heads(S, H, P + R, device, keys_contiguous=False)
    values = allocate_heads(S, H, V, device, keys_contiguous=keys_contiguous)
    backend = plan.backends["quantize_heads"]
    quantize_heads(keys, None, k, k_pe, k_scale, backend=backend)
    quantize_heads(values, None, v, None, v_scale, backend=backend)
    if unit is not None:
        k_scale, v_scale = k_scale * unit, v_scale * unit
    return Keys(keys, values, k_scale, v_scale)


def head_scales(
    kv_c: Tensor, k_pe: Tensor, absorbed: AbsorbedWeights, H: int, P: int
) -> tuple[Tensor, Tensor]:  # [H], [H]
    """Powers of two that hold every key and every value of a head."""
    weights = absorbed.dense(kv_c.dtype)
    rows = torch.linalg.vector_norm(weights, dim=1, dtype=torch.float32).view(H, -1)
    longest = _largest(torch.linalg.vector_norm(kv_c, dim=1, dtype=torch.float32))
    k_bound = torch.maximum(rows[:, :P].amax(1) * longest, _largest(k_pe.to(torch.float32)))
    return _scale(k_bound), _scale(rows[:, P:].amax(1) * longest)


def _largest(values: Tensor) -> Tensor:
    """Magnitude, of those that are finite."""
    return values.abs().nan_to_num(0.0, posinf=0.0).amax()


def _scale(bound: Tensor) -> Tensor:
    return power_of_two((bound * (MARGIN / FP8_MAX)).clamp_min(SMALLEST))
