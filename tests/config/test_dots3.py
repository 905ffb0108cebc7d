"""from_hf reads dots3, flat and canonical, into a config for each kind of layer."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from openmla import ConfigError, MLAConfig, RopeConfig
from openmla.config import IndexerConfig
from tests.config.checkpoints import DOTS3_TINY

INDEXED = MLAConfig(
    model_type="dots3_note_text",
    hidden_size=64,
    num_layers=6,
    num_heads=4,
    q_lora_rank=48,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=24,
    max_positions=512,
    rope=RopeConfig(theta=10000.0),
    latent_eps=1e-5,
    q_factor=(64 / 48) ** 0.5,
    latent_factor=(64 / 32) ** 0.5,
    output_gate="head",
    rope_norm=True,
    indexer=IndexerConfig(16, 16, 16, pairing="pairs"),
)
SLIDING = replace(
    INDEXED,
    num_heads=2,
    q_lora_rank=40,
    kv_lora_rank=48,
    qk_nope_head_dim=12,
    qk_rope_head_dim=12,
    v_head_dim=20,
    rope=RopeConfig(theta=500.0),
    q_factor=(64 / 40) ** 0.5,
    latent_factor=(64 / 48) ** 0.5,
    window=12,
    indexer=None,
)
MIXED = MLAConfig.from_layers([INDEXED, INDEXED, SLIDING, SLIDING, SLIDING, INDEXED])
CANONICAL: dict[str, Any] = {
    **{
        name: value
        for name, value in DOTS3_TINY.items()
        if not name.startswith(("swa_", "use_", "rope_theta", "sliding_"))
    },
    "model_type": "dots3_note_text",
    "sliding_window": 12,
    "layer_types": [
        *["indexed_attention"] * 2, *["sliding_attention"] * 3, "indexed_attention",
    ],
    "rope_parameters": {
        "indexed_attention": {
            "rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.25,
        },
        "sliding_attention": {
            "rope_theta": 500.0, "rope_type": "default", "partial_rotary_factor": 0.5,
        },
    },
    "per_layer_config": {
        layer: {
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "q_lora_rank": 40,
            "kv_lora_rank": 48,
            "head_dim": 24,
            "qk_nope_head_dim": 12,
            "qk_rope_head_dim": 12,
            "v_head_dim": 20,
        }
        for layer in ("2", "3", "4")
    },
}  # fmt: skip


def test_both_forms_are_read() -> None:
    assert MLAConfig.from_hf(DOTS3_TINY) == MIXED
    assert MLAConfig.from_hf(CANONICAL) == MIXED


def test_transformers_writes_what_is_read(tmp_path: Path) -> None:
    CONFIG_MAPPING = pytest.importorskip("transformers").CONFIG_MAPPING
    if "dots3_note_text" not in CONFIG_MAPPING:
        pytest.skip("this transformers has no dots3_note_text")
    fields = {name: value for name, value in DOTS3_TINY.items() if name != "model_type"}
    theirs = CONFIG_MAPPING["dots3_note_text"](**fields)
    assert MLAConfig.from_hf(theirs) == MIXED
    theirs.save_pretrained(tmp_path)
    assert MLAConfig.from_hf(tmp_path) == MIXED
    wrapper = CONFIG_MAPPING["dots3_note"](
        **fields, vision_config={"adapter_out_dim": 64}, audio_config={"adapter_out_dim": 64}
    )
    assert MLAConfig.from_hf(wrapper) == MIXED
    assert MLAConfig.from_hf(json.loads(wrapper.to_json_string())) == MIXED


def test_the_released_geometry() -> None:
    """The defaults of transformers' class, as no config.json was at hand."""
    config = MLAConfig.from_hf(
        {
            "model_type": "dots3_note",
            "hidden_size": 5120,
            "num_hidden_layers": 46,
            "num_attention_heads": 128,
            "q_lora_rank": 1024,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "max_position_embeddings": 524288,
            "rms_norm_eps": 1e-5,
            "index_n_heads": 64,
            "index_head_dim": 128,
            "index_topk": 2048,
        }
    )
    indexed, sliding = config.kinds
    assert [i for i in range(46) if not config.kind(i)] == [0, 1, *range(5, 46, 4)]
    assert (indexed.latent_dim, indexed.num_heads, indexed.rope.theta) == (576, 128, 8e7)
    assert (sliding.latent_dim, sliding.num_heads, sliding.rope.theta) == (1088, 64, 5e4)
    assert (indexed.window, sliding.window) == (0, 512)
    assert (indexed.scale, sliding.scale) == (192**-0.5, 256**-0.5)


def test_full_layers() -> None:
    full = replace(INDEXED, indexer=None)
    config = MLAConfig.from_hf({**DOTS3_TINY, "use_dsa": False})
    assert config.kinds == (full, SLIDING)
    assert MLAConfig.from_hf({**DOTS3_TINY, "use_sliding_window": False}) == INDEXED
    types = ["full_attention", "indexed_attention", "sliding_attention"] * 2
    ropes = {**CANONICAL["rope_parameters"], "full_attention": {"rope_theta": 1e4}}
    parts = {str(layer): CANONICAL["per_layer_config"]["2"] for layer in (2, 5)}
    changes = {"layer_types": types, "rope_parameters": ropes, "per_layer_config": parts}
    assert MLAConfig.from_hf({**CANONICAL, **changes}).kinds == (full, INDEXED, SLIDING)
    assert MLAConfig.from_hf({**DOTS3_TINY, "layer_types": types}).kinds == (INDEXED, SLIDING)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_gate_type": "elementwise"}, "attention_gate_type must be 'headwise'"),
        ({"swa_attention_gate_type": "elementwise"}, "swa_attention_gate_type must be 'headwise'"),
        ({"apply_mla_qkv_lora_rescale": False}, "apply_mla_qkv_lora_rescale must be True"),
        ({"indexer_rope_interleave": False}, "indexer_rope_interleave must be True"),
        ({"q_lora_rank": None}, "q_lora_rank is missing"),
        ({"swa_num_key_value_heads": 1}, "num_key_value_heads must be 2"),
        ({"sliding_window_size": 0.5}, "sliding_window must be an integer, got 0.5"),
        ({"sliding_window": -1}, "sliding_window must be a positive integer, got -1"),
        ({"layer_types": ["full_attention"]}, "layer_types must be a list of 6 types"),
        ({"layer_types": ["mamba"] * 6}, "layer_types must be some of .*, got 'mamba'"),
        ({"rope_scaling": {"factor": 2.0}}, "rope_parameters must have a dict for"),
        ({"per_layer_config": {"two": {}}}, "per_layer_config must be a dict of dicts"),
        ({"per_layer_config": [1]}, "per_layer_config must be a dict of dicts"),
    ],
    ids=str,
)
def test_what_is_not_supported_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MLAConfig.from_hf({**DOTS3_TINY, **changes})
