"""Expanded queries and keys in e4m3: scales found on the device, heads quantised.

Keys have a scale per request and head: the next power of two that holds what a head's weights can
make of the request's longest latent (Cauchy-Schwarz) and its largest k_pe, so that nothing is cut
off and no key is looked at twice. It may be some 10 times what is there: e4m3 is floating point,
and rounds all but the smallest values alike. Queries have a scale per row and head. A latent that
is not finite has no say: what it makes is NaN or saturates by itself. Values stay in 16 bits.
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


class HeadKeys(NamedTuple):
    """Keys and values, and what they are multiplied by where keys are e4m3."""

    k: Tensor  # [S, H, E]
    v: Tensor  # [S, H, V]
    k_scale: Tensor | None  # [B, H]
    v_scale: Tensor | None


def queries_of(q: Tensor, plan: Plan) -> Queries:
    """As the plan wants them."""
    if plan.prefill_dtype is None:
        return Queries(q, None, q.dtype)
    T, H, E = q.shape
    values = allocate_heads(T, H, E, q.device, keys_contiguous=False)
    # rows 16 bytes apart: kernels are compiled for pointers so aligned, and chunks slice this one
    scale = torch.empty((T, -(-H // 4) * 4), dtype=torch.float32, device=q.device)[:, :H]
    quantize_heads(values, scale, q, backend=plan.backend("quantize_heads"))
    return Queries(values, scale, q.dtype)


def quantize_keys(
    kv_c: Tensor,  # [S, C], what k and v are made of
    k: Tensor,  # [S, H, P]
    k_pe: Tensor,  # [S, R], e4m3 itself where the cache's rows are
    v: Tensor,  # [S, H, V]
    key_start_loc: Tensor,  # [B+1]
    absorbed: AbsorbedWeights,
    plan: Plan,
    unit: Tensor | None,  # [] f32: kv_scale of rows that were not multiplied by it
) -> HeadKeys:
    """Whole keys in e4m3, and values as they are with the scale that is left to them."""
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
    """The request of each of S rows; rows past the last request are counted to it."""
    rows = torch.arange(S, dtype=start_loc.dtype, device=start_loc.device)
    return torch.bucketize(rows, start_loc[1:-1], right=True)


def key_scale(
    kv_c: Tensor, k_pe: Tensor, requests: Tensor, B: int, absorbed: AbsorbedWeights, H: int, P: int,
    fixed_by: str | None = None,
) -> Tensor:  # [B, H]  # fmt: skip
    """Powers of two that hold every key of a request and head. `fixed_by`: the plan's; a row's
    norm then does not depend on how many rows there are."""
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
    """Magnitudes, of those that are finite."""
    return values.abs().nan_to_num(0.0, posinf=0.0)
