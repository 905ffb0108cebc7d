"""V4's layers to plan steps of: caches, and requests that came to their length in steps."""

from __future__ import annotations

from typing import Any

from openmla import PRESETS, Batch, CompressedPool, LayerCache, MLAConfig, allocate_cache

CONFIG = PRESETS["tiny-v4"]  # window 32, K = 32, layers of ratio 0, 4 and 128
BS = 16  # of the window


def make_cache(ratio: int, config: MLAConfig = CONFIG, **changes: Any) -> LayerCache:
    assert config.compressor is not None
    given: dict[str, Any] = {
        "num_blocks": 32,
        "block_size": 128,
        "format": "fp32",
        "index_format": "index_fp32",
        "layer": config.compressor.ratios.index(ratio),
        "max_requests": 4,
        "max_tokens": 600,
        "window_block_size": BS,
    }
    return allocate_cache(config, **{**given, **changes})


def make_batch(cache: LayerCache, query_lens: list[int], seq_lens: list[int], **more: Any) -> Batch:
    """Requests that got their tokens in steps the windows have room for."""
    assert cache.geometry is not None
    pool = CompressedPool(cache.geometry)
    for b, (n, S) in enumerate(zip(query_lens, seq_lens, strict=True)):
        context = S - n
        while context:
            step = min(context, 512)
            pool.take({b: step})
            context -= step
    columns = more.pop("window_columns", 0)
    pool.take(dict(enumerate(query_lens)))
    tables = pool.tables(range(len(query_lens)), window_columns=columns)
    return Batch(
        query_lens,
        seq_lens,
        tables.block_table,
        window_table=tables.window_table,
        state_slots=tables.state_slots,
        **more,
    )
