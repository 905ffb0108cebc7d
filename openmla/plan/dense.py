"""Requests that attend to all their keys: in absorbed form, or expanded chunk by chunk."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, zip_longest

import torch

from openmla.plan.batch import Batch
from openmla.plan.chunks import cut_at_fixed, cut_contexts
from openmla.plan.rows import cumulative, integers, pick, pick_rows, repeated, some
from openmla.plan.types import ContextChunk, DecodePlan, PrefillPlan, remade
from openmla.plan.upload import upload


def plan_decode(batch: Batch, requests: Sequence[int], starts: Sequence[int]) -> DecodePlan:
    """Arguments of mqa_paged for some of the requests; one without tokens reads no key."""
    query_lens = some(batch.query_lens, requests)
    if batch.device_seq_lens is None:
        seq_lens = integers(some(batch.read_lens, requests))
    else:
        seq_lens = pick(batch.device_seq_lens, requests)
        if 0 in query_lens:  # others' lengths are no longer than was said
            (most,) = upload((integers(some(batch.read_lens, requests)),), seq_lens.device)
            seq_lens = seq_lens.minimum(most)
    return DecodePlan(
        rows=pick_rows(requests, starts),
        block_table=pick(batch.block_table, requests),
        seq_lens=seq_lens,
        query_start_loc=cumulative(query_lens),
        max_query_len=max(query_lens, default=0),
    )


def plan_prefill(
    batch: Batch,
    requests: Sequence[int],
    starts: Sequence[int],
    BS: int,
    rows_at_once: int,
    *,
    quantized: bool = False,
    fixed: bool = False,
    apart: bool = False,
) -> PrefillPlan:
    """Some of the requests with all their keys at once, or with their contexts in chunks. Where
    outputs are `quantized`, chunks know which rows they end; elsewhere that would only be more for
    a compiled step to be guarded by. `fixed`: new rows and context are always apart, and contexts
    cut where no other request has a say. `apart`: always apart, for their rows are not of one
    type."""
    query_lens, seq_lens = some(batch.query_lens, requests), some(batch.seq_lens, requests)
    contexts = [S - n if batch.causal else S for n, S in zip(query_lens, seq_lens, strict=True)]
    bounds = list(accumulate(query_lens, initial=0))
    query_start_loc = integers(bounds)

    def chunk(first: int, key_starts: Sequence[int], key_lens: Sequence[int]) -> ContextChunk:
        stop = first + len(key_lens)
        everyone = len(key_lens) == len(query_lens)
        return ContextChunk(
            rows=slice(bounds[first], bounds[stop]),
            query_start_loc=query_start_loc if everyone else cumulative(query_lens[first:stop]),
            block_table=table if everyone else table[first:stop],
            starts=integers(key_starts),
            key_start_loc=cumulative(key_lens),
            max_key_len=max(key_lens),
            num_keys=sum(key_lens),
            max_query_len=max(query_lens[first:stop]),
        )

    rows = pick_rows(requests, starts)
    longest = max(query_lens)
    if batch.causal and not any(contexts):
        return PrefillPlan(rows, "new", query_start_loc, longest)
    table = pick(batch.block_table, requests)
    if batch.causal and sum(seq_lens) <= rows_at_once and not (fixed or apart):
        one_shot = chunk(0, [0] * len(requests), seq_lens)
        ends = list(accumulate(seq_lens))
        # the k-th new row stands behind all contexts up to its own
        before = [end - bound for end, bound in zip(ends, bounds[1:], strict=True)]
        new_rows = repeated(before, query_lens, torch.int64) + torch.arange(bounds[-1])
        return PrefillPlan(rows, "one-shot", query_start_loc, longest, one_shot, new_rows)
    if fixed:
        spans = cut_at_fixed(contexts, rows_at_once // BS * BS, rows_at_once)
    else:
        spans = cut_contexts(contexts, rows_at_once, BS)
    chunks = tuple(chunk(span.first, span.starts, span.lens) for span in spans)
    route = "chunked" if batch.causal else "context"
    if not quantized:
        return PrefillPlan(rows, route, query_start_loc, longest, chunks=chunks)
    chunks = _ended(chunks)
    alone = _between([(each.rows.start, each.rows.stop) for each in chunks], bounds[-1])
    return PrefillPlan(rows, route, query_start_loc, longest, chunks=chunks, alone=alone)


def _ended(chunks: Sequence[ContextChunk]) -> tuple[ContextChunk, ...]:
    """Chunks that know which of their rows they end. Rows go on in the next chunk only, whose
    first request may be this one's last."""
    known = []
    for chunk, after in zip_longest(chunks, chunks[1:]):
        first, stop = chunk.rows.start, chunk.rows.stop
        end = stop if after is None else min(max(after.rows.start, first), stop)
        ended = slice(first, end) if end > first else None
        continued = slice(end, stop) if end < stop else None
        known.append(remade(chunk, {"ended": ended, "continued": continued}))
    return tuple(known)


def _between(spans: Sequence[tuple[int, int]], total: int) -> tuple[slice, ...]:
    """What spans that begin in order leave of 0 .. total."""
    found, end = [], 0
    for start, stop in (*spans, (total, total)):
        if start > end:
            found.append(slice(end, start))
        end = max(end, stop)
    return tuple(found)
