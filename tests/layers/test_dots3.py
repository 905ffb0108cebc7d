"""MLAAttention of dots3's three kinds of layers against their definition in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from openmla import (
    Batch,
    BlockPool,
    ConfigError,
    ShapeError,
    allocate_cache,
    make_plan,
    plan_buffers,
    warmup,
)
from tests.layers.dots3 import INDEXED, KINDS, SLIDING, K, W, definition, make_layer
from tests.layers.serving import Server, relative_error, sequence

LENGTH = 50
WAYS = {
    "full": [LENGTH],
    "token-by-token": [1] * LENGTH,
    "within-the-window": [W - 1, 1, LENGTH - W],
    "past-the-window": [W + 1, 1, 1, LENGTH - W - 3],
    "past-K": [K - 1, 1, 1, 1, LENGTH - K - 2],
    "multi-token": [5, 3] * 6 + [2],
}


@pytest.mark.parametrize("form", ["auto", "absorbed"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_definition(kind: str, way: str, form: str, device: str) -> None:
    hidden = sequence(LENGTH)
    for seed in range(3):
        layer = make_layer(KINDS[kind], seed)
        server = Server(layer, {"r": hidden}, form=form, workspace_tokens=12, device=device)
        for n in WAYS[way]:
            server.step([("r", n)])
        assert relative_error(server.output("r").double(), definition(layer, hidden)) < 1e-5


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_requests_of_all_lengths_in_one_step(kind: str, batch_invariant: bool, device: str) -> None:
    """Below, at and past the window and K, prefill and decode in one step."""
    layer = make_layer(KINDS[kind])
    names = (W - 1, W, W + 1, K, K + 1, 40)
    hidden = {name: sequence(name + 6, name) for name in names}
    server = Server(layer, hidden, batch_invariant=batch_invariant, device=device)
    server.step([(name, name) for name in names[:3]])
    server.step([*((name, 1) for name in names[:3]), *((name, name) for name in names[3:])])
    for _ in range(5):
        server.step([(name, 1) for name in names if server.pool.seq_len(name) < name + 6])
    server.step([(name, 1) for name in names[3:]])
    for name in names:
        assert relative_error(server.output(name).double(), definition(layer, hidden[name])) < 1e-5


def test_short_requests_are_dense_and_longer_ones_read_their_window() -> None:
    """Up to W keys a sliding layer is a full one; past that, W rows of each token are read."""
    server = Server(make_layer(SLIDING), {name: sequence(40) for name in "ab"})
    plan = server.step([("a", W), ("b", 30)])
    expanded, absorbed = plan.group("expanded"), plan.group("absorbed")
    assert expanded is not None and list(expanded.requests) == [0]
    assert absorbed is not None and list(absorbed.requests) == [1]
    shown = str(plan.explain())
    assert f"each over its last {W} keys" in shown and "the only form over a window" in shown
    rows = 30 * W - sum(range(W))
    assert f"absorbed {rows * 60 * 4 / 1024:.1f} KiB" in shown


def test_only_the_rows_of_the_window_are_read() -> None:
    """Every earlier row may hold anything."""
    layer, hidden = make_layer(SLIDING), sequence(31)
    server = Server(layer, {"r": hidden})
    server.step([("r", 30)])
    assert server.cache.latent is not None
    table = server.pool.block_table(["r"])[0].tolist()
    for position in range(30 - W + 1):
        server.cache.latent.data[table[position // 4], position % 4] = torch.nan
    server.step([("r", 1)])
    assert relative_error(server.output("r").double(), definition(layer, hidden)) < 1e-5


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_rows_may_be_rings(block_size: int) -> None:
    """A pool with a window recycles blocks behind it; the layer's outputs stay the same."""
    layer = make_layer(SLIDING)
    hidden = {name: sequence(90, seed) for seed, name in enumerate("ab")}
    server = Server(layer, hidden, block_size=block_size, num_blocks=160 // block_size)
    whole = server.pool
    server.pool = BlockPool(whole.num_blocks, block_size, window=W, rollback=6)
    for wanted in ((20, 1), (1, 1), (1, 40), (W - 1, 1), (1, 1), (3, 30)):
        server.step([("a", wanted[0]), ("b", wanted[1])])
    for name in "ab":  # both go back
        server.pool.truncate(name, server.pool.seq_len(name) - 4)
        server.outputs[name] = [torch.cat(server.outputs[name])[:-4]]
    for _ in range(16):
        server.step([("a", 1), ("b", 1)])
    held = -(-(W + 6) // block_size) + 1
    assert all(len(server.pool.blocks(name)) <= held for name in "ab")
    for name in "ab":
        actual = server.output(name).double()
        assert relative_error(actual, definition(layer, hidden[name][: len(actual)])) < 1e-5


def test_a_captured_step_over_rings() -> None:
    layer, hidden = make_layer(SLIDING), sequence(60)
    server = Server(layer, {"r": hidden})
    server.pool = BlockPool(server.pool.num_blocks, 4, window=W)
    sizes: dict[str, Any] = {"max_requests": 2, "max_tokens": 2, "max_blocks": 5}
    buffers = plan_buffers(layer.config, server.cache, **sizes)
    server.step([("r", 20)])
    for position in range(20, 60):
        server.pool.take({"r": 1})
        slots = server.pool.slot_mapping([("r", position, position + 1)])
        tables = [server.pool.block_table(["r"], num_columns=columns) for columns in (5, 4)]
        batch, narrow = (Batch([1], [position + 1], table, slots) for table in tables)
        plan = server.plan(batch, into=buffers)
        rows = hidden[[position, 0]]
        out = layer(rows, torch.tensor([position, 0]), server.cache, plan)
        server.outputs["r"].append(out[:1])
    with pytest.raises(ConfigError, match="block_table must have 5 columns like the buffers"):
        server.plan(narrow, into=buffers)
    with pytest.raises(ShapeError, match="block_table must have room for the 12 rows"):
        server.plan(Batch([1], [60], tables[0][:, :2], slots))
    assert relative_error(server.output("r").double(), definition(layer, hidden)) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_a_captured_step_serves_all_lengths(kind: str) -> None:
    layer, hidden = make_layer(KINDS[kind]), {n: sequence(40, n) for n in (5, W, 30)}
    server = Server(layer, hidden)
    sizes: dict[str, Any] = {"max_requests": 4, "max_tokens": 4, "max_blocks": 16}
    buffers = plan_buffers(layer.config, server.cache, **sizes)
    server.step([(n, n) for n in hidden])
    for _ in range(8):
        starts = [server.pool.seq_len(n) for n in hidden]
        plan = server.plan(server.batch([(n, 1) for n in hidden]), into=buffers)
        rows = torch.stack([server.sequences[n][s] for n, s in zip(hidden, starts, strict=True)])
        rows, positions = torch.cat([rows, rows[:1]]), torch.tensor([*starts, 0])
        out = layer(rows, positions, server.cache, plan)
        for n, row in zip(hidden, out, strict=False):
            server.outputs[n].append(row[None])
    for n, whole in hidden.items():
        expected = definition(layer, whole[: n + 8])
        assert relative_error(server.output(n).double(), expected) < 1e-5


FORMATS = {"bf16": 4e-3, "fp8": 4e-2, "fp8_ds_mla": 4e-2}


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("window", [W, 0])
def test_rows_of_1088_columns(format: str, window: int, device: str) -> None:
    """The released width of sliding layers: 1024 of a latent and 64 shared ones."""
    config = replace(
        SLIDING, kv_lora_rank=1024, qk_rope_head_dim=64, latent_factor=(64 / 1024) ** 0.5,
        window=window,
    )  # fmt: skip
    layer, hidden = make_layer(config), sequence(30)
    server = Server(layer, {"r": hidden}, format=format, num_blocks=16, device=device)
    assert server.cache.latent is not None
    wide = {"bf16": 1088, "fp8": 1088, "fp8_ds_mla": 1024 + 8 * 4 + 2 * 64}[format]
    assert server.cache.latent.data.shape[2] == wide
    for n in (20, 1, 1, 8):
        server.step([("r", n)])
    assert relative_error(server.output("r").double(), definition(layer, hidden)) < FORMATS[format]


def test_low_precision_layers_stay_close() -> None:
    for config in KINDS.values():
        layer, hidden = make_layer(config, dtype=torch.bfloat16), sequence(LENGTH).bfloat16()
        server = Server(layer, {"r": hidden}, format="bf16", dtype=torch.bfloat16)
        for n in (LENGTH - 5, 1, 4):
            server.step([("r", n)])
        # where bf16 scores tie, another key may be selected
        bound = 5e-2 if config.indexer is not None else 1e-2
        expected = definition(layer, hidden)
        assert relative_error(server.output("r").double(), expected) < bound


@pytest.mark.parametrize("kind", KINDS)
def test_warmup_covers_a_step_of_each_form(kind: str, device: str) -> None:
    config = KINDS[kind]
    server = Server(make_layer(config), {"r": sequence(40)}, device=device)
    sizes: dict[str, Any] = {"max_requests": 2, "max_tokens": 40, "workspace_tokens": 64}
    workspace = warmup(config, server.cache, dtype=torch.float32, **sizes)
    for n in (W, 27, 1):
        server.step([("r", n)], workspace=workspace)
    expected = definition(server.layer, sequence(40))
    assert relative_error(server.output("r").double(), expected) < 1e-5


def test_what_a_window_cannot_be_combined_with() -> None:
    server = Server(make_layer(SLIDING), {"r": sequence(40)})
    with pytest.raises(ConfigError, match="longer than the window of 12 tokens, got 13 tokens"):
        server.step([("r", W + 1)], form="expanded")
    cache = allocate_cache(SLIDING, num_blocks=4, block_size=4)
    table = torch.zeros(1, 1, dtype=torch.int32)
    part = Batch([1], [3], table, causal=False)
    with pytest.raises(ConfigError, match="batch must be the whole step for layers with a window"):
        make_plan(part, SLIDING, cache)
    with pytest.raises(ConfigError, match="window must be 0 with an indexer"):
        replace(INDEXED, window=W)
