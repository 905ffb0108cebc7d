"""mha_ragged, reference: one request after another, the formula as it is written."""

from __future__ import annotations

import torch
from torch import Tensor

from openmla.backends import Problem


def why_not(problem: Problem) -> str | None:
    return None


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_start_loc: Tensor,
    key_start_loc: Tensor,
    *,
    scale: float,
    causal: bool,
    max_query_len: int,
    max_key_len: int,
) -> tuple[Tensor, Tensor]:
    T, H, _ = q.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    out = q.new_zeros((T, H, v.shape[2]))
    lse = q.new_full((T, H), -torch.inf, dtype=wide)
    query_bounds, key_bounds = query_start_loc.tolist(), key_start_loc.tolist()
    for b in range(len(query_bounds) - 1):
        keys = slice(key_bounds[b], key_bounds[b + 1])
        S = keys.stop - keys.start
        n = query_bounds[b + 1] - query_bounds[b]
        # aligned at the end, so with fewer keys than queries the first n - S queries see none
        blind = max(n - S, 0) if causal else 0
        rows = slice(query_bounds[b] + blind, query_bounds[b + 1])
        n -= blind
        if n == 0 or S == 0:
            continue
        logits = scale * torch.einsum("qhe,khe->qhk", q[rows].to(wide), k[keys].to(wide))
        if causal:
            positions = torch.arange(S, device=q.device)
            logits.masked_fill_(positions > positions[S - n :, None, None], -torch.inf)
        lse[rows] = logits.logsumexp(dim=-1)
        weights = (logits - lse[rows][:, :, None]).exp()
        out[rows] = torch.einsum("qhk,khv->qhv", weights, v[keys].to(wide)).to(out.dtype)
    return out, lse
