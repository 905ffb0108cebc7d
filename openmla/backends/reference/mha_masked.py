"""mha_masked, reference: one request after another, in chunks of queries with unpacked bits."""

from __future__ import annotations

import torch
from torch import Tensor

from openmla.backends import Problem
from openmla.backends.reference._eight_bits import Scales, decoded, rounded_weights

LOGITS = 2**22  # logits held at once


def why_not(problem: Problem) -> str | None:
    return None


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_start_loc: Tensor,
    key_start_loc: Tensor,
    mask: Tensor,
    *,
    scale: float,
    max_query_len: int,
    max_key_len: int,
    scales: Scales | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    q, k, v = decoded(q, k, v, key_start_loc, scales)
    T, H, _ = q.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    out = q.new_zeros((T, H, v.shape[2]), dtype=out_dtype)
    lse = q.new_full((T, H), -torch.inf, dtype=wide)
    query_bounds, key_bounds = query_start_loc.tolist(), key_start_loc.tolist()
    for b in range(len(query_bounds) - 1):
        start, stop = query_bounds[b], query_bounds[b + 1]
        keys = slice(key_bounds[b], key_bounds[b + 1])
        S = keys.stop - keys.start
        if S == 0 or start == stop:
            continue
        # copies: a matmul's bits may depend on addresses, and so on the request's place
        wide_k, wide_v = k[keys].to(wide, copy=True), v[keys].to(wide, copy=True)
        step = max(LOGITS // (H * S), 1)
        for i in range(start, stop, step):
            chunk = slice(i, min(i + step, stop))
            hidden = ~spread_bits(mask[chunk], S)[:, None]  # [n, 1, S]
            logits = scale * torch.einsum("qhe,khe->qhk", q[chunk].to(wide, copy=True), wide_k)
            logits.masked_fill_(hidden, -torch.inf)
            lse[chunk] = logits.logsumexp(-1)
            weights = logits.softmax(-1) if scales is None else rounded_weights(logits)
            weights = weights.masked_fill(hidden, 0)
            out[chunk] = torch.einsum("qhk,khv->qhv", weights, wide_v).to(out.dtype)
    return out, lse


def spread_bits(mask: Tensor, S: int) -> Tensor:
    """Unpack mask words [n, words] i32 to [n, S] bool."""
    places = torch.arange(32, dtype=torch.int32, device=mask.device)
    words = mask[:, : -(-S // 32), None]
    return ((words >> places) & 1).flatten(1)[:, :S].bool()
