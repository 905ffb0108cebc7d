"""Expanded queries and keys in e4m3: computes scales on the device and quantizes heads.

Keys have a scale per request and head: the next power of two above a bound on the head's keys, from
the request's largest latent norm (Cauchy-Schwarz) and its largest k_pe, so that nothing saturates
and keys are read only once. The bound may be about 10 times the actual maximum, but e4m3 is
floating point, so only the smallest values lose precision. Queries have a scale per row and head.
Latents that are not finite are ignored: their keys become NaN or saturate. Values stay in 16 bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from openmla.attention.products import mean_square
from openmla.attention.types import AbsorbedWeights
from openmla.cache.format import FP8_MAX, power_of_two
from openmla.ops import quantize_heads
from openmla.ops.quantize_heads import allocate_heads
from openmla.plan import Plan

MARGIN = 1.0625  # on the bound, for rounding in the products
SMALLEST = 2.0**-60


class Queries(NamedTuple):
    """Queries as mha_ragged and mha_masked take them: with scales only if they are e4m3."""

    values: Tensor  # [n, H, E]
    scale: Tensor | None  # [n, H]
    dtype: torch.dtype  # dtype of outputs

    def of(self, rows: slice) -> Queries:
        scale = None if self.scale is None else self.scale[rows]
        return Queries(self.values[rows], scale, self.dtype)


class HeadKeys(NamedTuple):
    """Keys and values, with their scales if keys are e4m3."""

    k: Tensor  # [S, H, E]
    v: Tensor  # [S, H, V]
    k_scale: Tensor | None  # [B, H]
    v_scale: Tensor | None


def queries_of(q: Tensor, plan: Plan) -> Queries:
    """Quantize queries to e4m3 if the plan does."""
    if plan.prefill_dtype is None:
        return Queries(q, None, q.dtype)
    T, H, E = q.shape
    values = allocate_heads(T, H, E, q.device, keys_contiguous=False)
    # 16-byte aligned rows: kernels are compiled for aligned pointers, and chunks slice this one.
    scale = torch.empty((T, -(-H // 4) * 4), dtype=torch.float32, device=q.device)[:, :H]
    quantize_heads(values, scale, q, backend=plan.backend("quantize_heads"))
    return Queries(values, scale, q.dtype)


def quantize_keys(
    kv_c: Tensor,  # [S, C], the latents of k and v
    k: Tensor,  # [S, H, P]
    k_pe: Tensor,  # [S, R], e4m3 if the cache's rows are
    v: Tensor,  # [S, H, V]
    key_start_loc: Tensor,  # [B+1]
    absorbed: AbsorbedWeights,
    plan: Plan,
    unit: Tensor | None,  # [] f32: kv_scale of rows that are still codes
) -> HeadKeys:
    """Return whole keys in e4m3, and unchanged values with their remaining scale."""
    S, H, P = k.shape
    requests = requests_of(key_start_loc, S)
    B = key_start_loc.shape[0] - 1
    scale = key_scale(kv_c, k_pe, requests, B, absorbed, H, P, plan.fixed_by)
    if plan.workspace is not None:
        keys = plan.workspace.keys[:S]
    else:
        keys = allocate_heads(S, H, P + k_pe.shape[1], k.device, keys_contiguous=False)
    backend = plan.backend("quantize_heads")
    quantize_heads(keys, None, k, k_pe, scale, requests, backend=backend)
    left = torch.ones_like(scale)
    if unit is not None:
        scale, left = scale * unit, left * unit
    return HeadKeys(keys, v, scale, left)


def requests_of(start_loc: Tensor, S: int) -> Tensor:  # [S] i64
    """Return the request of each of S rows; rows past the last request belong to it."""
    rows = torch.arange(S, dtype=start_loc.dtype, device=start_loc.device)
    return torch.bucketize(rows, start_loc[1:-1], right=True)


def key_scale(
    kv_c: Tensor, k_pe: Tensor, requests: Tensor, B: int, absorbed: AbsorbedWeights, H: int, P: int,
    fixed_by: str | None = None,
) -> Tensor:  # [B, H]  # fmt: skip
    """Return power-of-two scales that hold every key of a request and head. With `fixed_by` (from
    the plan) a row's norm is batch-invariant."""
    weights = absorbed.dense(kv_c.dtype).view(H, -1, kv_c.shape[1])[:, :P]
    rows = torch.linalg.vector_norm(weights, dim=2, dtype=torch.float32).amax(1)
    if fixed_by is None:
        longest = torch.linalg.vector_norm(kv_c, dim=1, dtype=torch.float32)
    else:
        wide = kv_c.float()
        longest = (mean_square(wide, fixed_by)[:, 0] * wide.shape[1]).sqrt()
    both = torch.stack([_finite(longest), _finite(k_pe.to(torch.float32)).amax(1)])
    most = both.new_zeros((2, B)).scatter_reduce_(1, requests.expand(2, -1), both, "amax")
    bound = torch.maximum(most[0][:, None] * rows, most[1][:, None])
    return power_of_two((bound * (MARGIN / FP8_MAX)).clamp_min(SMALLEST))


def _finite(values: Tensor) -> Tensor:
    """Return magnitudes, with 0 for values that are not finite."""
    return values.abs().nan_to_num(0.0, posinf=0.0)
