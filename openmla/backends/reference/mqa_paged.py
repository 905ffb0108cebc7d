"""mqa_paged, reference: gather each request's rows, then apply the literal formula."""

from __future__ import annotations

import torch
from torch import Tensor

from openmla.backends import Problem
from openmla.cache.format import get_format

LOGITS = 2**26  # logits held at once; more queries are processed in chunks


def why_not(problem: Problem) -> str | None:
    return None


def run(
    q_latent: Tensor,
    cache: Tensor,
    kv_scale: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    *,
    format: str,
    C: int,
    scale: float,
    causal: bool,
    max_query_len: int,
    run_length: int,
    q_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    T, H, D = q_latent.shape
    BS = cache.shape[1]
    q_latent, dtype = decoded_queries(q_latent, q_scale)
    wide = torch.promote_types(q_latent.dtype, torch.float32)
    out = q_latent.new_zeros((T, H, C), dtype=dtype)
    lse = q_latent.new_full((T, H), -torch.inf, dtype=wide)
    bounds = query_start_loc.tolist()
    for b, S in enumerate(seq_lens.tolist()):
        start, stop = bounds[b], bounds[b + 1]
        n = stop - start
        if n == 0 or S == 0:
            continue
        positions = torch.arange(S, device=cache.device)
        slots = block_table[b].long()[positions // BS] * BS + positions % BS
        rows = get_format(format).read(cache, slots, kv_scale, wide, D)  # [S, D]
        if run_length:  # batch-invariant: one query at a time, over the keys it sees
            for t in range(start, stop):
                seen = rows[: S - stop + 1 + t] if causal else rows
                out[t], lse[t] = attend_alone(q_latent[t].to(wide, copy=True), seen, scale, C)
            continue
        step = max(LOGITS // (H * S), 1)
        for i in range(0, n, step):
            chunk = slice(start + i, start + min(i + step, n))
            logits = scale * (q_latent[chunk].to(wide) @ rows.T)  # [step, H, S]
            if causal:
                last_key = positions[S - n :][i : i + step, None, None]
                logits.masked_fill_(positions > last_key, -torch.inf)
            lse[chunk] = logits.logsumexp(dim=-1)
            out[chunk] = (logits.softmax(-1) @ rows[:, :C]).to(out.dtype)
    return out, lse


def decoded_queries(q: Tensor, q_scale: Tensor | None) -> tuple[Tensor, torch.dtype]:
    """Return queries, multiplied by their scale if they are e4m3, and the dtype of outputs."""
    if q_scale is None:
        return q, q.dtype
    return q.to(torch.float32) * (q_scale[..., None] if q_scale.dim() else q_scale), torch.bfloat16


def attend_alone(
    q: Tensor,  # [H, D]
    rows: Tensor,  # [n, D]
    scale: float,
    C: int,
) -> tuple[Tensor, Tensor]:  # [H, C], [H]
    """Attend with one query over its rows, in matmuls whose shapes depend on nothing else."""
    if rows.shape[0] == 0:
        return q.new_zeros((q.shape[0], C)), q.new_full((q.shape[0],), -torch.inf)
    logits = scale * (q @ rows.T)
    return logits.softmax(-1) @ rows[:, :C], logits.logsumexp(-1)
