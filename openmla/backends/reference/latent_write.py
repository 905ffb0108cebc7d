"""latent_write, reference: norm, RoPE and cache write in sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from openmla.backends import Problem
from openmla.backends.reference import cache_write, rope


def why_not(problem: Problem) -> str | None:
    return None


def run(
    cache: Tensor,
    q: Tensor,
    kv: Tensor,
    norm_weight: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    kv_scale: Tensor,
    table: Tensor | None,
    rope_ratio: Tensor | None,
    clamped: Tensor | None,
    *,
    format: str,
    pairing: str,
    eps: float,
    factor: float,
    norm_queries: bool,
) -> None:
    n, C = slot_mapping.shape[0], norm_weight.shape[0]
    q, kv = q[:n], kv[:n]
    wide = torch.promote_types(kv.dtype, torch.float32)
    normed = (norm_weight.to(wide) * _normed(kv[:, :C], eps).to(wide)).to(kv.dtype)
    kv[:, :C] = normed * factor if factor != 1 else normed
    if norm_queries:
        q.copy_(_normed(q, eps))
    if table is not None:
        R = table.shape[1]
        for turned in (q[:, :, q.shape[2] - R :], kv[:, None, kv.shape[1] - R :]):
            rope.run(turned, positions, table, pairing=pairing, inverse=False)
    latent, k_pe = kv[:, :C], kv[:, C:]
    cache_write.run(cache, latent, k_pe, slot_mapping, kv_scale, rope_ratio, clamped, format=format)


def _normed(x: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension without a weight, rounded to x's dtype."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
