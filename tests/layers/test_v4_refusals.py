"""MLAAttentionV4, its plans and caches: what is refused, how, and that nothing has changed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from openmla import (
    PRESETS,
    Batch,
    ConfigError,
    LayerCache,
    MLAAttention,
    MLAAttentionV4,
    OpenMLAError,
    PagedCache,
    ShapeError,
    UnsupportedError,
    allocate_cache,
    make_plan,
    plan_buffers,
    warmup,
)
from openmla.attention import IndexInputs, PoolInputs, attend_compressed
from tests.layers.v4 import RATIOS, Server, make_layer, sequence, tiny_config


def test_grad_is_refused() -> None:
    with torch.inference_mode(False), torch.enable_grad():
        layer = make_layer(tiny_config(), 4)
        assert not any(parameter.requires_grad for parameter in layer.parameters())
        server = Server(layer, {"r": sequence(20).requires_grad_()})
        before = server.bytes()
        with pytest.raises(UnsupportedError, match=r"Run under torch\.inference_mode\(\)"):
            server.step([("r", 20)])
        assert server.unchanged(before)


def ready(ratio: int = 4, **options: Any) -> tuple[Server, Batch]:
    """A server about to take three more tokens of one request and one of another."""
    layer = make_layer(tiny_config(), ratio)
    hidden = {name: sequence(200, seed) for seed, name in enumerate("ab")}
    server = Server(layer, hidden, **options)
    server.step([("a", 140), ("b", 12)])
    return server, server.batch([("a", 3), ("b", 1)])


def changed(table: Tensor | None, place: tuple[int, ...], value: int) -> Tensor:
    assert table is not None
    table = table.clone()
    table[place] = value
    return table


def refuses(server: Server, batch: Batch, error: type[OpenMLAError], message: str) -> None:
    before = server.bytes()
    with pytest.raises(error) as raised:
        server.plan(batch)
    assert message in str(raised.value)
    assert server.unchanged(before)


@pytest.mark.parametrize("ratio", RATIOS)
def test_bad_rings(ratio: int) -> None:
    server, batch = ready(ratio)
    assert batch.window_table is not None
    bare = replace(batch, window_table=None, state_slots=None)
    message = "batch: window_table and state_slots are missing, which deepseek_v4 needs."
    refuses(server, bare, ShapeError, message)
    short = replace(batch, window_table=batch.window_table[:, :2].contiguous())
    message = (
        "batch: window_table must have room for the 34 rows that request 0 needs in this step "
        "(3 new ones), got 2 blocks of 16. Give the step fewer tokens, or the table more columns."
    )
    refuses(server, short, ShapeError, message)
    column, N = 142 // 16 % batch.window_table.shape[1], server.pool.rows.num_blocks
    for wrong in (-1, N):
        table = changed(batch.window_table, (0, column), wrong)
        message = f"batch: window_table[0, {column}] must be a block of the cache (0..{N - 1}), got"
        refuses(server, replace(batch, window_table=table), ShapeError, f"{message} {wrong}.")
    # positions 140 and 12 have the same place in a block
    table = changed(batch.window_table, (0, column), int(batch.window_table[1, 0]))
    refuses(server, replace(batch, window_table=table), ShapeError, "must name each slot once")


def test_bad_states() -> None:
    for ratio in (4, 128):
        server, batch = ready(ratio)
        assert batch.state_slots is not None
        first = int(batch.state_slots[0])
        for value, message in (
            (-1, "batch: state_slots must not be negative for requests with tokens, got -1."),
            (first, f"batch: state_slots must name each slot once, got {first} twice."),
            (5, "batch: state_slots must be below 5, got 5."),
        ):
            slots = changed(batch.state_slots, (1,), value)
            refuses(server, replace(batch, state_slots=slots), ShapeError, message)
        idle = replace(batch, query_lens=[3, 0], state_slots=changed(batch.state_slots, (1,), -1))
        server.plan(idle)


def test_bad_block_tables() -> None:
    server, batch = ready()
    narrow = replace(batch, block_table=batch.block_table[:, :1].contiguous())
    message = "batch: block_table must have a column for every 32 keys, got M=1 columns for 35 keys"
    refuses(server, narrow, ShapeError, message)
    table = changed(batch.block_table, (0, 1), 16)
    message = "batch: block_table[0, 1] must be a block of the cache (0..15), got 16."
    refuses(server, replace(batch, block_table=table), ShapeError, message)
    server, batch = ready(0)  # looks at no entry
    server.plan(replace(batch, block_table=batch.block_table[:, :0].contiguous()))


def test_bad_batches() -> None:
    _, batch = ready()
    for changes, message in (
        ({"state_slots": None}, "state_slots is missing: DeepSeek V4 needs"),
        ({"window_table": None}, "window_table is missing: DeepSeek V4 needs"),
        ({"slot_mapping": torch.arange(4)}, "slot_mapping must be None with a window_table"),
        ({"window_table": torch.zeros(3, 2, dtype=torch.int32)}, "must be [B, M] int32 with B=2"),
        ({"window_table": torch.zeros(2, 2)}, "window_table must be [B, M] int32 with B=2"),
        ({"state_slots": torch.zeros(2)}, "state_slots must be [B] int32 with B=2"),
        ({"state_slots": torch.zeros(1, dtype=torch.int32)}, "state_slots must be [B] int32"),
    ):
        with pytest.raises(ShapeError) as error:
            replace(batch, **changes)
        assert str(error.value).startswith("batch: ") and message in str(error.value)


def test_bad_plans() -> None:
    server, batch = ready()
    with pytest.raises(ConfigError, match="form must be auto or absorbed for deepseek_v4, got 'ex"):
        server.plan(batch, form="expanded")
    server.plan(batch, form="absorbed")
    cache = server.cache
    assert cache.index is not None
    one = torch.tensor(1.0)
    for changes, message in (
        ({"window": None}, "plan: cache must have window rows for deepseek_v4 and has none."),
        ({"compressed": None}, "plan: cache must have compressed rows for ratio 4."),
        ({"state": None}, "plan: cache must have state rows for ratio 4."),
        ({"index": None}, "plan: cache must have index rows for ratio 4."),
        ({"ratio": 0}, "plan: cache must not have compressed rows for ratio 0."),
        ({"ratio": 128}, "plan: cache must not have index rows for ratio 128."),
        ({"ratio": 8}, "compress ratios, 0, 4, 128, got 8."),
        (
            {"index": PagedCache(torch.zeros(16, 16, 16), "index_fp32", one)},
            "plan: index rows must have 16 blocks of 32, as the entries have, got 16 of 16.",
        ),
        ({"index": PagedCache(torch.zeros(16, 32, 16), "fp32", one)}, "format 'fp32' is not known"),
    ):
        with pytest.raises(ConfigError) as error:
            make_plan(batch, server.layer.config, replace(cache, **changes))
        assert message in str(error.value)
    dense = PRESETS["tiny-v3"]
    with pytest.raises(ShapeError, match="batch: slot_mapping is missing"):
        make_plan(batch, dense, allocate_cache(dense, num_blocks=2, block_size=128))


@pytest.mark.parametrize("ratio", RATIOS)
def test_bad_steps_write_nothing(ratio: int) -> None:
    """The function below the layer looks at what it is given before it writes."""
    server, batch = ready(ratio)
    config, plan = server.layer.config, server.plan(batch)
    table = torch.ones(config.max_positions, config.qk_rope_head_dim)
    usual: dict[str, Any] = {"sink": torch.zeros(4), "table": table}
    q, rows = torch.zeros(4, 4, 32), torch.zeros(4, 32)
    before = server.bytes()

    def refused(message: str, *, cache: LayerCache = server.cache, **changes: Any) -> None:
        given: dict[str, Any] = {"q": q, "rows": rows, "plan": plan, **usual, **changes}
        ordered = [given.pop("q"), given.pop("rows"), cache, given.pop("plan")]
        with pytest.raises(OpenMLAError) as error:
            attend_compressed(*ordered, **given)
        assert str(error.value).startswith(f"step: {message}")

    refused("q must be (4, 4, 32) for this plan, got (3, 4, 32)", q=q[:3])
    refused("q must be (4, 4, 32) for this plan, got (4, 3, 32)", q=q[:, :3])
    refused("rows must be (4, 32) for this plan, got (4, 31)", rows=rows[:, :31])
    refused(
        "the plan's config (deepseek_v3) has no compressor",
        plan=replace(plan, config=PRESETS["tiny-v3"]),
    )
    refused("cache has no window rows", cache=LayerCache())
    other = ready(RATIOS[RATIOS.index(ratio) - 1])[0].cache
    refused(f"cache must have the plan's compress ratio {ratio}, got {other.ratio}", cache=other)
    width = 64 if ratio == 4 else 32
    pools = torch.zeros(4, width)
    pool_inputs = PoolInputs(pools, pools, torch.zeros(max(ratio, 1), width), torch.ones(32))
    if not ratio:
        refused("pool_inputs must be None for ratio 0", pool_inputs=pool_inputs)
        refused("sink must be [H] = (4,), got (3,)", sink=torch.zeros(3))
        refused("sink must be torch.float32 like the", sink=torch.zeros(4, dtype=torch.float64))
        refused("q must be torch.float32 like the other inputs, got torch.float16", q=q.half())
        assert server.unchanged(before)
        return
    refused(f"pool_inputs is missing for ratio {ratio}.")
    usual["pool_inputs"] = pool_inputs
    if ratio == 4:
        refused("index_pool_inputs is missing for ratio 4.")
        keys = torch.zeros(4, 2 * 16)
        usual["index_pool_inputs"] = PoolInputs(keys, keys, torch.zeros(4, 32), torch.ones(16))
        usual["index"] = IndexInputs(torch.zeros(4, 16, 16), torch.zeros(4, 16), None)
        refused("q_idx must be", index=IndexInputs(torch.zeros(4, 16, 8), torch.zeros(4, 16), None))
        halves = usual["index"]._replace(w_idx=torch.zeros(4, 16).half())
        refused(
            "w_idx must be torch.float32 like the other inputs, got torch.float16", index=halves
        )
        wide = usual["index_pool_inputs"]._replace(kv=keys.double(), score=keys.double())
        refused(
            "cache.state must be torch.float64 for torch.float64 tokens", index_pool_inputs=wide
        )
        wide = usual["index_pool_inputs"]._replace(score=keys.double())
        refused(
            "index_pool_inputs.score must be torch.float32 like the oth", index_pool_inputs=wide
        )
        assert server.cache.index is not None
        part = server.cache.index
        narrow = PagedCache(part.data[:, :, :-1], part.format, part.kv_scale)
        refused("index rows must be W=16 wide", cache=replace(server.cache, index=narrow))
    refused("sink must be [H] = (4,), got (3,)", sink=torch.zeros(3))
    refused("pool_inputs.kv must be", pool_inputs=pool_inputs._replace(kv=pools[:3]))
    refused("pool_inputs.bias must be", pool_inputs=pool_inputs._replace(bias=pool_inputs.bias[1:]))
    refused("table must have a row for", table=table[:50])
    refused("table must be torch.float32 like the other inputs", table=table.half())
    refused(
        "pool_inputs.bias must be on cpu, got meta",
        pool_inputs=pool_inputs._replace(bias=pool_inputs.bias.to("meta")),
    )
    refused("sink must be torch.float32 like the other inputs", sink=torch.zeros(4).double())
    refused("q must be torch.float32 like the other inputs, got torch.float16", q=q.half())
    assert server.unchanged(before)


@pytest.mark.parametrize("ratio", RATIOS)
def test_positions_past_the_model_write_nothing(ratio: int) -> None:
    config = replace(tiny_config(), max_positions=100)
    server = Server(make_layer(config, ratio), {"r": sequence(200)})
    server.step([("r", 99)])
    before = server.bytes()
    with pytest.raises(ShapeError, match="seq_lens must be at most max_positions=100, got 101"):
        server.plan(server.batch([("r", 2)]))
    assert server.unchanged(before)


def test_what_a_plan_cannot_do() -> None:
    server, batch = ready(4)
    with pytest.raises(OpenMLAError, match="workspace_tokens must be None for deepseek_v4"):
        make_plan(batch, server.layer.config, server.cache, workspace_tokens=64)
    sizes: dict[str, Any] = {"max_requests": 4, "max_tokens": 16, "max_blocks": 8}
    others = plan_buffers(ready(128)[0].layer.config, ready(128)[0].cache, **sizes)
    kept = {name: buffer.clone() for name, buffer in others.items()}
    with pytest.raises(ConfigError, match="into must be made for compress ratio 4, got 128"):
        make_plan(batch, server.layer.config, server.cache, into=others)
    assert all(torch.equal(others[name], buffer) for name, buffer in kept.items())
    with pytest.raises(ConfigError, match="would quantize the rotated columns"):
        allocate_cache(
            server.layer.config, num_blocks=1, block_size=128, format="fp8_ds_mla",
            max_requests=1, max_tokens=1,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 64}, "block_size must be a multiple of 128 for deepseek_v4, got 64"),
        ({"block_size": 192}, "block_size must be a multiple of 128 for deepseek_v4, got 192"),
        ({"max_requests": None}, "max_requests must be a positive integer for deepseek_v4, got N"),
        ({"max_tokens": 0}, "max_tokens must be a positive integer for deepseek_v4, got 0"),
        ({"window_block_size": 1.5}, "window_block_size must be a positive integer for deepseek"),
        ({"rollback": -1}, "rollback must be an integer of at least 0, got -1"),
        ({"format": "fp8_dsv4"}, "format fp8_dsv4 needs rows of a multiple of 64 values"),
        ({"index_format": "bf16"}, "format 'bf16' is not known for index rows"),
        ({"layer": -1}, "layer must be an integer of at least 0, got -1"),
        ({"layer": 99}, "layer must be in 0..2, or a draft layer up to 10, got 99"),
    ],
)
def test_bad_caches(changes: dict[str, Any], message: str) -> None:
    given = {"num_blocks": 2, "block_size": 128, "max_requests": 1, "max_tokens": 8, "layer": 1}
    with pytest.raises(ConfigError) as error:
        allocate_cache(tiny_config(), **{**given, **changes})
    assert message in str(error.value)


def test_other_models_are_refused_by_name() -> None:
    config = tiny_config()
    with pytest.raises(
        UnsupportedError, match=r"MLAAttention: deepseek_v4 has a compressor. Use MLAAttentionV4"
    ):
        MLAAttention(config)
    for name in ("tiny-v3", "tiny-v3.2"):
        with pytest.raises(UnsupportedError, match=r"has no compressor\. Use MLAAttention"):
            MLAAttentionV4(PRESETS[name], layer=0)
    assert config.compressor is not None
    for ratio in (3, 2, -4, 64, True):
        with pytest.raises(ConfigError, match=r"compress_ratios\[1\] must be 0, 1, 4 or 128, got"):
            replace(config.compressor, ratios=(0, ratio, 128))
    with pytest.raises(UnsupportedError, match="attention_bias is not supported"):
        MLAAttentionV4(replace(config, attention_bias=True), layer=0)
    nope = replace(config, rope=replace(config.rope, kind="none"))
    with pytest.raises(UnsupportedError, match="RoPE kind 'none' is not supported"):
        MLAAttentionV4(nope, layer=0)
    assert config.indexer is not None
    odd = replace(config, indexer=replace(config.indexer, head_dim=24))
    with pytest.raises(
        UnsupportedError, match="hadamard needs a head_dim of a power of two, got 24"
    ):
        MLAAttentionV4(odd, layer=1)
    MLAAttentionV4(odd, layer=1, hadamard=False)
    for number in (11, 99):
        with pytest.raises(
            ConfigError, match=r"layer must be in 0\.\.2, or a draft layer up to 10"
        ):
            MLAAttentionV4(config, layer=number)


def test_a_cache_of_another_kind() -> None:
    config = tiny_config()
    layer = make_layer(config, 0)
    server = Server(layer, {"r": sequence(10)})
    batch = server.batch([("r", 10)])
    latent = LayerCache(latent=server.cache.window)
    with pytest.raises(ConfigError, match="plan: cache must have window rows for deepseek_v4"):
        make_plan(batch, config, latent)
    with pytest.raises(ConfigError, match="warmup: cache has no window rows"):
        warmup(config, latent, max_requests=1, max_tokens=1)


def test_config_with_ratio_one_is_window_only() -> None:
    config = tiny_config()
    assert config.compressor is not None
    same = replace(config, compressor=replace(config.compressor, ratios=(1, 4, 128)))
    assert same == config and make_layer(same, 0).compressor is None
