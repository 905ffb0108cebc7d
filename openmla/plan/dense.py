"""Requests that attend to all their keys: in absorbed form, or expanded chunk by chunk."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from openmla.plan.batch import Batch
from openmla.plan.chunks import cut_contexts
from openmla.plan.rows import cumulative, pick, pick_rows
from openmla.plan.types import ContextChunk, DecodePlan, PrefillPlan


def plan_decode(batch: Batch, requests: Sequence[int], starts: Sequence[int]) -> DecodePlan:
    """Arguments of mqa_paged for some of the requests; one without tokens reads no key."""
    query_lens = [batch.query_lens[b] for b in requests]
    if batch.device_seq_lens is None:
        lens = batch.read_lens
        seq_lens = torch.tensor([lens[b] for b in requests], dtype=torch.int32)
    else:
        seq_lens = pick(batch.device_seq_lens, requests)
        if 0 in query_lens:
            asking = torch.tensor(query_lens, device=seq_lens.device) > 0
            seq_lens = seq_lens.where(asking, 0)
    return DecodePlan(
        rows=pick_rows(requests, starts),
        block_table=pick(batch.block_table, requests),
        seq_lens=seq_lens,
        query_start_loc=cumulative(query_lens),
        max_query_len=max(query_lens, default=0),
    )


def plan_prefill(
    batch: Batch, requests: Sequence[int], starts: Sequence[int], BS: int, rows_at_once: int
) -> PrefillPlan:
    """Some of the requests with all their keys at once, or with their contexts in chunks."""
    query_lens = [batch.query_lens[b] for b in requests]
    seq_lens = [batch.seq_lens[b] for b in requests]
    contexts = [S - n if batch.causal else S for n, S in zip(query_lens, seq_lens, strict=True)]
    table = pick(batch.block_table, requests)
    query_start_loc = cumulative(query_lens)
    bounds = query_start_loc.tolist()

    def chunk(first: int, key_starts: Sequence[int], key_lens: Sequence[int]) -> ContextChunk:
        stop = first + len(key_lens)
        everyone = len(key_lens) == len(query_lens)
        return ContextChunk(
            rows=slice(bounds[first], bounds[stop]),
            query_start_loc=query_start_loc if everyone else cumulative(query_lens[first:stop]),
            block_table=table[first:stop],
            starts=torch.tensor(key_starts, dtype=torch.int32),
            key_start_loc=cumulative(key_lens),
            max_key_len=max(key_lens),
            num_keys=sum(key_lens),
            max_query_len=max(query_lens[first:stop]),
        )

    rows = pick_rows(requests, starts)
    longest = max(query_lens)
    if batch.causal and not any(contexts):
        return PrefillPlan(rows, "new", query_start_loc, longest)
    if batch.causal and sum(seq_lens) <= rows_at_once:
        one_shot = chunk(0, [0] * len(requests), seq_lens)
        ends = list(accumulate(seq_lens))
        new_rows = torch.cat(
            [torch.arange(end - n, end) for n, end in zip(query_lens, ends, strict=True)]
        )
        return PrefillPlan(rows, "one-shot", query_start_loc, longest, one_shot, new_rows)
    spans = cut_contexts(contexts, rows_at_once, BS)
    chunks = tuple(chunk(span.first, span.starts, span.lens) for span in spans)
    route = "chunked" if batch.causal else "context"
    return PrefillPlan(rows, route, query_start_loc, longest, chunks=chunks)
