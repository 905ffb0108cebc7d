"""Configs of models whose layers differ: one config and one plan per kind, one block pool."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import openmla
from openmla.errors import ConfigError

NARROW = openmla.PRESETS["tiny-v3"]
WIDE = replace(NARROW, num_heads=2, kv_lora_rank=2 * NARROW.kv_lora_rank)
MIXED = openmla.MLAConfig.from_layers([NARROW, WIDE, NARROW])


def test_layers_of_one_kind_have_the_same_config() -> None:
    assert MIXED.kinds == (NARROW, WIDE) and MIXED.layer_kinds == (0, 1, 0)
    assert MIXED.layer(0) is MIXED.layer(2) is MIXED.kinds[0]
    assert [MIXED.kind(layer) for layer in range(3)] == [0, 1, 0]
    assert MIXED.num_heads == NARROW.num_heads


def test_layers_that_are_all_alike_need_no_kinds() -> None:
    config = openmla.MLAConfig.from_layers([NARROW, replace(NARROW)])
    assert config is NARROW and config.layer(1) is NARROW
    assert config.every_kind == (NARROW,) and config.kind(1) == 0


def test_the_kinds_of_v4_are_its_compress_ratios() -> None:
    v4 = openmla.PRESETS["tiny-v4"]
    assert v4.compressor is not None
    ratios = list(v4.compressor.ratios)
    assert [v4.kind(layer) for layer in range(v4.num_layers)] == ratios
    assert v4.layer(0) is v4


def test_the_repr_counts_the_layers_of_each_kind() -> None:
    shown = repr(MIXED)
    assert "kind 0, 2 of 3 layers: " in shown and "kind 1, 1 of 3 layers: " in shown
    assert f"C={NARROW.kv_lora_rank}" in shown and f"C={WIDE.kv_lora_rank}" in shown


@pytest.mark.parametrize("layer", [-1, 3, True, "0"])
def test_a_layer_that_does_not_exist_raises(layer: Any) -> None:
    with pytest.raises(ConfigError, match="layer must be"):
        MIXED.layer(layer)


def test_kinds_must_fit_the_model() -> None:
    changes: tuple[dict[str, Any], ...] = (
        {"layer_kinds": (0, 1)},
        {"layer_kinds": (0, 1, 2)},
        {"kinds": ()},
        {"kinds": (NARROW, MIXED)},
        {"kinds": (NARROW, replace(WIDE, hidden_size=WIDE.hidden_size + 1))},
        {"kinds": (NARROW, openmla.PRESETS["tiny-v4"])},
    )
    for changed in changes:
        with pytest.raises(ConfigError, match="config: "):
            replace(MIXED, **changed)


def test_plans_and_weights_need_the_config_of_one_layer() -> None:
    cache = openmla.allocate_cache(MIXED, num_blocks=4, block_size=16)
    batch = openmla.Batch([1], [1], torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1).long())
    sizes: dict[str, Any] = {"max_requests": 1, "max_tokens": 1}
    for call in (
        lambda: openmla.make_plan(batch, MIXED, cache),
        lambda: openmla.plan_buffers(MIXED, cache, max_blocks=1, **sizes),
        lambda: openmla.warmup(MIXED, cache, **sizes),
        lambda: openmla.absorb(torch.zeros(1, 1), MIXED),
    ):
        with pytest.raises(ConfigError, match=r"Pass config\.layer"):
            call()


def test_kinds_share_a_block_pool_and_have_a_plan_each() -> None:
    """Every layer of a mixed model gives what it gives as a model of its own."""
    pool = openmla.BlockPool(num_blocks=8, block_size=16)
    pool.take({"a": 20, "b": 5})
    table, slots = pool.block_table(["a", "b"]), pool.slot_mapping([("a", 0, 20), ("b", 0, 5)])
    batch = openmla.Batch([20, 5], [20, 5], table, slots)
    positions = torch.cat([torch.arange(20), torch.arange(5)])
    hidden = torch.randn(25, MIXED.hidden_size)
    for number, alone in enumerate((NARROW, WIDE, NARROW)):
        outs = []
        torch.manual_seed(number)
        weights = openmla.MLAAttention(alone).state_dict()
        for config in (MIXED, alone):
            layer = openmla.MLAAttention(config, layer=number)
            layer.load_state_dict(weights)
            sizes: dict[str, Any] = {"num_blocks": 8, "block_size": 16}
            cache = openmla.allocate_cache(config, **sizes, format="fp32", layer=number)
            plan = openmla.make_plan(batch, layer.config, cache)
            with torch.inference_mode():
                outs.append(layer(hidden, positions, cache, plan))
        assert torch.equal(*outs)
