"""from_hf reads Ling 3.0 (bailing_hybrid) with its head gate, and refuses what is not that."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from openmla import PRESETS, ConfigError, MLAConfig, RopeConfig
from tests.config.checkpoints import LING_3_TINY


def test_ling_3_is_read() -> None:
    assert MLAConfig.from_hf(LING_3_TINY) == MLAConfig(
        model_type="bailing_hybrid",
        hidden_size=1536,
        num_layers=24,
        num_heads=16,
        q_lora_rank=256,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        max_positions=131072,
        rope=RopeConfig(theta=6e6),
        output_gate="head",
    )


def test_object_and_saved_file_agree(tmp_path: Path) -> None:
    """head_dim is KDA's in a checkpoint and the rope's in the object: neither is MLA's."""
    CONFIG_MAPPING = pytest.importorskip("transformers").CONFIG_MAPPING
    if "bailing_hybrid" not in CONFIG_MAPPING:
        pytest.skip("this transformers has no bailing_hybrid")
    fields = {name: value for name, value in LING_3_TINY.items() if name != "model_type"}
    theirs = CONFIG_MAPPING["bailing_hybrid"](**fields)
    assert MLAConfig.from_hf(theirs) == MLAConfig.from_hf(LING_3_TINY)
    theirs.save_pretrained(tmp_path)
    assert MLAConfig.from_hf(tmp_path) == MLAConfig.from_hf(LING_3_TINY)
    flash = MLAConfig.from_hf(CONFIG_MAPPING["bailing_hybrid"]())
    assert flash.q_lora_rank is None and flash.rope.theta == 6e6 and flash.max_positions == 262144
    theirs.architectures = ["BailingMoeV2_5ForCausalLM"]
    with pytest.raises(ConfigError, match=r"Ling 3.0 only.*BailingMoeV2_5"):
        MLAConfig.from_hf(theirs)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["BailingMoeV2_5ForCausalLM"]}, "bailing_hybrid is supported for Ling"),
        ({"architectures": None, "short_conv_kernel_size": None}, "bailing_hybrid is supported"),
        ({"use_mla_nope": True}, "use_mla_nope must be False for bailing_hybrid, got True"),
        ({"rope_interleave": False}, "rope_interleave must be True for bailing_hybrid, got False"),
        ({"use_qkv_bias": True}, "use_qkv_bias must be False for bailing_hybrid, got True"),
        (
            {"gated_attention_proj_granularity_type": "element_wise"},
            "gated_attention_proj_granularity_type must be 'head_wise' (other gates are not",
        ),
        (
            {"rope_parameters": {"rope_type": "default", "mrope_section": [8, 12, 12]}},
            "RoPE field 'mrope_section' is not supported",
        ),
    ],
)
def test_other_models_of_that_name_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        MLAConfig.from_hf({**LING_3_TINY, **changes})
    assert f"config: {message}" in str(error.value)


def test_no_gate_where_no_layer_has_one() -> None:
    with pytest.raises(ConfigError, match="output_gate must be absent with"):
        replace(PRESETS["tiny-v4"], output_gate="head")
