"""mha_ragged, reference: the literal formula, one request after another."""

from __future__ import annotations

import torch
from torch import Tensor

from openmla.backends import Problem
from openmla.backends.expanded import joined
from openmla.backends.reference._eight_bits import Scales, decoded, rounded_weights

LOGITS = 2**26  # logits held at once; more queries are processed in chunks


def why_not(problem: Problem) -> str | None:
    return None


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_start_loc: Tensor,
    key_start_loc: Tensor,
    k_pe: Tensor | None,
    *,
    scale: float,
    causal: bool,
    max_query_len: int,
    max_key_len: int,
    scales: Scales | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    q, k, v = decoded(q, joined(k, k_pe), v, key_start_loc, scales)
    T, H, _ = q.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    out = q.new_zeros((T, H, v.shape[2]), dtype=out_dtype)
    lse = q.new_full((T, H), -torch.inf, dtype=wide)
    query_bounds, key_bounds = query_start_loc.tolist(), key_start_loc.tolist()
    for b in range(len(query_bounds) - 1):
        keys = slice(key_bounds[b], key_bounds[b + 1])
        S = keys.stop - keys.start
        n = query_bounds[b + 1] - query_bounds[b]
        # causal is aligned at the end: with fewer keys than queries, the first n - S see none
        start = query_bounds[b] + (max(n - S, 0) if causal else 0)
        n = query_bounds[b + 1] - start
        if n == 0 or S == 0:
            continue
        # copies: a matmul's bits may depend on addresses, and so on the request's place
        wide_k, wide_v = k[keys].to(wide, copy=True), v[keys].to(wide, copy=True)
        positions = torch.arange(S, device=q.device)
        step = max(LOGITS // (H * S), 1)
        for i in range(0, n, step):
            chunk = slice(start + i, start + min(i + step, n))
            logits = scale * torch.einsum("qhe,khe->qhk", q[chunk].to(wide, copy=True), wide_k)
            if causal:
                last_key = positions[S - n :][i : i + step, None, None]
                logits.masked_fill_(positions > last_key, -torch.inf)
            lse[chunk] = logits.logsumexp(dim=-1)
            weights = logits.softmax(-1) if scales is None else rounded_weights(logits)
            out[chunk] = torch.einsum("qhk,khv->qhv", weights, wide_v).to(out.dtype)
    return out, lse
