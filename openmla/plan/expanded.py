"""Expanded groups: contexts in chunks that fit the workspace, and masked requests."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, zip_longest

import torch

from openmla.plan.batch import Batch
from openmla.plan.chunks import cut_at_fixed, cut_contexts
from openmla.plan.rows import cumulative, integers, pick, pick_rows, repeated, some, start_locs
from openmla.plan.types import Ask, Expanded, Group, KeyChunk, num_words, remade
from openmla.plan.workspace import MASK_BYTES


def expanded_group(
    batch: Batch,
    requests: Sequence[int],
    starts: Sequence[int],
    BS: int,
    rows_at_once: int,
    *,
    quantized: bool = False,
    fixed: bool = False,
    apart: bool = False,
) -> Group:
    """A group of requests with all their keys at once, or with their contexts in chunks.

    With `quantized` outputs, chunks record which rows they finish; without, that would only add
    guards to a compiled step. `fixed` always separates new rows from context and cuts each context
    independently of other requests. `apart` always separates them because their dtypes differ."""
    query_lens, seq_lens = some(batch.query_lens, requests), some(batch.seq_lens, requests)
    contexts = [S - n if batch.causal else S for n, S in zip(query_lens, seq_lens, strict=True)]
    bounds = list(accumulate(query_lens, initial=0))
    query_start_loc = integers(bounds)
    everyone = Ask(slice(0, bounds[-1]), query_start_loc, max(query_lens))
    rows = pick_rows(requests, starts)

    def chunk(first: int, key_starts: Sequence[int], key_lens: Sequence[int]) -> KeyChunk:
        stop, ask = first + len(key_lens), everyone
        if len(key_lens) < len(query_lens):
            mine = query_lens[first:stop]
            ask = Ask(slice(bounds[first], bounds[stop]), cumulative(mine), max(mine))
        return KeyChunk(
            block_table=table if ask is everyone else table[first:stop],
            starts=integers(key_starts),
            key_start_loc=cumulative(key_lens),
            max_key_len=max(key_lens),
            num_keys=sum(key_lens),
            asks=(ask,),
        )

    def group(route: str, **parts: object) -> Group:
        new = everyone if route in ("new", "chunked") else None
        return Group("expanded", rows, Expanded(route, new, **parts), requests=requests)  # type: ignore[arg-type]

    if batch.causal and not any(contexts):
        return group("new")
    table = pick(batch.block_table, requests)
    if batch.causal and sum(seq_lens) <= rows_at_once and not (fixed or apart):
        ends = list(accumulate(seq_lens))
        # the k-th new row follows all contexts up to its own
        before = [end - bound for end, bound in zip(ends, bounds[1:], strict=True)]
        new_rows = repeated(before, query_lens, torch.int64) + torch.arange(bounds[-1])
        whole = chunk(0, [0] * len(requests), seq_lens)
        return group("one-shot", chunks=(whole,), new_rows=new_rows)
    if fixed:
        spans = cut_at_fixed(contexts, rows_at_once // BS * BS, rows_at_once)
    else:
        spans = cut_contexts(contexts, rows_at_once, BS)
    chunks = tuple(chunk(span.first, span.starts, span.lens) for span in spans)
    route = "chunked" if batch.causal else "context"
    if not quantized:
        return group(route, chunks=chunks)
    alone = _between([chunk.asks[0].rows for chunk in chunks], bounds[-1])
    return group(route, chunks=_ended(chunks), alone=alone)


def _ended(chunks: Sequence[KeyChunk]) -> tuple[KeyChunk, ...]:
    """Chunks with the rows that they finish. Rows continue in the next chunk only, whose first
    request may be the last of this one."""
    known = []
    for chunk, after in zip_longest(chunks, chunks[1:]):
        rows = chunk.asks[0].rows
        end = rows.stop
        if after is not None:
            end = min(max(after.asks[0].rows.start, rows.start), rows.stop)
        ended = slice(rows.start, end) if end > rows.start else None
        continued = slice(end, rows.stop) if end < rows.stop else None
        known.append(remade(chunk, {"ended": ended, "continued": continued}))
    return tuple(known)


def _between(spans: Sequence[slice], total: int) -> tuple[slice, ...]:
    """The parts of 0 .. total that sorted spans do not cover."""
    found, end = [], 0
    for span in (*spans, slice(total, total)):
        if span.start > end:
            found.append(slice(end, span.start))
        end = max(end, span.stop)
    return tuple(found)


def masked_group(
    batch: Batch,
    requests: Sequence[int],
    starts: Sequence[int],
    BS: int,
    rows_at_once: int,
    *,
    first: int,  # index of its tokens among all that select
    fixed: bool = False,
) -> Group:
    """Expanded requests whose tokens select keys: all keys in chunks of rows_at_once, and queries
    in calls that bound the size of the mask. `fixed` handles each request separately."""
    query_lens, seq_lens = some(batch.query_lens, requests), some(batch.seq_lens, requests)
    table = pick(batch.block_table, requests)
    bounds = list(accumulate(query_lens, initial=0))
    if fixed:
        spans = cut_at_fixed(seq_lens, rows_at_once // BS * BS, 0)
    else:
        spans = cut_contexts(seq_lens, rows_at_once, BS)
    chunks = []
    for span in spans:
        stop = span.first + len(span.lens)
        begin, n = bounds[span.first], bounds[stop] - bounds[span.first]
        owned = query_lens[span.first : stop]
        key_starts, key_lens = repeated(span.starts, owned), repeated(span.lens, owned)
        step = max(MASK_BYTES // (4 * num_words(max(span.lens))), 1)
        cuts = [slice(row, min(row + step, n)) for row in range(0, n, step)]
        locs = start_locs(cumulative(owned), cuts, n)
        asks = tuple(
            Ask(
                slice(begin + rows.start, begin + rows.stop),
                start_loc,
                max(owned),
                key_starts[rows],
                key_lens[rows],
            )
            for rows, start_loc in zip(cuts, locs, strict=True)
        )
        chunks.append(
            KeyChunk(
                block_table=table[span.first : stop],
                starts=integers(span.starts),
                key_start_loc=cumulative(span.lens),
                max_key_len=max(span.lens),
                num_keys=sum(span.lens),
                asks=asks,
            )
        )
    part = Expanded("masked", chunks=tuple(chunks))
    rows, selected = pick_rows(requests, starts), slice(first, first + bounds[-1])
    return Group("masked", rows, part, selected, requests=requests)
