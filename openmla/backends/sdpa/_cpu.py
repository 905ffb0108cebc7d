"""Ordinary attention on CPUs with torch's flash kernel, request by request and without masks.

If queries have context before them, the context and their own rows are two calls, merged by their
lse: a mask would be read for every head.

Arithmetic is in float32 at least: in 16 bits, torch's kernel approximates exp in a way that puts
lse outside the error budget. The rows of each head are contiguous: the kernel is 2 % slower with
rows of all heads interleaved, and a copy costs a tenth of that.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def attend(
    q: Tensor,  # [T, H, E]
    k: Tensor,  # [S, H, E], or the columns that are not in k_pe
    v: Tensor,  # [S, H, V]
    k_pe: Tensor | None,  # [S, R]
    query_bounds: list[int],
    key_bounds: list[int],
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor]:  # [T, H, V], [T, H]
    """Run mha_ragged with its start_locs as integers."""
    T, H, _ = q.shape
    last_query, last_key = query_bounds[-1], key_bounds[-1]
    if len(query_bounds) == 2 and last_query == T:  # one request without padding
        return _attend_request(q, *_rows(0, last_key, k, v, k_pe), scale, causal)
    out = q.new_empty((T, H, v.shape[2]))
    lse = q.new_empty((T, H), dtype=_wide(q))
    out[last_query:], lse[last_query:] = 0, -torch.inf
    spans = zip(pairwise(query_bounds), pairwise(key_bounds), strict=True)
    for (start, stop), (first, end) in spans:
        if start < stop:
            out[start:stop], lse[start:stop] = _attend_request(
                q[start:stop], *_rows(first, end, k, v, k_pe), scale, causal
            )
    return out, lse


def _rows(
    first: int, end: int, k: Tensor, v: Tensor, k_pe: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    if first == 0 and end == k.shape[0]:
        return k, v, k_pe
    return k[first:end], v[first:end], None if k_pe is None else k_pe[first:end]


def _attend_request(
    q: Tensor, k: Tensor, v: Tensor, k_pe: Tensor | None, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:  # [n, H, V], [n, H]
    (n, H, E), S, V = q.shape, k.shape[0], v.shape[2]  # E: query width; k may be narrower
    blind = max(n - S, 0) if causal or S == 0 else 0  # queries that see no key
    if blind:
        out = q.new_zeros((n, H, V))
        lse = q.new_full((n, H), -torch.inf, dtype=_wide(q))
        if blind < n:
            out[blind:], lse[blind:] = _attend_request(q[blind:], k, v, k_pe, scale, causal)
        return out, lse
    width, dtype = max(E, V), _wide(q)  # zero columns change neither products nor the sliced output
    q_heads, v_heads = (_heads_apart(part, None, width, dtype) for part in (q, v))
    k_heads = _heads_apart(k, k_pe, width, dtype)
    out, lse = _attend_heads(q_heads, k_heads, v_heads, scale, causal)
    out = out[0].transpose(0, 1)
    if width > V:
        out = out[:, :, :V]
    if out.dtype != q.dtype:
        out = out.to(q.dtype, memory_format=torch.contiguous_format)
    return out.contiguous(), lse[0].T.contiguous()


def _attend_heads(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:  # [1, H, n, E], rows of all heads interleaved; [1, H, n]
    """Attend with contiguous heads of equal width, where every query sees a key."""
    context = k.shape[2] - q.shape[2] if causal else 0
    if not context:
        out, lse = flash(q, k, v, 0.0, causal, scale=scale)
        return out, lse
    out, lse = flash(q, k[:, :, :context], v[:, :, :context], 0.0, False, scale=scale)
    own, own_lse = flash(q, k[:, :, context:], v[:, :, context:], 0.0, True, scale=scale)
    out.lerp_(own, torch.sigmoid(own_lse - lse)[..., None])
    return out, torch.logaddexp(lse, own_lse)


def _heads_apart(
    rows: Tensor, shared: Tensor | None, width: int, dtype: torch.dtype
) -> Tensor:  # [1, H, n, width]
    """Return rows [n, H, E], then the columns [n, R] shared by all heads, padded with zeros."""
    n, H, E = rows.shape
    heads = rows.transpose(0, 1)
    if width == E and rows.dtype == dtype:  # a copy: bits may depend on addresses
        return heads.clone(memory_format=torch.contiguous_format)[None]
    filled = rows.new_empty((1, H, n, width), dtype=dtype)
    filled[0, :, :, :E] = heads
    if shared is not None:
        filled[..., E : E + shared.shape[1]] = shared
        E += shared.shape[1]
    if width > E:
        filled[..., E:] = 0
    return filled


def _wide(q: Tensor) -> torch.dtype:
    return torch.promote_types(q.dtype, torch.float32)
