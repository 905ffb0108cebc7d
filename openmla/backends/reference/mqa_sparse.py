"""mqa_sparse, reference: the rows of a few tokens at a time, both segments concatenated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from openmla.backends import Problem
from openmla.backends.reference._rows import look_up, row_requests
from openmla.backends.reference.mqa_paged import attend_alone, decoded_queries
from openmla.cache.format import get_format

ELEMENTS = 2**21  # elements of gathered rows held at once; more tokens are processed in chunks


def prefers_slots(problem: Problem) -> bool:
    """Decide as the Triton kernels do, so that plans are the same."""
    many = problem.tokens > 256 and not problem.run_length
    return many and problem.format != "fp8_ds_mla"


def why_not(problem: Problem) -> str | None:
    return None


def run(
    q_latent: Tensor,
    query_start_loc: Tensor,
    positions: Tensor,
    segments: Sequence[Any],
    sink: Tensor | None,
    *,
    C: int,
    scale: float,
    run_length: int,
    q_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    T, H, D = q_latent.shape
    q_latent, dtype = decoded_queries(q_latent, q_scale)
    wide = torch.promote_types(q_latent.dtype, torch.float32)
    out = q_latent.new_zeros((T, H, C), dtype=dtype)
    lse = q_latent.new_full((T, H), -torch.inf, dtype=wide)
    requests = row_requests(query_start_loc, T)
    B = query_start_loc.shape[0] - 1
    if run_length:  # batch-invariant: one token at a time
        for t in range(T):
            rows = named_rows(segments, slice(t, t + 1), positions, requests, B, D, wide)
            attended, lse[t] = attend_alone(q_latent[t].to(wide, copy=True), rows, scale, C)
            if sink is not None:
                attended *= kept_by(sink, lse[t])[:, None]
            out[t] = attended
        return out, lse
    width = sum(segment.width for segment in segments)
    step = max(ELEMENTS // max(width * max(D, H), 1), 1)
    for i in range(0, T, step):
        chunk = slice(i, min(i + step, T))
        parts, masks = [], []
        for segment in segments:
            slots = listed_slots(segment, chunk, positions[chunk], requests[chunk])
            slots = slots.masked_fill((requests[chunk] == B)[:, None], -1)
            valid = slots >= 0
            rows = get_format(segment.format).read(
                segment.cache, slots[valid], segment.kv_scale, wide, D
            )
            parts.append(rows.new_zeros((*slots.shape, D)).masked_scatter_(valid[..., None], rows))
            masks.append(valid)
        rows, valid = torch.cat(parts, 1), torch.cat(masks, 1)  # [n, width, D], [n, width]
        logits = scale * (q_latent[chunk].to(wide) @ rows.mT)  # [n, H, width]
        logits.masked_fill_(~valid[:, None], -torch.inf)
        row_lse = logits.logsumexp(-1)
        lse[chunk] = row_lse
        weights = logits.softmax(-1).masked_fill(~valid[:, None], 0)
        attended = weights @ rows[..., :C]
        if sink is not None:
            attended *= kept_by(sink, row_lse)[..., None]
        out[chunk] = attended.to(out.dtype)
    return out, lse


def kept_by(sink: Tensor, lse: Tensor) -> Tensor:
    """Return the factor by which a sink reduces outputs."""
    kept = (lse - sink.to(lse.dtype)).sigmoid()
    return kept.masked_fill(lse == -torch.inf, 0)


def named_rows(
    segments: Sequence[Any],
    token: slice,
    positions: Tensor,
    requests: Tensor,
    B: int,
    D: int,
    dtype: torch.dtype,
) -> Tensor:  # [n, D]
    """Return the rows of one token from all segments, without skipped entries."""
    parts = []
    for segment in segments:
        slots = listed_slots(segment, token, positions[token], requests[token])[0]
        slots = slots[slots >= 0] if int(requests[token]) < B else slots[:0]
        layout = get_format(segment.format)
        parts.append(layout.read(segment.cache, slots, segment.kv_scale, dtype, D))
    return torch.cat(parts)


def listed_slots(segment: Any, chunk: slice, positions: Tensor, requests: Tensor) -> Tensor:
    """Return the slots that a segment lists for some tokens, [n, width] i64; -1 for none."""
    N, BS, _ = segment.cache.shape
    table = segment.block_table
    width = segment.width
    columns = torch.arange(width, device=positions.device)
    if segment.kind in ("slots", "positions"):
        rows = segment.rows[chunk].long()
        rows = rows.where(columns < segment.row_lens[chunk, None], -1)
        if segment.kind == "slots":
            return rows.where(rows < N * BS, -1).clamp_min(-1)
        return look_up(rows, table, requests, BS, N)
    if segment.kind == "prefix":
        entries = columns.where(columns < (positions[:, None] + 1) // segment.span, -1)
        return look_up(entries, table, requests, BS, N)
    last = positions[:, None] - columns  # window, backwards from the token itself
    ring = table.shape[1] * BS
    return look_up((last % ring).where(last >= 0, -1), table, requests, BS, N)
