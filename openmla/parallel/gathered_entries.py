"""V4's entries gathered from all ranks instead of attended to where they are, and which is cheaper.

A prompt's tokens share their entries. In place each token's queries and outputs go round; gathered,
every rank brings its blocks of the step's requests, entries and indexer keys, packed as they are,
and goes on as one process does, with its own heads. This step's entries are written first, by their
owners, so that they are among them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from openmla.attention import CompressedInputs
from openmla.attention.compressed import attend_segments
from openmla.cache import LayerCache, PagedCache
from openmla.config import INDEXED_RATIO, MLAConfig
from openmla.parallel.collectives import all_gather
from openmla.parallel.gathered import LINK_BALANCE
from openmla.parallel.merge import sent_bytes
from openmla.parallel.ranks import Ranks
from openmla.parallel.workspace import Shape
from openmla.plan import Batch, Plan
from openmla.plan.rows import integers, owners
from openmla.plan.upload import upload


class GatheredEntries(NamedTuple):
    """The step's requests, all their entries in blocks that every rank puts together alike."""

    plan: Plan  # of one process over those blocks
    blocks: Tensor  # [n] i64: what this rank brings of them
    num_bytes: int  # of all of them together, in the workspace of the ranks


def brought_counts(batch: Batch, cache: LayerCache, size: int) -> list[int]:
    """Blocks that each rank brings of each request: as many on all of them."""
    assert cache.compressed is not None
    wide = cache.compressed.block_size * size
    return [-(-(S // INDEXED_RATIO) // wide) for S in batch.read_lens]


def brought_blocks(table: Tensor, counts: Sequence[int]) -> Tensor:  # [n] i64
    """This rank's blocks, request by request."""
    columns = [column for count in counts for column in range(count)]
    mine, places = upload((owners(counts), integers(columns, torch.int64)), table.device)
    return table[mine, places].long()


def gathered_table(counts: Sequence[int], size: int) -> Tensor:  # [B, M] i32
    """Where a request's blocks are once they are together: one rank's behind another's."""
    total, firsts = sum(counts), accumulate(counts, initial=0)
    columns = torch.arange(max(counts, default=0) * size)
    rows = [
        columns % size * total + first + columns // size
        for first, _ in zip(firsts, counts, strict=False)
    ]
    table = torch.stack(rows) if rows else columns.new_zeros((0, 0))
    return table.clamp(max=max(size * total - 1, 0)).int()


def page_bytes(config: MLAConfig, cache: LayerCache) -> tuple[int, int]:
    """Of a block's entries, and of its indexer keys."""
    assert cache.compressed is not None and cache.index is not None and config.indexer is not None
    entries = cache.compressed.page_bytes(config.latent_dim)
    return entries, cache.index.page_bytes(config.indexer.head_dim)


def gather_shapes(
    num_blocks: int, config: MLAConfig, cache: LayerCache, size: int
) -> tuple[Shape, ...]:
    """Entries as this rank brings them and as all ranks' come, and so the keys."""
    pages = page_bytes(config, cache)
    return tuple((n, page) for page in pages for n in (num_blocks, size * num_blocks))


def attend_gathered_entries(
    inputs: CompressedInputs,
    cache: LayerCache,
    gathered: GatheredEntries,
    ranks: Ranks,
    sink: Tensor | None,
) -> Tensor:  # [T, H, D], still rotated
    """Everything of this step is written; this rank's heads."""
    blocks = gathered.blocks
    assert cache.compressed is not None and cache.index is not None
    shapes = gather_shapes(len(blocks), gathered.plan.config, cache, ranks.shard.size)
    pages = ranks.workspace.split(blocks.device, torch.uint8, *shapes)
    together = LayerCache(
        window=cache.window,
        compressed=_together(cache.compressed, blocks, next(pages), next(pages), ranks),
        index=_together(cache.index, blocks, next(pages), next(pages), ranks),
        state=cache.state,
        ratio=cache.ratio,
    )
    queries = CompressedInputs(q=inputs.q, index=inputs.index)
    return attend_segments(queries, together, gathered.plan, write=False, sink=sink)[0]


def _together(
    part: PagedCache, blocks: Tensor, mine: Tensor, every: Tensor, ranks: Ranks
) -> PagedCache:
    brought = part.over(mine).data.view(torch.uint8)
    torch.index_select(part.data.view(torch.uint8), 0, blocks, out=brought)
    return part.over(all_gather(mine, ranks.group, out=every))


def gathering_entries_is_cheaper(
    batch: Batch, config: MLAConfig, cache: LayerCache, ranks: Ranks, dtype: torch.dtype
) -> bool:
    """By flops and bytes sent, of what all ranks know."""
    assert cache.compressed is not None and config.indexer is not None
    device, W = cache.compressed.data.device.type, ranks.shard.size
    balance, D = LINK_BALANCE.get(device, LINK_BALANCE["cpu"]), config.latent_dim
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
