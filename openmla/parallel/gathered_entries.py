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
from openmla.plan import Batch, Plan
from openmla.plan.rows import integers, owners
from openmla.plan.upload import upload


class GatheredEntries(NamedTuple):
    """The step's requests, all their entries in blocks that every rank puts together alike."""

    plan: Plan  # of one process over those blocks
    blocks: Tensor  # [n] i64: what this rank brings of them
    num_bytes: int  # of all of them together, which a layer holds for as long as it attends


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


def block_bytes(cache: LayerCache) -> int:
    """Of a block's entries and keys."""
    parts = (cache.compressed, cache.index)
    return sum(part.data[0].numel() * part.data.element_size() for part in parts if part)


def attend_gathered_entries(
    inputs: CompressedInputs,
    cache: LayerCache,
    gathered: GatheredEntries,
    ranks: Ranks,
    sink: Tensor | None,
) -> Tensor:  # [T, H, D], still rotated
    """Everything of this step is written; this rank's heads."""
    config = gathered.plan.config
    assert cache.compressed is not None and cache.index is not None and config.indexer is not None
    together = LayerCache(
        window=cache.window,
        compressed=_together(cache.compressed, config.latent_dim, gathered.blocks, ranks),
        index=_together(cache.index, config.indexer.head_dim, gathered.blocks, ranks),
        state=cache.state,
        ratio=cache.ratio,
    )
    queries = CompressedInputs(q=inputs.q, index=inputs.index)
    return attend_segments(queries, together, gathered.plan, write=False, sink=sink)[0]


def _together(part: PagedCache, D: int, blocks: Tensor, ranks: Ranks) -> PagedCache:
    mine = part.data.view(torch.uint8)[blocks]
    return part.holding(all_gather(mine, ranks.group).flatten(0, 1), D)


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
    brought = (W - 1) * sum(brought_counts(batch, cache, W)) * block_bytes(cache)
    place = (attended * heads + scored) / W + balance * sent
    return attended * config.num_heads + scored + balance * brought < place
