"""make_selection: converts keys selected by the caller to the form that a step uses."""

from __future__ import annotations

import torch
from torch import Tensor

from openmla.attention.offers import held_here
from openmla.attention.select import chosen_rows
from openmla.attention.types import Selection, check_alike, rows_of
from openmla.cache import LayerCache
from openmla.errors import ConfigError, ShapeError, check_kind
from openmla.plan import Plan


def make_selection(
    positions: Tensor,  # [T, K] i32, for all tokens of the step; -1: padding
    cache: LayerCache,
    plan: Plan,
    *,
    lens: Tensor | None = None,  # [T] i32
) -> Selection | None:
    """Make a Selection from keys that your own indexer selected.

    The caller is responsible for causality. On a CPU, values are checked: each token must see the
    keys that are selected for it, and no key may repeat. Layers that share a selection can share
    the result.

    Args:
        positions: [T, K] int32, K being the indexer's topk: the keys of each token of the step,
            numbered from 0 within its request (entries for DeepSeek V4). -1 is ignored.
        cache: the layer's cache, or one of the same geometry.
        plan: the plan of the step. The result is valid for this plan only.
        lens: [T] int32: how many of the first columns of each token count. The other columns are
            then not read.

    Returns:
        The Selection for attend_step(selection=...), or None if no token of the plan selects keys:
        then every token attends to all of its keys.

    Raises:
        ShapeError: positions or lens have a wrong shape, dtype, device or value.
        ConfigError: the config has no indexer, or cache and plan do not match.

    ```python
    import openmla, torch

    config = openmla.PRESETS["tiny-v3.2"]
    cache = openmla.allocate_cache(config, num_blocks=3, block_size=16, format="fp32")
    table = torch.tensor([[0, 1, 2]], dtype=torch.int32)
    batch = openmla.Batch([1], [40], table, torch.tensor([39]))
    plan = openmla.make_plan(batch, config, cache)
    positions = torch.full((1, config.indexer.topk), -1, dtype=torch.int32)
    positions[0, :3] = torch.tensor([0, 7, 39])  # keys 0, 7 and 39 of the request
    selection = openmla.make_selection(positions, cache, plan)
    print(selection.positions[0, :4])  # 0, 7, 39 and padding
    ```
    """
    check_kind("selection", "cache", cache, LayerCache)
    check_kind("selection", "plan", plan, Plan)
    if plan.config.indexer is None:
        raise ConfigError(
            f"selection: the plan's config ({plan.config.model_type}) has no indexer. Set "
            "indexer=IndexerConfig(...) in the config, or attend without a selection."
        )
    T, K = plan.num_tokens, plan.config.indexer.topk
    device = plan.slot_mapping.device
    for name, tensor, letters, shape in (
        ("positions", positions, "[T, K]", (T, K)),
        ("lens", lens, "[T]", (T,)),
    ):
        if tensor is None and name == "lens":
            continue
        if not isinstance(tensor, Tensor):
            raise ShapeError(
                f"selection: {name} must be a {letters} int32 tensor, got {type(tensor).__name__}."
            )
        if tensor.shape != shape:
            raise ShapeError(
                f"selection: {name} must be {letters} = {shape} for this plan, "
                f"got {tuple(tensor.shape)}."
            )
        check_alike("selection", name, tensor, torch.int32, device)
    if K > 1 and positions.stride(1) != 1:
        raise ShapeError(
            f"selection: positions must be contiguous along a row, got strides "
            f"{positions.stride()}. Call .contiguous()."
        )
    if cache.latent is None and cache.window is None:
        raise ConfigError(
            "selection: cache has neither latent nor window rows. Pass the LayerCache that the "
            "plan was made for."
        )
    plan.check_cache("selection", cache)
    select = plan.select
    if select is None:
        return None
    own = rows_of(positions, select.rows)
    counts = None if lens is None else rows_of(lens, select.rows)
    if not select.offered:  # across ranks, row_lens count local keys only
        _check_values(own, counts, select.row_lens)
    if counts is not None and plan.group("masked") is not None:  # masks are built from whole rows
        columns = torch.arange(own.shape[1], device=own.device)
        own = own.masked_fill(columns >= counts[:, None], -1)
    if select.offered:
        own, counts = held_here(own, plan, select)
    rows = chosen_rows(own, cache, plan)
    return Selection(own, _all_columns(own, counts)[: rows.shape[0]], rows, select.row_lens)


def carry_selection(
    selection: Selection | None, plan: Plan, cache: LayerCache, other: Plan
) -> Selection | None:
    """Return a selection for another plan of the same step, for layers of another kind.

    Args:
        selection: the selection that was made with `plan`.
        plan: the plan of the layer that selected.
        cache: the cache of the layer that shares the selection.
        other: the plan of that layer, for the same batch, with the same topk.

    Returns:
        The same keys in the order of the other plan's tokens.

    Raises:
        ConfigError: the plans are not of the same step, or ranks share the keys.

    ```python
    from dataclasses import replace

    import openmla, torch

    narrow = openmla.PRESETS["tiny-v3.2"]
    wide = replace(narrow, kv_lora_rank=2 * narrow.kv_lora_rank)
    sizes = {"num_blocks": 3, "block_size": 16, "format": "fp32"}
    cache, other_cache = (openmla.allocate_cache(each, **sizes) for each in (narrow, wide))
    table = torch.tensor([[0, 1, 2]], dtype=torch.int32)
    batch = openmla.Batch([1], [40], table, torch.tensor([39]))
    plan = openmla.make_plan(batch, narrow, cache)
    other = openmla.make_plan(batch, wide, other_cache)
    positions = torch.arange(narrow.indexer.topk, dtype=torch.int32)[None]
    selection = openmla.make_selection(positions, cache, plan)
    carried = openmla.carry_selection(selection, plan, other_cache, other)
    print(torch.equal(carried.positions, selection.positions))  # True
    ```
    """
    mine, its = plan.select, other.select
    if selection is None or mine is its:
        return selection
    alike = mine is not None and its is not None and mine.num_rows == its.num_rows
    if not alike or plan.query_lens != other.query_lens or plan.seq_lens != other.seq_lens:
        raise ConfigError("selection: both plans must be of the same step and have the same topk.")
    assert mine is not None and its is not None
    if mine.offered or its.offered:
        raise ConfigError("selection: layers of two kinds cannot share a selection across ranks.")
    own = selection.positions
    if not (isinstance(mine.rows, slice) and mine.rows == its.rows):
        spread = own.new_full((plan.num_tokens, own.shape[1]), -1)
        spread[mine.rows] = own
        own = spread[its.rows]
    return Selection(own, its.topk_lens, chosen_rows(own, cache, other), its.row_lens)


def _all_columns(positions: Tensor, lens: Tensor | None) -> Tensor:
    if lens is not None:
        return lens
    n, K = positions.shape
    return torch.full((n,), K, dtype=torch.int32, device=positions.device)


def _check_values(positions: Tensor, lens: Tensor | None, row_lens: Tensor) -> None:
    """Check values if they are on a CPU, where reading them needs no sync."""
    if positions.device.type != "cpu" or torch.compiler.is_compiling() or not positions.numel():
        return
    K = positions.shape[1]
    counted = positions
    if lens is not None:
        low, high = (int(value) for value in lens.aminmax())
        if low < 0 or high > K:
            raise ShapeError(f"selection: lens must be within 0..K={K}, got {low}..{high}.")
        counted = positions.masked_fill(torch.arange(K) >= lens[:, None], -1)
    wrong = (counted < -1) | (counted >= row_lens[:, None])
    if bool(wrong.any()):
        t, k = (int(index) for index in wrong.nonzero()[0])
        raise ShapeError(
            f"selection: positions of a token that sees {int(row_lens[t])} keys must be -1 or less "
            f"than {int(row_lens[t])}, got {int(counted[t, k])}."
        )
    ordered = counted.sort(dim=1).values
    twice = (ordered.diff(dim=1) == 0) & (ordered[:, 1:] >= 0)
    if bool(twice.any()):
        t, k = (int(index) for index in twice.nonzero()[0])
        raise ShapeError(
            "selection: positions must not repeat a key of a token, got "
            f"{int(ordered[t, k])} twice."
        )
