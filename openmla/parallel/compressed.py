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
from openmla.cache import LayerCache, allocate_cache
from openmla.config import INDEXED_RATIO, MLAConfig
from openmla.errors import ConfigError, check_kind
from openmla.parallel.layout import Shard
from openmla.parallel.ranks import Ranks, with_all_heads
from openmla.parallel.types import RankPart, RankPlan
from openmla.plan import (
    Batch,
    CompressedPlan,
    ScoreChunk,
    Workspace,
    make_plan,
    plan_buffers,
)
from openmla.plan.captured import captured_score_chunks, captured_step, check_buffers, fill
from openmla.plan.compressed import choose
from openmla.plan.compressed_checks import check_batch
from openmla.plan.problems import Choice, cache_kind, frozen
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
    form: str,
    workspace: Workspace | None,
    into: dict[str, Tensor] | None,
    asked: dict[str, Any],
) -> RankPlan:
    """A step of V4's layers of one ratio; of whole ones, that of one process."""
    given = asked | {"form": form, "workspace": workspace, "into": into}
    if into is not None:
        check_buffers("parallel", "into", into)
    if cache.ratio != INDEXED_RATIO:
        plan = make_plan(batch, config, cache, **given)
        return RankPlan(config, ranks, plan.num_tokens, plan)
    window, entries, indexer = cache.window, cache.compressed, config.indexer
    if window is None or entries is None or cache.index is None or cache.state is None:
        make_plan(batch, config, cache, **given)  # says what is missing
        raise AssertionError("a cache of ratio 4 has all of these")
    assert indexer is not None
    shard, BS = ranks.shard, entries.block_size * INDEXED_RATIO
    if shard.interleave not in (1, BS):
        raise ConfigError(
            f"parallel: interleave must be 1 or the block size of {BS} for {config.model_type}, "
            f"whose entries stay with their block, got {shard.interleave}."
        )
    check_batch(batch, config, cache, window, again=True, ranks=shard.size)
    writes = replace(batch, block_table=written_table(batch.block_table, shard))
    if into is not None:
        given["into"] = _of_writes(into)
    near = make_plan(writes, config, _window_alone(cache), **given)
    assert near.compressed is not None
    own = replace(shard, interleave=entries.block_size)
    most = max(batch.read_lens, default=0) // INDEXED_RATIO
    chunks: tuple[ScoreChunk, ...] | None = None
    if into is not None:
        chunks = captured_score_chunks(config, cache, into)
        most = into["block_table"].shape[1] * entries.block_size * shard.size
    elif most <= indexer.topk:
        chunks = ()
    held = _entries_here(batch, config, cache, own, near.compressed, chunks)
    if into is None:
        held = upload(held, window.data.device)
    else:
        held, values = captured_step(batch, cache, held, near.slot_mapping, into)
        fill(into, values)
    dtype, T = near.problem("cache_write").dtype, near.num_tokens
    kind, tokens = cache_kind([window, entries], cache.index), bucketed(T)
    wide = with_all_heads(config, ranks)

    def chosen(config: MLAConfig) -> Choice:
        return choose(config, kind, dtype, bool(held.chunks), tokens, frozen(asked["backend"]))

    step = replace(near.compressed, ratio=INDEXED_RATIO)
    plan = replace(near, compressed=step, **_choice(chosen(config)))
    part = RankPart(
        slice(0, T),
        replace(
            near,
            config=wide,
            compressed=held,
            num_blocks=entries.num_blocks,
            block_size=entries.block_size,
            **_choice(chosen(wide)),
        ),
    )
    if not held.chunks:
        return RankPlan(config, ranks, T, plan, absorbed=part)
    offered = min(indexer.topk, own.most_local(most))
    return RankPlan(config, ranks, T, plan, chosen=part, candidates=offered)


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


def _choice(choice: Choice) -> dict[str, Any]:
    """Who runs what, as fields of a Plan."""
    return {
        "backends": dict(choice.backends),
        "requested": dict(choice.requested),
        "problems": choice.problems,
    }
