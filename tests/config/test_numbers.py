"""MLAConfig.from_numbers: what an engine's layer knows is enough to plan, not to make a layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from openmla import (
    PRESETS,
    CompressorConfig,
    ConfigError,
    IndexerConfig,
    MLAAttention,
    MLAAttentionV4,
    MLAConfig,
    RopeConfig,
    RopeTable,
    allocate_cache,
    warmup,
)
from openmla.layers.indexer import Indexer

V3: dict[str, Any] = {
    "num_heads": 128,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
V4 = CompressorConfig((0, 4, 128), 128, 1, 1, RopeConfig("external"))


def test_numbers_of_a_preset() -> None:
    preset = PRESETS["deepseek-v3"]
    config = MLAConfig.from_numbers(**V3, scale=preset.scale)
    assert config.scale == preset.scale != MLAConfig.from_numbers(**V3).scale == 192**-0.5
    assert (config.latent_dim, config.qk_head_dim) == (preset.latent_dim, preset.qk_head_dim)
    assert "projected by others" in repr(config) and "scale 0.13" in repr(config)
    assert replace(preset, softmax_scale=0.5).scale == 0.5


def test_indexers_and_compressors() -> None:
    shared = IndexerConfig(64, 128, 2048, shared=(False, True, True))
    assert MLAConfig.from_numbers(**V3, indexer=shared).num_layers == 3
    same = {"kv_lora_rank": 512, "qk_nope_head_dim": 448, "v_head_dim": 512}
    v4 = MLAConfig.from_numbers(
        **{**V3, **same}, indexer=IndexerConfig(64, 128, 512), compressor=V4
    )
    assert (v4.num_layers, v4.latent_dim) == (3, 512)
    none = MLAConfig.from_numbers(**{**V3, "qk_rope_head_dim": 0})
    assert none.latent_dim == 512  # nothing is rotated, by anyone


def test_no_layer_is_made_of_it() -> None:
    config = MLAConfig.from_numbers(**V3, indexer=IndexerConfig(64, 128, 2048))
    for make in (MLAAttention, Indexer, lambda config: MLAAttentionV4(config, layer=0)):
        with pytest.raises(ConfigError, match=r"config has no hidden_size .* made by from_nu"):
            make(config)
    with pytest.raises(ConfigError, match="a config of kind 'external' has no RoPE table"):
        RopeTable(config.rope, 64, 128)
    tiny = PRESETS["tiny-v4"]
    cache = allocate_cache(tiny, num_blocks=2, block_size=128, max_requests=1, max_tokens=4)
    v4 = replace(tiny, hidden_size=0, rope=RopeConfig("external"))
    with pytest.raises(ConfigError, match=r"^warmup: config has no hidden_size"):
        warmup(v4, cache, max_requests=1, max_tokens=4)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"scale": 0.0}, "softmax_scale must be a positive number, got 0.0"),
        ({"scale": float("nan")}, "softmax_scale must be a positive number, got nan"),
        ({"scale": "1"}, "softmax_scale must be a positive number, got '1'"),
        ({"num_heads": 0}, "num_heads must be a positive integer, got 0"),
        ({"qk_nope_head_dim": 0, "qk_rope_head_dim": 0}, "qk_rope_head_dim must be positive, g"),
        ({"max_positions": 0}, "max_positions must be a positive integer, got 0"),
        ({"indexer": IndexerConfig(64, 32, 9)}, "index_head_dim must be at least qk_rope_head_"),
        ({"compressor": V4}, "head_dim must be the same for q, k and v"),
    ],
)
def test_refusals(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"config: .*{message}"):
        MLAConfig.from_numbers(**{**V3, **wrong})


def test_layers_still_need_a_hidden_size() -> None:
    with pytest.raises(ConfigError, match="hidden_size must be a positive integer, got 0"):
        replace(PRESETS["tiny-v3"], hidden_size=0)
