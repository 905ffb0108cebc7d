"""Warm-up steps of V4: a layer of zeros over requests that are empty on the device only.

The plan uses lengths on the host, so every kernel is launched as in serving. The lengths on the
device are 0, so nothing is written and little is computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch

from openmla.backends.choice import BackendChoice
from openmla.cache import LayerCache
from openmla.config import INDEXED_RATIO, MLAConfig
from openmla.layers.mla_v4 import MLAAttentionV4
from openmla.layers.sweep import Sweep, run_sweeps, sizes_up_to
from openmla.plan import Batch, Plan, Workspace, make_plan
from openmla.ranks import Ranks


class CompressedStepShape(NamedTuple):
    """A step of equal requests: their number, the new tokens and length of each, and the columns of
    their entry and window tables, which may be more than the step needs."""

    requests: int
    new: int
    length: int
    columns: int
    ring: int


def run_compressed_steps(
    config: MLAConfig,
    cache: LayerCache,
    workspace: Workspace,
    max_requests: int,
    max_tokens: int,
    dtype: torch.dtype,
    backend: BackendChoice,
    ranks: Ranks | None = None,
) -> None:
    """Run steps of all shapes with kernels of their own in a layer of the cache's ratio."""
    layer = empty_layer(config, cache, dtype)
    size = sharing(cache, ranks)

    def run(shape: CompressedStepShape) -> None:
        run_compressed(shape, layer, cache, workspace, dtype, backend, ranks)

    assert cache.window is not None
    sweeps = compressed_sweeps(config, cache, max_requests, max_tokens, size)
    run_sweeps(sweeps, run, cache.window.data.device, ranks)
    indexer = getattr(layer.compressor, "indexer", None)
    if indexer is not None and indexer.hadamard:  # another kernel pools keys without it
        indexer.hadamard = False
        run(CompressedStepShape(1, 1, 1, 1, 1))


def sharing(cache: LayerCache, ranks: Ranks | None) -> int:
    """Return how many ranks share the entries of a block."""
    return 1 if ranks is None or cache.ratio != INDEXED_RATIO else ranks.shard.size


def compressed_sweeps(
    config: MLAConfig, cache: LayerCache, max_requests: int, max_tokens: int, ranks: int = 1
) -> Iterator[Sweep]:
    """Yield sweeps over the number of tokens, in one request and in the maximum number of requests.
    Context: none, a full window, enough entries for top-k selection, and all that fits. Tables: as
    narrow as that allows, and wider.
    """
    assert config.compressor is not None and cache.window is not None
    span, ratio, BS = config.compressor.window, cache.ratio, cache.window.block_size
    longest, per_block, blocks, most = config.max_positions, 0, 1, max_requests
    if cache.compressed is not None and cache.state is not None:
        per_block, blocks = cache.compressed.block_size * ranks, cache.compressed.num_blocks
        longest = min(longest, blocks * per_block * ratio)
        most = min(most, cache.state.num_blocks, max(blocks // 2, 1))
    contexts = {0, span, longest}
    if ratio == INDEXED_RATIO and config.indexer is not None:
        contexts.add((config.indexer.topk + 1) * ratio)
    widest_ring = -(-min(longest, max_tokens + span - 1) // BS) + 1
    widest = -(-longest // (per_block * ratio)) if per_block else 1

    def shape(
        T: int, requests: int, context: int, columns: int = 0, wide: bool = False
    ) -> CompressedStepShape | None:
        """With at least so many columns of entries; `wide`: all, and those of the window."""
        B = min(T, requests)
        new = T // B
        own = -(-new // (per_block * ratio)) + 1 if per_block else 0
        if new > longest or (B > 1 and B * own > blocks):
            return None
        length = max(new, min(new + context, longest))
        needed = -(-length // (per_block * ratio)) if per_block else 1
        ring = -(-min(length, new + span - 1) // BS)
        if wide:
            return CompressedStepShape(B, new, length, widest, widest_ring)
        return CompressedStepShape(B, new, length, max(needed, columns), ring)

    tokens = sizes_up_to(max_tokens)
    for requests, context, wide in product((1, most), sorted(contexts), (False, True)):
        yield Sweep(partial(shape, requests=requests, context=context, wide=wide), tokens)
    for T in sorted({max_tokens, *(2**i for i in range(max_tokens.bit_length()))}, reverse=True):
        yield Sweep(partial(shape, T, 1, 0), sizes_up_to(widest))


def empty_layer(config: MLAConfig, cache: LayerCache, dtype: torch.dtype) -> MLAAttentionV4:
    """Return a layer of the cache's ratio with all weights 0."""
    assert config.compressor is not None and config.indexer is not None
    assert cache.window is not None
    ratios, DI = config.compressor.ratios, config.indexer.head_dim
    number = ratios.index(cache.ratio) if cache.ratio in ratios else len(ratios)
    with torch.device("meta"):
        layer = MLAAttentionV4(config, layer=number, hadamard=DI & (DI - 1) == 0)
    layer = layer.to(dtype).to_empty(device=cache.window.data.device)
    for parameter in layer.parameters():
        parameter.zero_()
    return layer


def run_compressed(
    shape: CompressedStepShape,
    layer: MLAAttentionV4,
    cache: LayerCache,
    workspace: Workspace | None,
    dtype: torch.dtype,
    backend: BackendChoice,
    ranks: Ranks | None = None,
) -> Plan:
    """Run one forward pass, writing no slot and no state."""
    assert cache.window is not None
    device, B = cache.window.data.device, shape.requests
    table = torch.zeros((B, shape.columns), dtype=torch.int32)
    if cache.compressed is not None:  # requests must not finish the same entry
        wide = cache.compressed.block_size * cache.ratio * sharing(cache, ranks)
        own = -(-shape.new // wide) + 1
        table += torch.arange(shape.columns, dtype=torch.int32)
        table += own * torch.arange(B, dtype=torch.int32)[:, None]
        table %= cache.compressed.num_blocks
    ring = torch.arange(B * shape.ring, dtype=torch.int32).view(B, -1) % cache.window.num_blocks
    batch = Batch(
        [shape.new] * B,
        [shape.length] * B,
        table,
        device_seq_lens=torch.zeros(B, dtype=torch.int32, device=device),
        window_table=ring,
        state_slots=torch.arange(B, dtype=torch.int32),
    )
    options: dict[str, Any] = {"dtype": dtype, "backend": backend, "ranks": ranks}
    plan = make_plan(batch, layer.config, cache, workspace=workspace, **options)
    hidden = torch.zeros((plan.num_tokens, layer.config.hidden_size), dtype=dtype, device=device)
    positions = torch.zeros(plan.num_tokens, dtype=torch.int64, device=device)
    layer(hidden, positions, cache, plan)
    return plan
