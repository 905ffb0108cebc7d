"""V4's plans over ranks: entries that are chosen go to one rank each, all else is on every rank.

Of a request's blocks of BS tokens, every W-th has its entries of ratio 4, and their indexer keys,
on this rank. r divides BS, so a rank's entries keep their order, and what a token sees of them is a
prefix. Windows, compressor states and entries of ratio 128 do not grow, or hardly: every rank has
them whole, in blocks of BS * W tokens, so that one table serves all layers
(docs/context-parallel-v4.md).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from openmla.backends import bucketed
from openmla.backends.asked import Asked
from openmla.cache import LayerCache, allocate_cache
from openmla.config import INDEXED_RATIO, MLAConfig
from openmla.errors import ConfigError, check_kind
from openmla.parallel.gathered_entries import (
    GatheredEntries,
    brought_blocks,
    brought_counts,
    gather_shapes,
    gathered_table,
    gathering_entries_is_cheaper,
    page_bytes,
)
from openmla.parallel.layout import Shard
from openmla.parallel.ranks import Ranks, with_all_heads
from openmla.parallel.types import RankPart, RankPlan
from openmla.parallel.workspace import power_of_two
from openmla.plan import (
    Batch,
    CompressedPlan,
    Plan,
    ScoreChunk,
    make_plan,
    plan_buffers,
)
from openmla.plan.captured import captured_score_chunks, captured_step, check_buffers, fill
from openmla.plan.compressed import choose
from openmla.plan.compressed_checks import check_batch
from openmla.plan.problems import cache_kind, frozen
from openmla.plan.rows import cumulative, integers, padded, start_locs
from openmla.plan.sparse import chunks_of, first_keys, no_starts, query_bytes, row_lens
from openmla.plan.upload import upload

WRITES = "writes."


def rank_cache(
    config: MLAConfig,
    ranks: Ranks,
    *,
    num_blocks: int,
    block_size: int,
    layer: int = 0,
    **options: Any,
) -> LayerCache:
    """allocate_cache() of a layer's share: each of num_blocks blocks has block_size tokens on every
    rank, or, of V4's layers that every rank has whole, all of their block_size * W."""
    check_kind("parallel", "config", config, MLAConfig)
    check_kind("parallel", "ranks", ranks, Ranks)
    compressor = config.compressor
    if compressor is not None and compressor.ratio(layer) != INDEXED_RATIO:
        block_size *= ranks.shard.size
    sizes: dict[str, Any] = {"num_blocks": num_blocks, "block_size": block_size, "layer": layer}
    return allocate_cache(config, **sizes, **options)


def plan_compressed_over_ranks(
    batch: Batch,
    config: MLAConfig,
    cache: LayerCache,
    ranks: Ranks,
    context: str,
    given: dict[str, Any],  # what make_plan takes
) -> RankPlan:
    """A step of V4's layers of one ratio; of whole ones, that of one process."""
    into = given["into"]
    if into is not None:
        check_buffers("parallel", "into", into)
    if cache.ratio != INDEXED_RATIO:
        plan = make_plan(batch, config, cache, **given)
        return RankPlan(config, ranks, plan.num_tokens, plan)
    window, entries = cache.window, cache.compressed
    if window is None or entries is None or cache.index is None or cache.state is None:
        make_plan(batch, config, cache, **given)  # says what is missing
        raise AssertionError("a cache of ratio 4 has all of these")
    _check_interleave(config, ranks, entries.block_size * INDEXED_RATIO)
    check_batch(batch, config, cache, window, again=True, ranks=ranks.shard.size)
    writes = replace(batch, block_table=written_table(batch.block_table, ranks.shard))
    if into is not None:
        given = given | {"into": _of_writes(into)}
    near = make_plan(writes, config, _window_alone(cache), **given)
    if _gathers(batch, config, cache, ranks, context, near, into):
        return _gathered(batch, config, cache, ranks, near, given["backend"])
    return _in_place(batch, config, cache, ranks, near, into, given["backend"])


def _check_interleave(config: MLAConfig, ranks: Ranks, BS: int) -> None:
    if ranks.interleave not in (1, BS):
        raise ConfigError(
            f"parallel: interleave must be 1 or the block size of {BS} for {config.model_type}, "
            f"whose entries stay with their block, got {ranks.interleave}."
        )


def _gathers(
    batch: Batch,
    config: MLAConfig,
    cache: LayerCache,
    ranks: Ranks,
    context: str,
    near: Plan,
    into: dict[str, Tensor] | None,
) -> bool:
    if into is not None:
        if context == "gather":
            raise ConfigError("parallel: context must be auto or place with into=, got 'gather'.")
        return False
    if not any(S >= INDEXED_RATIO for S in batch.read_lens):  # nobody sees an entry
        return False
    if context != "auto":
        return context == "gather"
    dtype = near.problem("cache_write").dtype
    return gathering_entries_is_cheaper(batch, config, cache, ranks, dtype)


def _gathered(
    batch: Batch, config: MLAConfig, cache: LayerCache, ranks: Ranks, near: Plan, backend: Asked
) -> RankPlan:
    """Every rank puts everyone's blocks together, and plans as one process does."""
    size, step = ranks.shard.size, near.compressed
    assert step is not None and cache.compressed is not None and config.indexer is not None
    counts = brought_counts(batch, cache, size)
    most = max(batch.read_lens, default=0) // INDEXED_RATIO
    chunks = () if most <= config.indexer.topk else None
    together = replace(batch, block_table=gathered_table(counts, size))
    seen = _entries_here(together, config, cache, Shard(), step, chunks)
    seen = upload(replace(seen, positions=step.positions), cache.compressed.data.device)
    blocks = brought_blocks(batch.block_table, counts)
    (blocks,) = upload((blocks,), cache.compressed.data.device)
    plan = _attending(near, config, seen, cache, backend)
    held = size * sum(counts) * sum(page_bytes(config, cache))
    shapes = gather_shapes(power_of_two(sum(counts)), config, cache, size)
    ranks.workspace.reserve(blocks.device, torch.uint8, *shapes)
    mine = _attending(near, config, replace(step, ratio=INDEXED_RATIO), cache, backend)
    gathered = GatheredEntries(plan, blocks, held)
    return RankPlan(config, ranks, near.num_tokens, mine, entries=gathered)


def _in_place(
    batch: Batch,
    config: MLAConfig,
    cache: LayerCache,
    ranks: Ranks,
    near: Plan,
    into: dict[str, Tensor] | None,
    backend: Asked,
) -> RankPlan:
    """Own entries, with everyone's heads."""
    entries, indexer, step, shard = cache.compressed, config.indexer, near.compressed, ranks.shard
    assert entries is not None and indexer is not None and step is not None
    own = replace(shard, interleave=entries.block_size)
    most = max(batch.read_lens, default=0) // INDEXED_RATIO
    chunks: tuple[ScoreChunk, ...] | None = None
    if into is not None:
        chunks = captured_score_chunks(config, cache, into)
        most = into["block_table"].shape[1] * entries.block_size * shard.size
    elif most <= indexer.topk:
        chunks = ()
    held = _entries_here(batch, config, cache, own, step, chunks)
    if into is None:
        held = upload(held, entries.data.device)
    else:
        held, values = captured_step(batch, cache, held, near.slot_mapping, into)
        fill(into, values)
    plan = _attending(near, config, replace(step, ratio=INDEXED_RATIO), cache, backend)
    attending = _attending(near, with_all_heads(config, ranks), held, cache, backend)
    attending = replace(attending, block_size=entries.block_size)
    part, T = RankPart(slice(0, near.num_tokens), attending), near.num_tokens
    if not held.chunks:
        return RankPlan(config, ranks, T, plan, absorbed=part)
    offered = min(indexer.topk, own.most_local(most))
    return RankPlan(config, ranks, T, plan, chosen=part, candidates=offered)


def _attending(
    near: Plan, config: MLAConfig, step: CompressedPlan, cache: LayerCache, backend: Asked
) -> Plan:
    """The plan of another step over the same tokens, and who runs its ops."""
    assert cache.window is not None and cache.compressed is not None
    kind = cache_kind([cache.window, cache.compressed], cache.index)
    dtype, tokens = near.problem("cache_write").dtype, bucketed(near.num_tokens)
    choice = choose(config, kind, dtype, bool(step.chunks), tokens, 0, frozen(backend))
    return replace(
        near,
        config=config,
        compressed=step,
        backends=dict(choice.backends),
        requested=dict(choice.requested),
        problems=choice.problems,
    )


def compressed_buffers(
    config: MLAConfig, cache: LayerCache, ranks: Ranks, **sizes: Any
) -> dict[str, Tensor]:
    """plan_buffers() of a layer: of entries that are a rank's own, and beside them, by names that
    begin with WRITES, of what is written."""
    buffers = plan_buffers(config, cache, **sizes)
    if cache.ratio != INDEXED_RATIO:
        return buffers
    sizes["max_blocks"] *= ranks.shard.size
    others = plan_buffers(config, _window_alone(cache), **sizes)
    return buffers | {f"{WRITES}{name}": tensor for name, tensor in others.items()}


def _of_writes(buffers: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        name.removeprefix(WRITES): tensor
        for name, tensor in buffers.items()
        if name.startswith(WRITES)
    }


def _window_alone(cache: LayerCache) -> LayerCache:
    return LayerCache(window=cache.window, geometry=cache.geometry)


def written_table(table: Tensor, shard: Shard) -> Tensor:  # [B, M * W] i32
    """A column for every block of BS tokens: this rank's, and -1 for what others hold."""
    columns = torch.arange(table.shape[1] * shard.size, device=table.device)
    wide = table.repeat_interleave(shard.size, dim=1)
    return wide.masked_fill(columns % shard.size != shard.rank, -1)


def _entries_here(
    batch: Batch,
    config: MLAConfig,
    cache: LayerCache,
    shard: Shard,  # of entries
    step: CompressedPlan,
    chunks: tuple[ScoreChunk, ...] | None,  # in which entries are scored; None: found here
) -> CompressedPlan:
    """What tokens see of this rank's entries, by their numbers here: all, or those chosen.

    The positions are those of tokens that would see as many entries of one rank.
    """
    assert config.indexer is not None and cache.index is not None
    K, T = config.indexer.topk, batch.num_tokens
    seen = row_lens(batch.query_lens, batch.seq_lens) // INDEXED_RATIO
    here = padded(shard.local_counts(seen), batch.padding)
    longest = int(here.max()) if T else 0
    held, nothing = query_bytes(config, cache.index), integers(())
    if chunks is None:
        chunks = chunks_of(here, longest, held)
    bounds = cumulative(batch.query_lens)
    return replace(
        step,
        ratio=INDEXED_RATIO,
        positions=here.long() * INDEXED_RATIO - 1,
        block_table=batch.block_table,
        row_starts=no_starts(chunks, K) if chunks else nothing,
        first_keys=first_keys(chunks, K) if chunks else nothing,
        row_lens=here if chunks else nothing,
        topk_lens=here.clamp(max=K) if chunks else nothing,
        score_start_locs=start_locs(bounds, [chunk.rows for chunk in chunks], T) if chunks else (),
        num_rows=T,
        max_entries=longest,
        chunks=chunks,
        query_bytes=held if chunks else 0,
    )
