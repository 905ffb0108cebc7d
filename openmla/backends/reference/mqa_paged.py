"""mqa_paged, reference: gather each request's rows, then the formula as it is written."""

from __future__ import annotations

import torch
from torch import Tensor

from openmla.backends import Problem
from openmla.cache.format import get_format


def why_not(problem: Problem) -> str | None:
    return None


def run(
    q_latent: Tensor,
    cache: Tensor,
    kv_scale: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    split_starts: Tensor,
    *,
    format: str,
    C: int,
    scale: float,
    causal: bool,
    max_query_len: int,
) -> tuple[Tensor, Tensor]:
    T, H, _ = q_latent.shape
    BS = cache.shape[1]
    wide = torch.promote_types(q_latent.dtype, torch.float32)
    out = q_latent.new_zeros((T, H, C))
    lse = q_latent.new_full((T, H), -torch.inf, dtype=wide)
    bounds = query_start_loc.tolist()
    for b, S in enumerate(seq_lens.tolist()):
        start, stop = bounds[b], bounds[b + 1]
        n = stop - start
        if n == 0 or S == 0:
            continue
        positions = torch.arange(S, device=cache.device)
        slots = block_table[b].long()[positions // BS] * BS + positions % BS
        rows = get_format(format).read(cache, slots, kv_scale, wide)  # [S, D]
        logits = scale * (q_latent[start:stop].to(wide) @ rows.T)  # [n, H, S]
        if causal:
            last_key = torch.arange(S - n, S, device=cache.device)
            logits.masked_fill_(positions > last_key[:, None, None], -torch.inf)
        lse[start:stop] = logits.logsumexp(dim=-1)
        weights = (logits - lse[start:stop, :, None]).exp()
        out[start:stop] = (weights @ rows[:, :C]).to(out.dtype)
    return out, lse
