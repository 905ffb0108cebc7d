"""Plans V4 steps: windows, entries, and the tokens that select entries; one per compress ratio."""

from __future__ import annotations

import torch
from torch import Tensor

from openmla.cache import LayerCache, PagedCache
from openmla.config import INDEXED_RATIO, MLAConfig
from openmla.ops._values import check_slots
from openmla.plan.batch import Batch
from openmla.plan.captured import captured_score_chunks, check_ring, check_roles
from openmla.plan.groups import (
    Roles,
    chunks_of,
    compressed_parts,
    first_keys,
    no_starts,
    numbered,
    query_bytes,
    row_lens,
    true_row_lens,
)
from openmla.plan.places import last_slots
from openmla.plan.rows import cumulative, integers, owners, padded, start_locs
from openmla.plan.types import Parts, ScoreChunk, Shared
from openmla.plan.upload import upload


def plan_compressed(
    batch: Batch,
    config: MLAConfig,
    cache: LayerCache,
    window: PagedCache,
    known: Shared | None,  # from the plan of another ratio
    into: Roles | None,
    *,
    uniform: bool,  # tokens select even if they see few entries
    listed: bool,  # list entries even if all are attended to: independent of others
) -> tuple[Parts, Roles]:
    """A step of layers of the cache's ratio, and the values of its buffers."""
    assert config.indexer is not None
    if into is not None:
        check_ring(batch, cache, into)
    shared = plan_shared(batch, window) if known is None else known
    ratio, T, K = cache.ratio, batch.num_tokens, config.indexer.topk
    most = max(batch.read_lens, default=0) // ratio if ratio else 0
    held = 0 if cache.index is None else query_bytes(config, cache.index)
    chunks = None if into is None else captured_score_chunks(config, cache, into)
    entries = integers(())
    # otherwise unused
    if ratio == INDEXED_RATIO and (chunks or most > K or uniform or listed):
        seen = padded(row_lens(batch.query_lens, batch.seq_lens), batch.padding)
        entries = seen // ratio
    if chunks is None:
        chunks = chunks_of(entries, most, held, K + 1 if uniform else 0)
    if chunks and batch.device_seq_lens is not None:
        entries = (shared.positions[:T].int() + 1) // ratio
    roles = shared_roles(shared)
    if chunks:
        bounds = shared.query_start_loc if known is None else cumulative(batch.query_lens)
        roles |= entry_roles(entries, chunks, K, bounds, T)
    requests = range(len(batch.query_lens))
    if into is None:
        parts = compressed_parts(roles, config, ratio, chunks, T, most, held, requests)
        return Parts(*parts, shared.slots, shared=shared), {}
    check_roles(roles, into)
    T, blocks = into["slot_mapping"].shape[0], into["block_table"].shape[1]
    most = blocks * cache.compressed.block_size if cache.compressed is not None else 0
    parts = compressed_parts(into, config, ratio, chunks, T, most, held, requests)
    there = shared._replace(slots=into["slot_mapping"], **{name: into[name] for name in SHARED})
    values = {**roles, "slot_mapping": shared.slots}
    return Parts(*parts, into["slot_mapping"], shared=there), values


SHARED = ("query_start_loc", "positions", "window_table", "block_table", "state_slots")


def shared_roles(shared: Shared) -> Roles:
    return {name: getattr(shared, name) for name in SHARED}


def entry_roles(
    entries: Tensor, chunks: tuple[ScoreChunk, ...], K: int, bounds: Tensor, T: int
) -> Roles:
    """Tokens that select among the entries they see."""
    locs = start_locs(bounds, [chunk.rows for chunk in chunks], T)
    return {
        "row_starts": no_starts(chunks, K),
        "first_keys": first_keys(chunks, K),
        "row_lens": entries,
        "topk_lens": entries.clamp(max=K),
        **numbered("score_start_locs", locs),
    }


def plan_shared(batch: Batch, window: PagedCache) -> Shared:
    """Positions, tables and slots that layers of all ratios share."""
    table, states = batch.window_table, batch.state_slots
    assert table is not None and states is not None
    seen = row_lens(batch.query_lens, batch.seq_lens)  # number of tokens, including this one
    positions = true_row_lens(batch, range(len(batch.query_lens)), seen).long() - 1
    BS, lens = window.block_size, batch.device_seq_lens
    if table.device.type == "cpu" and lens is None:
        written = last_slots(table, batch.query_lens, batch.seq_lens, BS)
        check_slots("batch", written, window.num_blocks * BS)
        slots = integers(written, torch.int64)
    else:
        # compute slots on the device of the table or the lengths
        device = table.device if lens is None or table.device.type != "cpu" else lens.device
        given = table, states, lens, owners(batch.query_lens), positions
        table, states, lens, mine, there = upload(given, device)
        states = states if lens is None else states.where(lens > 0, -1)
        slots = window_slots(table, mine, there, BS)
        if slots.device.type == "cpu":
            check_slots("batch", slots, window.num_blocks * BS)
    positions, slots = padded(positions, batch.padding), padded(slots, batch.padding, -1)
    bounds = cumulative(batch.query_lens)
    return Shared(batch.key, bounds, positions, table, batch.block_table, states, slots)


def window_slots(table: Tensor, owners: Tensor, positions: Tensor, BS: int) -> Tensor:
    """[T] i64: the slot of each token's raw row, in the ring of its request."""
    columns = (positions // BS) % max(table.shape[1], 1)
    slots = table[owners, columns].long() * BS + positions % BS
    return slots.masked_fill(positions < 0, -1)  # requests that only the device knows to be empty
