"""Every error of a layer's call: which argument, its value, what to do, and nothing written."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from openmla import (
    PRESETS,
    Batch,
    BlockPool,
    CompressedPool,
    LayerCache,
    MLAAttention,
    MLAAttentionV4,
    allocate_cache,
    make_plan,
)
from tests.layers.v4 import RATIOS
from tests.raising import check_raises

T = 20
LAYERS = ("tiny-v3", "tiny-v3.2", *RATIOS)  # the last ones are those of a V4 model


class Call:
    """A step of T tokens of one request, and the arguments of a layer's call for it."""

    def __init__(self, kind: Any) -> None:
        v4 = isinstance(kind, int)
        self.config = config = PRESETS["tiny-v4" if v4 else str(kind)]
        formats: Any = {"format": "fp32", "index_format": "index_fp32"}
        pool: Any
        if config.compressor is not None:
            number = config.compressor.ratios.index(kind)
            sizes: Any = {"num_blocks": 4, "block_size": 256, "max_requests": 2, "max_tokens": 64}
            self.cache = allocate_cache(config, layer=number, **sizes, **formats)
            assert self.cache.geometry is not None
            pool = CompressedPool(self.cache.geometry)
            pool.take({"a": T})
            self.batch = Batch([T], [T], **pool.tables(["a"])._asdict())
            self.layer: nn.Module = MLAAttentionV4(config, layer=number)
        else:
            self.cache = allocate_cache(config, num_blocks=8, block_size=16, **formats)
            pool = BlockPool(8, 16)
            pool.take({"a": T})
            slots = pool.slot_mapping([("a", 0, T)])
            self.batch = Batch([T], [T], pool.block_table(["a"]), slots)
            self.layer = MLAAttention(config)
        self.plan = make_plan(self.batch, config, self.cache)
        self.hidden = torch.zeros(T, config.hidden_size)
        self.positions = torch.arange(T)
        self.where = type(self.layer).__name__

    @property
    def written(self) -> list[Tensor]:
        return [part.data for part in self.cache.parts]

    def with_max_positions(self, number: int) -> Any:
        config = replace(self.config, max_positions=number)
        return make_plan(self.batch, config, self.cache)


made = lru_cache(Call)  # what raises leaves it as it was


CHANGES: list[tuple[str, Callable[[Call], dict[str, Any]]]] = [
    ("cache and plan are swapped, got a Plan", lambda c: {"cache": c.plan, "plan": c.cache}),
    ("cache must be of type LayerCache, got PagedCache.", lambda c: {"cache": c.cache.parts[0]}),
    ("cache must be of type LayerCache, got NoneType.", lambda c: {"cache": None}),
    ("plan must be of type Plan, got Batch.", lambda c: {"plan": c.batch}),
    ("plan must be of type Plan, got NoneType.", lambda c: {"plan": None}),
    ("plan must be", lambda c: {"plan": c.with_max_positions(4096)}),
    ("hidden must be a tensor, got list.", lambda c: {"hidden": c.hidden.tolist()}),
    ("hidden must be", lambda c: {"hidden": c.hidden[:, 1:]}),
    ("hidden must be", lambda c: {"hidden": c.hidden[None]}),
    ("hidden must be", lambda c: {"hidden": c.hidden.bfloat16()}),
    ("hidden must be", lambda c: {"hidden": c.hidden.to("meta")}),
    ("positions must be a tensor, got list.", lambda c: {"positions": c.positions.tolist()}),
    ("positions must be", lambda c: {"positions": c.positions[1:]}),
    ("positions must be torch.int64, got torch.int32.", lambda c: {"positions": c.positions.int()}),
    ("positions must be", lambda c: {"positions": c.positions.float()}),
    ("positions must be", lambda c: {"positions": c.positions.to("meta")}),
    (
        "the layer must be on cpu like the plan, got meta.",
        lambda c: {"layer": copy.deepcopy(c.layer).to("meta")},
    ),
    (
        "cache must be on cpu like the plan, got meta.",
        lambda c: {
            "cache": LayerCache(
                **{
                    name: replace(part, data=part.data.to("meta"), **scales)
                    for name in ("latent", "window")
                    if (part := getattr(c.cache, name)) is not None
                    for scales in [{"kv_scale": part.kv_scale.to("meta")}]
                },
                ratio=c.cache.ratio,
            )
        },
    ),
]


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize(("says", "changes"), CHANGES, ids=[says[:60] for says, _ in CHANGES])
def test_every_layer_names_the_wrong_argument(
    says: str, changes: Callable[[Call], dict[str, Any]], kind: Any
) -> None:
    call = made(kind)
    usual = {name: getattr(call, name) for name in ("hidden", "positions", "cache", "plan")}
    given = {**usual, **changes(call)}
    layer = given.pop("layer", call.layer)
    check_raises(f"{call.where}: {says}", lambda: layer(*given.values()), *call.written)


@pytest.mark.parametrize("kind", ("tiny-v3", "tiny-v3.2"))
def test_positions_past_the_table(kind: str) -> None:
    call = made(kind)
    op = "latent_write" if kind == "tiny-v3" else "rope"
    for wrong in (call.positions + 10**7, call.positions - 5):
        check_raises(
            f"{op}: positions must be within the table's ",
            partial(call.layer, call.hidden, wrong, call.cache, call.plan),
            *call.written,
        )


@pytest.mark.parametrize("kind", RATIOS)
def test_v4_layers_name_positions_and_compress_ratios(kind: int) -> None:
    call = made(kind)
    for wrong, first in ((call.positions + 1, 1), (call.positions.flip(0), T - 1)):
        check_raises(
            "MLAAttentionV4: positions must count the tokens of each sequence from 0, as the plan "
            f"does, got {first} instead of 0.",
            partial(call.layer, call.hidden, wrong, call.cache, call.plan),
            *call.written,
        )
    for other in set(RATIOS) - {kind}:
        another = made(other)
        says = f"MLAAttentionV4: plan and cache must have this layer's compress ratio {kind}, got "
        for cache, plan, got in (
            (call.cache, another.plan, f"{other} and {kind}. Make"),
            (another.cache, call.plan, f"{kind} and {other}. Make"),
        ):
            check_raises(
                says + got,
                partial(call.layer, call.hidden, call.positions, cache, plan),
                *call.written,
                *another.written,
            )


def test_sparse_layers_name_what_selection_needs() -> None:
    call = made("tiny-v3.2")
    latent_only = LayerCache(latent=call.cache.latent)
    check_raises(
        "MLAAttention: cache has no index rows, and this layer has an indexer. Call allocate",
        lambda: call.layer(call.hidden, call.positions, latent_only, call.plan),
        *call.written,
    )
    shared = MLAAttention(PRESETS["tiny-glm-5.2"], layer=2)
    assert shared.indexer is None
    config = shared.config
    cache = allocate_cache(config, num_blocks=8, block_size=16, format="fp32")
    plan = make_plan(call.batch, config, cache, form="chosen")
    check_raises(
        "MLAAttention: selection is missing: this layer has no indexer. Call layer.attend(select",
        lambda: shared(call.hidden, call.positions, cache, plan),
        *(part.data for part in cache.parts),
    )


def test_blocks_that_were_never_taken() -> None:
    pool, dense = BlockPool(8, 16), made("tiny-v3")
    check_raises(
        "batch: block_table has no blocks for the 5 new tokens of request 0. Call pool.take() for "
        "them before pool.block_table().",
        lambda: Batch([5], [5], pool.block_table(["a"]), torch.arange(5)),
    )
    check_raises(
        "cache: request 'a' has no blocks in the pool. Call pool.take({'a': 5}) before "
        "slot_mapping().",
        lambda: pool.slot_mapping([("a", 0, 5)]),
    )
    geometry = made(4).cache.geometry
    assert geometry is not None and dense.cache.geometry is None
    check_raises(
        "batch: window_table has no blocks for the 20 new tokens of request 0. Call pool.take() "
        "for them before pool.tables().",
        lambda: Batch([T], [T], **CompressedPool(geometry).tables(["a"])._asdict()),
    )
