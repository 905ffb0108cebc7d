"""RopeTable: a buffer of the layer, real whatever was traced before, float32, shared on request."""

from __future__ import annotations

from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from openmla import (
    PRESETS,
    Batch,
    BlockPool,
    ConfigError,
    MLAAttention,
    MLAAttentionV4,
    MLAConfig,
    RopeTable,
    allocate_cache,
    make_plan,
)
from openmla.layers.rope import rope_table

CONFIG = PRESETS["tiny-v3"]


def step(layer: MLAAttention, mode: Any = None, tokens: int = 7) -> tuple[Tensor, Tensor]:
    """One prompt from an empty cache: what comes out, and the rows that were written."""
    cache = allocate_cache(layer.config, num_blocks=4, block_size=4, format="fp32")
    pool = BlockPool(4, 4)
    pool.take({"a": tokens})
    slots = pool.slot_mapping([("a", 0, tokens)])
    batch = Batch([tokens], [tokens], pool.block_table(["a"]), slots)
    plan = make_plan(batch, layer.config, cache)
    hidden = torch.randn(tokens, layer.config.hidden_size, generator=torch.manual_seed(0))
    with mode or nullcontext():
        out = layer(hidden, torch.arange(tokens), cache, plan)
    assert cache.latent is not None
    return out, cache.latent.data.flatten(0, 1)[slots]


def filled(config: MLAConfig = CONFIG, **options: Any) -> MLAAttention:
    torch.manual_seed(1)
    layer = MLAAttention(config, **options)
    for parameter in layer.parameters():
        if parameter.dim() > 1:
            parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
    return layer


def test_tracing_leaves_nothing_behind() -> None:
    """A pass of fake tensors before the first real one: the real one writes, and rotates."""
    config = replace(CONFIG, max_positions=48)  # nobody else's
    layer = filled(config)
    step(layer, FakeTensorMode(allow_non_fake_inputs=True))
    with FakeTensorMode():
        MLAAttention(config)
    out, rows = step(layer)
    assert rows.abs().sum(dim=1).gt(0).all()
    expected = step(filled())
    torch.testing.assert_close(out, expected[0], rtol=0, atol=0)
    torch.testing.assert_close(rows, expected[1], rtol=0, atol=0)


def test_compiled_steps_take_the_table_as_it_is() -> None:
    """No graph computes angles: the table is an input like a weight."""
    layer = filled()
    seen: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op != "placeholder")
        return graph.forward

    eager = step(layer)
    torch._dynamo.reset()
    layer.forward = torch.compile(layer.forward, backend=backend)  # type: ignore[method-assign]
    torch.testing.assert_close(step(layer)[0], eager[0])
    assert seen and not any("cos" in name or "outer" in name for name in seen)


def test_moves_with_the_layer_and_stays_float32(device: str) -> None:
    layer = filled().to(device)
    table = layer.rope_table
    assert table is not None
    before = table.table.clone()
    for moved in (layer.half(), layer.double(), deepcopy(layer), layer.bfloat16()):
        assert moved.rope_table is not None and moved.rope_table.table.dtype == torch.float32
        assert torch.equal(moved.rope_table.table, before)
    assert not any("rope" in name for name in layer.state_dict())
    emptied = layer.to("meta").to_empty(device=device).rope_table
    assert emptied is not None and torch.equal(emptied.table, before)
    with torch.device("meta"):
        made = MLAAttention(CONFIG)
    made = made.to_empty(device=device)
    assert made.rope_table is not None and torch.equal(made.rope_table.table, before)


def test_layers_may_share_one() -> None:
    first = filled()
    second = filled(layer=1, rope_table=first.rope_table)
    both = torch.nn.ModuleList([first, second]).double().float()
    assert both[0].rope_table.table is both[1].rope_table.table  # type: ignore[union-attr]
    torch.testing.assert_close(step(second)[0], step(first)[0], rtol=0, atol=0)
    other = RopeTable(PRESETS["tiny-v2-lite"].rope, 4, 32)
    with pytest.raises(
        ConfigError,
        match="rope: rope_table must have the RoPE settings of the layer, 'yarn' with R=",
    ):
        filled(rope_table=other)


def test_v4_layers_by_ratio() -> None:
    config = PRESETS["tiny-v4"]
    assert config.compressor is not None
    first, second = (
        next(n for n, ratio in enumerate(config.compressor.ratios) if bool(ratio) is wanted)
        for wanted in (False, True)
    )
    plain = MLAAttentionV4(config, layer=first)
    with pytest.raises(ConfigError, match="or other factors"):
        MLAAttentionV4(config, layer=second, rope_table=plain.rope_table)
    pooled = MLAAttentionV4(config, layer=second)
    R, positions = config.qk_rope_head_dim, config.max_positions
    assert torch.equal(pooled.rope_table.table, rope_table(config.compressor.rope, R, positions))
