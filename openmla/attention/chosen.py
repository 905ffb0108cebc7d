"""make_selection: positions that someone else's indexer chose, as the step takes them."""

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
    positions: Tensor,  # [T, K] i32, of all the step's tokens; -1: nothing
    cache: LayerCache,
    plan: Plan,
    *,
    lens: Tensor | None = None,  # [T] i32
) -> Selection | None:
    """A Selection of the caller's own: the keys each token attends to, counted from 0 in its
    request (of V4: entries). None where the plan has no token that chooses: all attend to all.

    K is the indexer's topk. `lens` says that only the first so many of a token's columns count,
    which spares looking at the others. Causality is the caller's. On a CPU values are checked: keys
    that the token sees, none of them twice. Layers that share a choice share the result; it belongs
    to this plan.
    """
    check_kind("selection", "cache", cache, LayerCache)
    check_kind("selection", "plan", plan, Plan)
    if plan.config.indexer is None:
        raise ConfigError("selection: config must have an indexer, got none.")
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
                f"selection: {name} must be {letters} with {shape} as planned, "
                f"got {tuple(tensor.shape)}."
            )
        check_alike("selection", name, tensor, torch.int32, device)
    if K > 1 and positions.stride(1) != 1:
        raise ShapeError(
            f"selection: positions must be contiguous along a row, got strides "
            f"{positions.stride()}."
        )
    if cache.latent is None and cache.window is None:
        raise ConfigError("selection: cache must have latent rows, got none.")
    plan.check_cache("selection", cache)
    select = plan.select
    if select is None:
        return None
    own = rows_of(positions, select.rows)
    counts = None if lens is None else rows_of(lens, select.rows)
    if not select.offered:  # over ranks row_lens are those here
        _check_values(own, counts, select.row_lens)
    if counts is not None and plan.group("masked") is not None:  # a mask is made of whole rows
        columns = torch.arange(own.shape[1], device=own.device)
        own = own.masked_fill(columns >= counts[:, None], -1)
    if select.offered:
        own, counts = held_here(own, plan, select)
    rows = chosen_rows(own, cache, plan)
    return Selection(own, _all_columns(own, counts)[: rows.shape[0]], rows, select.row_lens)


def _all_columns(positions: Tensor, lens: Tensor | None) -> Tensor:
    if lens is not None:
        return lens
    n, K = positions.shape
    return torch.full((n,), K, dtype=torch.int32, device=positions.device)


def _check_values(positions: Tensor, lens: Tensor | None, row_lens: Tensor) -> None:
    """On a CPU, where looking is free, and where there is something to look at."""
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
            f"selection: positions must be -1 or one of the {int(row_lens[t])} keys their token "
            f"sees, got {int(counted[t, k])}."
        )
    ordered = counted.sort(dim=1).values
    twice = (ordered.diff(dim=1) == 0) & (ordered[:, 1:] >= 0)
    if bool(twice.any()):
        t, k = (int(index) for index in twice.nonzero()[0])
        raise ShapeError(
            f"selection: positions must name a token's key once, got {int(ordered[t, k])} twice."
        )
