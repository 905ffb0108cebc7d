"""How tokens that choose their keys are scored in chunks, and how masked ones are cut."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from openmla.cache import LayerCache, PagedCache
from openmla.config import MLAConfig
from openmla.plan.batch import Batch
from openmla.plan.chunks import cut_at_fixed, cut_contexts
from openmla.plan.forms import choose_sparse_absorbed
from openmla.plan.problems import cache_kind, sparse_efficiencies
from openmla.plan.rows import (
    cumulative,
    integers,
    owners,
    pick,
    pick_rows,
    repeated,
    some,
    start_locs,
)
from openmla.plan.types import (
    MaskedChunk,
    MaskGroup,
    ScoreChunk,
    SparsePlan,
    latent_row,
    num_words,
)
from openmla.plan.upload import upload
from openmla.plan.workspace import LATENT_BYTES, LOGITS_BYTES, MASK_BYTES


def row_lens(query_lens: Sequence[int], seq_lens: Sequence[int], causal: bool = True) -> Tensor:
    """[n] i32: the keys each token may see, itself included; the last sees all, and without
    causality every one does."""
    if set(query_lens) == {1}:  # plain decode, at every step
        return integers(seq_lens)
    if not causal:
        return repeated(seq_lens, query_lens)
    stops = accumulate(query_lens)
    # the k-th of all tokens sees k + 1 keys and what its request has more than all up to it
    more = [S - stop for S, stop in zip(seq_lens, stops, strict=True)]
    lens = repeated(more, query_lens)
    return lens + torch.arange(1, lens.shape[0] + 1, dtype=torch.int32)


def score_chunks(lens: Sequence[int], query_bytes: int, least: int = 0) -> tuple[ScoreChunk, ...]:
    """Rows in order, as many at once as the bound on scores allows; lens is what each row sees.

    `least` is the least width of a chunk: one past K, and all of them are scored.
    `query_bytes` is what a row's queries take while they are quantised for a packed cache.
    """
    chunks: list[ScoreChunk] = []
    start, widest = 0, least
    for row, length in enumerate(lens):
        wider = max(widest, length)
        if row > start and (row + 1 - start) * (wider * 4 + query_bytes) > LOGITS_BYTES:
            chunks.append(ScoreChunk(slice(start, row), widest))
            start, wider = row, max(length, least)
        widest = wider
    if lens:
        chunks.append(ScoreChunk(slice(start, len(lens)), widest))
    return tuple(chunks)


def chunks_of(
    lens: Tensor, longest: int, query_bytes: int, least: int = 0
) -> tuple[ScoreChunk, ...]:
    """The same of rows on the host, whose longest is known: they are looked at one by one only
    where they do not fit at once."""
    num_rows, widest = lens.shape[0], max(longest, least)
    if num_rows and num_rows * (widest * 4 + query_bytes) <= LOGITS_BYTES:
        return (ScoreChunk(slice(0, num_rows), widest),)
    return score_chunks(lens.tolist(), query_bytes, least)


def even_chunks(num_rows: int, num_keys: int, query_bytes: int) -> tuple[ScoreChunk, ...]:
    """The same where every row may see `num_keys`."""
    step = max(LOGITS_BYTES // max(num_keys * 4 + query_bytes, 1), 1)
    firsts = range(0, num_rows, step)
    return tuple(ScoreChunk(slice(i, min(i + step, num_rows)), num_keys) for i in firsts)


def no_starts(chunks: Sequence[ScoreChunk], K: int) -> Tensor:
    """[n] i32 zeros, a row each of the longest chunk that is scored: its scores begin with the
    logits."""
    scored = (chunk.rows for chunk in chunks if chunk.num_keys > K)
    most = max((rows.stop - rows.start for rows in scored), default=0)
    return torch.zeros(most, dtype=torch.int32)


def first_keys(chunks: Sequence[ScoreChunk], K: int) -> Tensor:
    """[K] i32: what is chosen from no more than K keys; empty where every chunk sees more."""
    unscored = any(chunk.num_keys <= K for chunk in chunks)
    return torch.arange(K if unscored else 0, dtype=torch.int32)


def query_bytes(config: MLAConfig, index: PagedCache) -> int:
    """What quantising one row's index queries holds: three float32 copies and the fp8 one."""
    assert config.indexer is not None
    return 13 * config.indexer.num_heads * config.indexer.head_dim if index.layout.packed else 0


def query_chunks(num_rows: int, config: MLAConfig, itemsize: int) -> tuple[slice, ...]:
    """Rows that attend to chosen keys, as many at once as the bound on latent queries allows."""
    step = max(LATENT_BYTES // (latent_row(config) * itemsize), 1)
    step -= step % 4 if step > 4 else 0  # all chunks aligned as the first: no recompile
    return tuple(slice(i, min(i + step, num_rows)) for i in range(0, num_rows, step))


def masked_chunks(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    table: Tensor,
    *,
    first_row: int,
    BS: int,
    rows_at_once: int,
    fixed: bool = False,
) -> tuple[MaskedChunk, ...]:
    """All keys of some requests in chunks of rows_at_once; the queries of each by mask size.
    `fixed`: each request by itself."""
    bounds = list(accumulate(query_lens, initial=0))
    chunks = []
    if fixed:
        spans = cut_at_fixed(seq_lens, rows_at_once // BS * BS, 0)
    else:
        spans = cut_contexts(seq_lens, rows_at_once, BS)
    for span in spans:
        stop = span.first + len(span.lens)
        begin, end = bounds[span.first], bounds[stop]
        owned = query_lens[span.first : stop]
        key_starts, key_lens = repeated(span.starts, owned), repeated(span.lens, owned)
        step = max(MASK_BYTES // (4 * num_words(max(span.lens))), 1)
        n = end - begin
        cuts = [slice(row, min(row + step, n)) for row in range(0, n, step)]
        groups = []
        for rows, start_loc in zip(cuts, start_locs(cumulative(owned), cuts, n), strict=True):
            groups.append(
                MaskGroup(
                    rows=slice(first_row + begin + rows.start, first_row + begin + rows.stop),
                    query_start_loc=start_loc,
                    key_starts=key_starts[rows],
                    key_lens=key_lens[rows],
                )
            )
        chunks.append(
            MaskedChunk(
                block_table=table[span.first : stop],
                starts=integers(span.starts),
                key_start_loc=cumulative(span.lens),
                max_key_len=max(span.lens),
                num_keys=sum(span.lens),
                max_query_len=max(owned),
                groups=tuple(groups),
            )
        )
    return tuple(chunks)


def choosing_requests(batch: Batch, config: MLAConfig, *, everyone: bool = False) -> set[int]:
    """Requests with more keys than their tokens may attend to: an indexer chooses. `everyone`: all
    that have tokens."""
    if config.indexer is None:
        return set()
    least = -1 if everyone else config.indexer.topk
    if min(batch.seq_lens, default=0) > least and min(batch.query_lens, default=0) > 0:
        return set(range(len(batch.seq_lens)))  # plain decode far into a text, at every step
    lens = zip(batch.query_lens, batch.seq_lens, strict=True)
    return {b for b, (n, S) in enumerate(lens) if n > 0 and least < S}


def sparse_routes(
    batch: Batch,
    config: MLAConfig,
    latent: PagedCache,
    dtype: torch.dtype,
    form: str,
    choosing: set[int],
    asked: Sequence[str | None] = (None, None),
) -> tuple[list[int], list[int]]:
    """Those requests by route: rows gathered in latent space, or expanded and masked. `asked`: the
    query_dtype and prefill_dtype, which have kernels of their own."""
    if form != "expanded" and max(batch.query_lens, default=0) <= 1:  # decode, at every step
        return sorted(choosing), []
    absorbed: list[int] = []
    masked: list[int] = []
    bounded, efficiencies = batch.bounded, None
    for b in sorted(choosing):
        n, S = batch.query_lens[b], batch.seq_lens[b]
        if S == 0:  # of a part of the keys, nothing to expand
            gather = True
        elif form == "auto" and b not in bounded and n > 1:
            if efficiencies is None:
                queries, heads = (torch.float8_e4m3fn if each else dtype for each in asked)
                efficiencies = sparse_efficiencies(config, cache_kind([latent]), queries, heads)
            gather = choose_sparse_absorbed(
                config,
                n,
                S,
                format=latent.format,
                itemsize=dtype.itemsize,
                device=latent.data.device.type,
                efficiencies=efficiencies,
            )
        else:
            gather = form != "expanded"
        (absorbed if gather else masked).append(b)
    return absorbed, masked


def plan_sparse(
    batch: Batch,
    config: MLAConfig,
    cache: LayerCache,
    dtype: torch.dtype,
    routes: tuple[Sequence[int], Sequence[int]],
    starts: Sequence[int],
    rows_at_once: int,
    cuts: tuple[tuple[ScoreChunk, ...], tuple[slice, ...]] | None = None,
    uniform: bool = False,
    fixed: bool = False,
) -> SparsePlan:
    """Requests by route, absorbed and masked. `cuts` are a captured step's: how rows are scored,
    how absorbed ones attend. A `uniform` step scores all rows, also where they have no choice.
    `fixed`: masked requests are cut where no other has a say."""
    assert config.indexer is not None and cache.latent is not None
    held = 0 if cache.index is None else query_bytes(config, cache.index)
    absorbed, masked = routes
    requests, first = [*absorbed, *masked], len(absorbed)
    query_lens, seq_lens = some(batch.query_lens, requests), some(batch.seq_lens, requests)
    lens = row_lens(query_lens, seq_lens, batch.causal)
    table = pick(batch.block_table, requests)
    num_absorbed = sum(query_lens[:first])
    cut: tuple[MaskedChunk, ...] = ()
    if masked:
        cut = masked_chunks(
            query_lens[first:],
            seq_lens[first:],
            table[first:],
            first_row=num_absorbed,
            BS=cache.latent.block_size,
            rows_at_once=rows_at_once,
            fixed=fixed,
        )
    if cuts is None:
        scored: tuple[ScoreChunk, ...] = ()
        if cache.index is not None:  # else the caller chooses
            longest = max(some(batch.read_lens, requests), default=0)
            scored = chunks_of(lens, longest, held, config.indexer.topk + 1 if uniform else 0)
        cuts = scored, query_chunks(num_absorbed, config, dtype.itemsize)
    chunks, attending = cuts
    bounds, true_lens = cumulative(query_lens), true_row_lens(batch, requests, lens)
    attended = true_lens if not masked else true_lens[:num_absorbed]
    return SparsePlan(
        rows=pick_rows(requests, starts),
        block_table=table,
        row_starts=no_starts(chunks, config.indexer.topk),
        first_keys=first_keys(chunks, config.indexer.topk),
        row_lens=true_lens,
        topk_lens=attended.clamp(max=config.indexer.topk),
        positions=attended.long() - 1,
        score_start_locs=start_locs(bounds, [chunk.rows for chunk in chunks], lens.shape[0]),
        query_chunk_start_locs=start_locs(bounds, attending, lens.shape[0]),
        num_rows=lens.shape[0],
        num_absorbed=num_absorbed,
        chunks=chunks,
        query_bytes=held,
        query_chunks=attending,
        masked=cut,
    )


def true_row_lens(batch: Batch, requests: Sequence[int], lens: Tensor) -> Tensor:
    """What tokens see when only the device knows the lengths: as much less as the bound is high."""
    if batch.device_seq_lens is None:
        return lens
    true, query_lens = pick(batch.device_seq_lens, requests), some(batch.query_lens, requests)
    if set(query_lens) == {1}:
        return true.clamp_min(0)
    hidden = repeated(some(batch.seq_lens, requests), query_lens) - lens  # from each token
    mine, hidden = upload((owners(query_lens), hidden), true.device)
    return (true[mine] - hidden).clamp_min(0)
