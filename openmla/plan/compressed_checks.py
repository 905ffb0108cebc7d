"""Checks of make_plan() for V4: caches, selections and batches must fit the config."""

from __future__ import annotations

from openmla.cache import LayerCache, PagedCache
from openmla.cache.format import get_format, state_rows, state_width
from openmla.config import INDEXED_RATIO, MLAConfig
from openmla.errors import ConfigError, ShapeError
from openmla.ops._values import check_block_table, check_slots
from openmla.plan.batch import Batch
from openmla.plan.checks import check_device_lens, check_devices, check_ring_rows
from openmla.plan.places import last_slots
from openmla.plan.types import Plan
from openmla.plan.workspace import Workspace

TENSORS = ("block_table", "window_table", "state_slots", "device_seq_lens")  # of a batch


def check_caches(config: MLAConfig, cache: LayerCache) -> PagedCache:
    """Check that the parts of a layer's cache fit together; return the window."""
    assert config.compressor is not None
    if cache.window is None:
        raise ConfigError(
            f"plan: cache must have window rows for {config.model_type} and has none. Make it with "
            "allocate_cache(layer=), one layer at a time."
        )
    get_format(cache.window.format, "latent")
    ratio = cache.ratio
    if ratio not in (0, *config.compressor.ratios):
        raise ConfigError(
            f"plan: cache must have one of this model's compress ratios, "
            f"{', '.join(map(str, sorted({0, *config.compressor.ratios})))}, got {ratio}."
        )
    for name, wanted in (
        ("compressed", ratio > 0),
        ("state", ratio > 0),
        ("index", ratio == INDEXED_RATIO),
    ):
        if (getattr(cache, name) is not None) != wanted:
            verb = "have" if wanted else "not have"
            raise ConfigError(f"plan: cache must {verb} {name} rows for ratio {ratio}.")
    entries, index, state, D = cache.compressed, cache.index, cache.state, config.latent_dim
    cache.window.check_width("plan", "window", D)
    if entries is not None and state is not None:
        get_format(entries.format, "latent")
        entries.check_width("plan", "compressed", D)
        width = state_width(D, overlap=index is not None)
        if index is not None and config.indexer is not None:
            width += state_width(config.indexer.head_dim, overlap=True)
        state.check_width("plan", "state", width)
        least = state_rows(ratio, overlap=index is not None)
        if state.block_size < least:
            raise ConfigError(
                f"plan: state must have at least {least} rows for ratio {ratio}, "
                f"got {state.block_size}."
            )
    if index is not None and entries is not None and config.indexer is not None:
        get_format(index.format, "index")
        index.check_width("plan", "index", config.indexer.head_dim)
        if (index.num_blocks, index.block_size) != (entries.num_blocks, entries.block_size):
            raise ConfigError(
                f"plan: index rows must have {entries.num_blocks} blocks of "
                f"{entries.block_size}, as the entries have, got {index.num_blocks} of "
                f"{index.block_size}."
            )
    return cache.window


def check_room_for_selection(
    config: MLAConfig, cache: LayerCache, workspace: Workspace | None, num_tokens: int
) -> None:
    """Check that a workspace of warmup() has room for the selection of the step's tokens."""
    if workspace is None or cache.index is None or config.indexer is None:
        return
    if workspace.selection.shape[1] != config.indexer.topk:
        raise ConfigError(
            "plan: workspace must be of a layer that selects keys, got another. Call warmup() with "
            "this layer's cache."
        )
    if workspace.selection.device != cache.index.data.device:
        raise ConfigError(
            f"plan: workspace must be on {cache.index.data.device}, as the cache is, "
            f"got {workspace.selection.device}. Call warmup() with this cache."
        )
    most = workspace.selection.shape[0]
    if num_tokens > most:
        raise ConfigError(
            f"plan: a step may have at most {most} tokens in this workspace, got {num_tokens}. "
            "Call warmup() with a larger max_tokens, or split the step."
        )


def check_beside(
    beside: Plan, batch: Batch, config: MLAConfig, cache: LayerCache, num_tokens: int
) -> None:
    """Check that another plan can share its positions, tables and slots with this one."""
    if beside.shared is None or beside.shared.key is not batch.key or beside.config != config:
        raise ConfigError(
            "plan: beside must be a plan of the same batch and config, got a different one."
        )
    own, other = cache.geometry, beside.geometry
    # a window-only layer's cache does not grow with the pool of entries, which it does not have
    if own is None or other is None or not own.alike(other):
        raise ConfigError(
            "plan: beside must be a plan for caches of the same geometry, got a different one."
        )
    if beside.num_tokens != num_tokens:
        raise ConfigError(
            f"plan: beside must have {num_tokens} rows, got {beside.num_tokens}. "
            "Pass into= to both plans, or to neither."
        )


def check_compressed_batch(
    batch: Batch,
    config: MLAConfig,
    cache: LayerCache,
    window: PagedCache,
    *,
    again: bool,
    ranks: int = 1,
) -> None:
    """Check the values of host tensors; tensors that are on the device already are trusted.

    `again`: what layers of all ratios share was checked for another ratio. `ranks`: how many ranks
    hold a block's entries together.
    """
    if batch.window_table is None or batch.state_slots is None:
        raise ShapeError(
            f"batch: window_table and state_slots are missing, which {config.model_type} needs."
        )
    longest = max(batch.seq_lens, default=0)
    if longest > config.max_positions:
        raise ShapeError(
            f"batch: seq_lens must be at most max_positions={config.max_positions}, got {longest}."
        )
    check_devices(batch, TENSORS, window.data.device)
    if not again:
        check_device_lens(batch)
        assert config.compressor is not None and batch.window_table is not None
        span = config.compressor.window
        check_ring_rows("window_table", batch, batch.window_table, span, window)
    if cache.compressed is None or cache.state is None:
        return
    if batch.block_table.device.type == "cpu":
        finished = [S // cache.ratio for S in batch.read_lens]
        N, BS = cache.compressed.num_blocks, cache.compressed.block_size * ranks
        check_block_table("batch", batch.block_table, None, finished, N, BS)
        _check_entries(batch, finished, cache.ratio, N, BS)
    if batch.state_slots.device.type == "cpu":
        used = batch.state_slots.tolist()
        if 0 in batch.query_lens:
            used = [slot for slot, n in zip(used, batch.query_lens, strict=True) if n]
        if min(used, default=0) < 0:
            raise ShapeError(
                f"batch: state_slots must not be negative for requests with tokens, "
                f"got {min(used)}."
            )
        check_slots("batch", used, cache.state.num_blocks, "state_slots")


def _check_entries(batch: Batch, finished: list[int], ratio: int, N: int, BS: int) -> None:
    """Check that no two requests finish the same entry in this step. `finished` is the number of
    entries that each request has after it."""
    if max(batch.query_lens, default=0) <= 1:  # decode, at every step
        counts = [n if S % ratio == 0 else 0 for n, S in _lens(batch)]
    else:
        counts = [S // ratio - (S - n) // ratio for n, S in _lens(batch)]
    if any(counts):
        slots = last_slots(batch.block_table, counts, finished, BS)
        check_slots("batch", slots, N * BS, "entries of block_table")


def _lens(batch: Batch) -> list[tuple[int, int]]:
    return list(zip(batch.query_lens, batch.seq_lens, strict=True))
