"""Lightning indexer: writes this step's keys, then selects K positions for every sparse row."""

from __future__ import annotations

import torch
from torch import Tensor

from openmla.attention.offers import choose_over_ranks, held_here
from openmla.attention.scores import score_chunk
from openmla.attention.types import IndexInputs, Selection, check_alike, rows_of
from openmla.cache import LayerCache, PagedCache
from openmla.errors import ConfigError, ShapeError, check_kind
from openmla.ops import cache_write, index_topk, map_slots
from openmla.ops._register import refuse_grad
from openmla.ops.index_logits import scores_dtype
from openmla.plan import Absorbed, Plan, ScoreChunk, Select


def select_step(index: IndexInputs, cache: LayerCache, plan: Plan) -> Selection | None:
    """Run the lightning indexer: write this step's indexer keys, score, and select top-k keys.

    Keys are written even if no token selects, because later steps need them.

    Args:
        index: the indexer's queries, weights and keys of the step's tokens.
        cache: the layer's cache, with index rows.
        plan: the plan of the step.

    Returns:
        The Selection for attend_step(selection=...), of this layer and of the layers that share it.
        None if no request has more keys than the indexer's topk: every token attends to all keys.

    Raises:
        ConfigError: the cache has no index rows, or the config no indexer.
        ShapeError: a tensor has a wrong shape, dtype or device.

    ```python
    import openmla, torch

    config = openmla.PRESETS["tiny-v3.2"]
    HI, DI = config.indexer.num_heads, config.indexer.head_dim
    cache = openmla.allocate_cache(config, num_blocks=3, block_size=16, format="fp32")
    table = torch.tensor([[0, 1, 2]], dtype=torch.int32)
    batch = openmla.Batch([40], [40], table, torch.arange(40))
    plan = openmla.make_plan(batch, config, cache)
    index = openmla.IndexInputs(torch.randn(40, HI, DI), torch.randn(40, HI), torch.randn(40, DI))
    selection = openmla.select_step(index, cache, plan)
    print(selection.positions.shape)  # [T, topk]
    ```
    """
    for name, given, kind in (
        ("index", index, IndexInputs),
        ("cache", cache, LayerCache),
        ("plan", plan, Plan),
    ):
        check_kind("select", name, given, kind)
    keys = check_index(index, cache, plan)
    write_keys(index, keys, plan)
    return None if plan.select is None else choose(index, cache, plan)


def check_index(index: IndexInputs, cache: LayerCache, plan: Plan) -> PagedCache:
    """Check what the ops would check only after keys are written. Returns the index cache."""
    config, keys = plan.config, cache.index
    if config.indexer is None or keys is None:
        if keys:
            raise ConfigError(
                f"select: the plan's config ({config.model_type}) has no indexer. Attend without a "
                "selection."
            )
        raise ConfigError(
            "select: cache has no index rows. Allocate it for a layer with its own indexer, or "
            "pass the selection of the layer that this one shares with."
        )
    plan.check_cache("select", cache)
    if plan.select is not None and not plan.select.chunks and plan.select.num_rows:
        raise ConfigError(
            "select: the plan was made for a cache without index rows and scores no keys. Pass "
            "your own positions to make_selection(), or plan with a cache that has index rows."
        )
    HI, DI = config.indexer.num_heads, config.indexer.head_dim
    for name, tensor, shape in (
        ("q_idx", index.q_idx, (plan.num_tokens, HI, DI)),
        ("w_idx", index.w_idx, (plan.num_tokens, HI)),
        ("k_idx", index.k_idx, (plan.num_tokens, DI)),
    ):
        if tensor is not None and tensor.shape != shape:
            raise ShapeError(
                f"select: {name} must be {shape} for this plan, got {tuple(tensor.shape)}."
            )
    device = keys.data.device
    check_alike("select", "q_idx", index.q_idx, index.q_idx.dtype, device)
    check_alike("select", "w_idx", index.w_idx, scores_dtype(index.q_idx.dtype), device)
    refuse_grad("select", tuple(tensor for tensor in index if tensor is not None))
    return keys


def write_keys(index: IndexInputs, keys: PagedCache, plan: Plan) -> None:
    """Write this step's indexer keys to the plan's slots, unless the caller has done so."""
    if index.k_idx is None:
        return
    cache_write(
        keys.data,
        index.k_idx,
        index.k_idx[:, :0],
        plan.slot_mapping,
        keys.kv_scale,
        format=keys.format,
        backend=plan.backend("cache_write"),
    )


def choose(index: IndexInputs, cache: LayerCache, plan: Plan) -> Selection:
    """Select keys for every token that selects; the cache must hold all indexer keys."""
    select, keys = plan.select, cache.index
    assert select is not None and keys is not None
    if select.offered:
        everywhere = choose_over_ranks(index, keys, plan, select)
        positions, lens = held_here(everywhere, plan, select)
    else:
        own = rows_of(index.q_idx, select.rows), rows_of(index.w_idx, select.rows)
        positions, lens = choose_positions(*own, keys, plan, select), select.topk_lens
    return Selection(positions, lens, chosen_rows(positions, cache, plan), select.row_lens)


def chosen_rows(
    positions: Tensor,  # [n, K] i32
    cache: LayerCache,
    plan: Plan,
) -> Tensor:  # [n', K] i32
    """Return the selected keys of the "chosen" group, as slots if the backend needs slots."""
    group = plan.listing
    if group is None:
        return positions[:0]
    if not plan.mapped:
        # No assert and no cast: under torch.compile either turns the slice's ends into constants.
        return rows_of(positions, group.selected)  # type: ignore[arg-type]
    part, latent = group.part, cache.latent
    assert isinstance(part, Absorbed) and latent is not None
    parts = [
        map_slots(
            positions[cut],
            part.reads[0].block_table,
            start_loc,
            BS=latent.block_size,
            num_blocks=latent.num_blocks,
            backend=plan.backend("map_slots"),
        )[0]
        for cut, start_loc in zip(part.cuts, part.start_locs, strict=True)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def choose_positions(
    q_idx: Tensor,  # [n, HI, DI]
    w_idx: Tensor,  # [n, HI]
    keys: PagedCache,
    plan: Plan,
    select: Select,
) -> Tensor:  # [n, K] i32
    """Select the best keys that each row may see, scored in the plan's chunks of rows."""
    assert plan.config.indexer is not None
    K = plan.config.indexer.topk
    if plan.workspace is not None and plan.workspace.selection.shape[0]:
        positions = plan.workspace.selection[: select.num_rows]
    else:
        shape = (select.num_rows, K)
        positions = torch.empty(shape, dtype=torch.int32, device=q_idx.device)
    for chunk, start_loc in zip(select.chunks, select.start_locs, strict=True):
        choice = positions[chunk.rows]
        if chunk.num_keys <= K:  # at most K keys: all are selected
            choice.copy_(select.first_keys.expand(choice.shape))
            choice.masked_fill_(choice >= select.row_lens[chunk.rows, None], -1)
        else:
            choice.copy_(_score_and_choose(q_idx, w_idx, keys, plan, select, chunk, start_loc))
    return positions


def _score_and_choose(
    q_idx: Tensor,
    w_idx: Tensor,
    keys: PagedCache,
    plan: Plan,
    select: Select,
    chunk: ScoreChunk,
    start_loc: Tensor,  # [B+1] i32
) -> Tensor:  # [rows, K] i32
    assert plan.config.indexer is not None
    seen = select.row_lens[chunk.rows]
    positions, _ = index_topk(
        score_chunk(q_idx, w_idx, keys, plan, select, chunk, start_loc),
        select.row_starts[: len(seen)],
        seen,
        K=plan.config.indexer.topk,
        backend=plan.backend("index_topk"),
    )
    return positions
