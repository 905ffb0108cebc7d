"""V4 over ranks: entries of ratio 4 are sharded, everything else is replicated.

Every W-th block of BS tokens of a request keeps its ratio-4 entries, and their indexer keys, on
this rank. The ratio divides BS, so a rank's entries keep their order and a token sees a prefix of
them. Windows, compressor states and entries of ratio 128 grow slowly or not at all. Every rank
holds all of them, in blocks of BS * W tokens, so that one table serves all layers
(docs/context-parallel-v4.md).

Each rank attends to its own entries in place, with the heads of all ranks. If a prompt's tokens
share their entries, every rank instead gathers all blocks of the step's requests, still packed, and
continues as one process does, with its own heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from openmla.cache import LayerCache, PagedCache
from openmla.config import INDEXED_RATIO, MLAConfig
from openmla.errors import ConfigError
from openmla.plan.batch import Batch
from openmla.plan.captured import WRITES, captured_score_chunks, check_ring, check_roles
from openmla.plan.compressed import SHARED, entry_roles, plan_shared, shared_roles
from openmla.plan.forms import link_balance
from openmla.plan.groups import Roles, chunks_of, compressed_parts, query_bytes, row_lens
from openmla.plan.rows import cumulative, integers, owners, padded
from openmla.plan.types import (
    Absorbed,
    Across,
    Bring,
    Group,
    Parts,
    Pool,
    ScoreChunk,
    Select,
    Shared,
    remade,
)
from openmla.plan.upload import upload
from openmla.ranks import Ranks, Shard
from openmla.ranks.merge import sent_bytes
from openmla.ranks.workspace import Shape, power_of_two


def plan_compressed_across(
    batch: Batch,
    config: MLAConfig,
    cache: LayerCache,
    window: PagedCache,
    ranks: Ranks,
    dtype: torch.dtype,
    context: str,
    into: Roles | None,
    *,
    fixed: bool,  # batch-invariant: nothing depends on other requests
) -> tuple[Parts, Roles]:
    """A step of layers of ratio 4, and the values of its buffers."""
    assert cache.compressed is not None
    _check_interleave(config, ranks, cache.compressed.block_size * INDEXED_RATIO)
    shared = plan_shared(batch, window)
    shared = shared._replace(block_table=written_table(batch.block_table, ranks.shard))
    if _gathers(batch, config, cache, ranks, dtype, context, into, fixed=fixed):
        return _gathered(batch, config, cache, ranks, shared, fixed=fixed), {}
    return _in_place(batch, config, cache, ranks, shared, into, fixed=fixed)


def _check_interleave(config: MLAConfig, ranks: Ranks, BS: int) -> None:
    if ranks.interleave not in (1, BS):
        raise ConfigError(
            f"parallel: interleave must be 1 or the block size of {BS} for {config.model_type}, "
            f"which keeps the tokens of an entry on one rank, got {ranks.interleave}."
        )


def _gathers(
    batch: Batch,
    config: MLAConfig,
    cache: LayerCache,
    ranks: Ranks,
    dtype: torch.dtype,
    context: str,
    into: Roles | None,
    *,
    fixed: bool,
) -> bool:
    if into is not None:
        return False
    if not any(S >= INDEXED_RATIO for S in batch.read_lens):  # no token sees an entry
        return False
    if context != "auto" or fixed:
        return context == "gather"
    return gathering_entries_is_cheaper(batch, config, cache, ranks, dtype)


def _gathered(
    batch: Batch, config: MLAConfig, cache: LayerCache, ranks: Ranks, shared: Shared, *, fixed: bool
) -> Parts:
    """Gather the blocks of all ranks, and plan as one process does."""
    size, device = ranks.shard.size, cache.parts[0].data.device
    counts = brought_counts(batch, cache, size)
    together = replace(batch, block_table=gathered_table(counts, size))
    roles, chunks, most = _entries(together, config, cache, Shard(), shared, None, fixed=fixed)
    roles["positions"] = shared.positions
    groups, select, pool = _parts(roles, config, cache, chunks, batch.num_tokens, most, batch)
    assert pool is not None
    (blocks,) = upload((brought_blocks(batch.block_table, counts),), device)
    shapes = block_shapes(power_of_two(sum(counts)), config, cache, size)
    ranks.workspace.reserve(device, torch.uint8, *shapes)
    bring = Bring(blocks, size * sum(counts) * sum(page_bytes(config, cache)))
    pool = remade(pool, {"block_table": shared.block_table})
    return Parts(groups, select, pool, shared.slots, shared=shared, bring=bring)


def _in_place(
    batch: Batch,
    config: MLAConfig,
    cache: LayerCache,
    ranks: Ranks,
    shared: Shared,
    into: Roles | None,
    *,
    fixed: bool,
) -> tuple[Parts, Roles]:
    """Attend to this rank's entries, merge over ranks, then merge with the replicated window."""
    entries, indexer, shard = cache.compressed, config.indexer, ranks.shard
    assert entries is not None and indexer is not None
    own, T = replace(shard, interleave=entries.block_size), batch.num_tokens
    longest = max(batch.read_lens, default=0) // INDEXED_RATIO
    planned: tuple[ScoreChunk, ...] | None = None
    if into is not None:
        check_ring(batch, cache, into)
        planned = captured_score_chunks(config, cache, into)
        longest = into["block_table"].shape[1] * entries.block_size * shard.size
    roles, chunks, most = _entries(batch, config, cache, own, shared, planned, fixed=fixed)
    values: Roles = {}
    if into is not None:
        check_roles(roles, into)
        near = {name: into[f"{WRITES}{name}"] for name in (*SHARED, "slot_mapping")}
        values = {**roles, "slot_mapping": shared.slots}
        values |= {f"{WRITES}{name}": each for name, each in shared_roles(shared).items()}
        values[f"{WRITES}slot_mapping"] = shared.slots
        T, roles, slots = near["slot_mapping"].shape[0], into, near.pop("slot_mapping")
        shared = shared._replace(slots=slots, **near)
        most = into["block_table"].shape[1] * entries.block_size
    (far,), select, _ = _parts(roles, config, cache, chunks, T, most, batch)
    (group,), _, pool = _parts(shared_roles(shared), config, cache, (), T, 0, batch)
    assert isinstance(far.part, Absorbed) and isinstance(group.part, Absorbed)
    window, listing = group.part.reads[:1], far.part.reads[1:]
    far = remade(far, {"part": remade(far.part, {"reads": listing})})
    near_part, across = remade(group.part, {"reads": window}), Across(far.rows, (far,))
    group = remade(far, {"part": near_part, "across": across})
    if select is not None:
        offered = min(indexer.topk, own.most_local(longest))
        here = {"offered": offered, "shard": own, "block_size": entries.block_size}
        select = remade(select, here)
    return Parts((group,), select, pool, shared.slots, shared=shared), values


def _parts(
    roles: Roles,
    config: MLAConfig,
    cache: LayerCache,
    chunks: tuple[ScoreChunk, ...],
    T: int,
    most: int,
    batch: Batch,
) -> tuple[tuple[Group, ...], Select | None, Pool | None]:
    assert cache.index is not None
    held, requests = query_bytes(config, cache.index), range(len(batch.query_lens))
    return compressed_parts(roles, config, INDEXED_RATIO, chunks, T, most, held, requests)


def _entries(
    batch: Batch,
    config: MLAConfig,
    cache: LayerCache,
    shard: Shard,  # of entries
    shared: Shared,
    chunks: tuple[ScoreChunk, ...] | None,  # in which entries are scored; None: found here
    *,
    fixed: bool,
) -> tuple[Roles, tuple[ScoreChunk, ...], int]:
    """The entries of this rank that tokens see, by their local numbers (all or selected), and the
    largest number that one token sees.

    Positions are those of tokens that would see that many entries in one process.
    """
    assert config.indexer is not None and cache.index is not None
    K, T = config.indexer.topk, batch.num_tokens
    seen = row_lens(batch.query_lens, batch.seq_lens) // INDEXED_RATIO
    here = padded(shard.local_counts(seen), batch.padding)
    longest = int(here.max()) if T else 0
    if chunks is None:
        few = max(batch.read_lens, default=0) // INDEXED_RATIO <= K and not fixed
        chunks = () if few else chunks_of(here, longest, query_bytes(config, cache.index))
    if batch.device_seq_lens is not None:
        here = shard.local_counts((shared.positions[:T].int() + 1) // INDEXED_RATIO)
    roles = shared_roles(shared)
    roles["positions"] = here.long() * INDEXED_RATIO - 1
    roles["block_table"] = batch.block_table
    if chunks:
        roles |= entry_roles(here, chunks, K, cumulative(batch.query_lens), T)
    return roles, chunks, longest


def written_table(table: Tensor, shard: Shard) -> Tensor:  # [B, M * W] i32
    """A column for every block of BS tokens, with -1 for blocks of other ranks."""
    columns = torch.arange(table.shape[1] * shard.size, device=table.device)
    wide = table.repeat_interleave(shard.size, dim=1)
    return wide.masked_fill(columns % shard.size != shard.rank, -1)


def brought_counts(batch: Batch, cache: LayerCache, size: int) -> list[int]:
    """How many blocks each rank contributes per request, the same number on all ranks."""
    assert cache.compressed is not None
    wide = cache.compressed.block_size * size
    return [-(-(S // INDEXED_RATIO) // wide) for S in batch.read_lens]


def brought_blocks(table: Tensor, counts: Sequence[int]) -> Tensor:  # [n] i64
    """This rank's blocks, in request order."""
    columns = [column for count in counts for column in range(count)]
    mine, places = upload((owners(counts), integers(columns, torch.int64)), table.device)
    return table[mine, places].long()


def gathered_table(counts: Sequence[int], size: int) -> Tensor:  # [B, M] i32
    """The table of gathered blocks, which lie rank after rank."""
    total, firsts = sum(counts), accumulate(counts, initial=0)
    columns = torch.arange(max(counts, default=0) * size)
    rows = [
        columns % size * total + first + columns // size
        for first, _ in zip(firsts, counts, strict=False)
    ]
    table = torch.stack(rows) if rows else columns.new_zeros((0, 0))
    return table.clamp(max=max(size * total - 1, 0)).int()


def page_bytes(config: MLAConfig, cache: LayerCache) -> tuple[int, int]:
    """Bytes of a block's entries and of its indexer keys."""
    assert cache.compressed is not None and cache.index is not None and config.indexer is not None
    entries = cache.compressed.page_bytes(config.latent_dim)
    return entries, cache.index.page_bytes(config.indexer.head_dim)


def block_shapes(
    num_blocks: int, config: MLAConfig, cache: LayerCache, size: int
) -> tuple[Shape, ...]:
    """Shapes of the entries, then of the indexer keys: from this rank and from all ranks."""
    pages = page_bytes(config, cache)
    return tuple((n, page) for page in pages for n in (num_blocks, size * num_blocks))


def gathering_entries_is_cheaper(
    batch: Batch, config: MLAConfig, cache: LayerCache, ranks: Ranks, dtype: torch.dtype
) -> bool:
    """Whether gathering is cheaper, by FLOPs and bytes sent, from what all ranks know."""
    assert cache.compressed is not None and config.indexer is not None
    W, D = ranks.shard.size, config.latent_dim
    balance = link_balance(cache.compressed.data.device.type)
    K, scoring = config.indexer.topk, 2 * config.indexer.num_heads * config.indexer.head_dim
    lens = [(n, S // INDEXED_RATIO) for n, S in zip(batch.query_lens, batch.seq_lens, strict=True)]
    attended = sum(n * min(entries, K) for n, entries in lens) * 4 * D
    scored = sum(n * entries for n, entries in lens if entries > K) * scoring
    tokens = sum(batch.query_lens)
    heads = config.num_heads * (W if ranks.heads == "own" else 1)
    sent = sent_bytes("exchange", ranks.heads, (tokens, heads, D), dtype, W)
    if ranks.heads == "own":
        sent += (W - 1) * tokens * config.num_heads * D * dtype.itemsize
    if scored:
        sent += (W - 1) * tokens * 8 * K
    brought = (W - 1) * sum(brought_counts(batch, cache, W)) * sum(page_bytes(config, cache))
    place = (attended * heads + scored) / W + balance * sent
    return attended * config.num_heads + scored + balance * brought < place
