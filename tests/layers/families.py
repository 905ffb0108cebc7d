"""Tiny attention modules of transformers, one per family, to compare with; float32, random."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from openmla import MLAAttention, MLAConfig
from tests.config.checkpoints import CHECKPOINTS

Json = dict[str, Any]
ORIGINAL = 48  # positions before stretching: short, so that tests cross it


def _yarn(**more: Any) -> Json:
    return {
        "type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": ORIGINAL,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.9,
        "mscale_all_dim": 0.7,
        **more,
    }


_V3 = {**CHECKPOINTS["tiny-v3"], "max_position_embeddings": 512, "rope_scaling": _yarn()}
_PLAIN: Json = {"rope_scaling": None, "rope_theta": 10000.0}

FAMILIES: dict[str, Json] = {
    "deepseek_v2": {**_V3, "model_type": "deepseek_v2"},
    "deepseek_v2-lite": {**_V3, "model_type": "deepseek_v2", "q_lora_rank": None, **_PLAIN},
    "deepseek_v3": _V3,
    "deepseek_v3-halves-bias": {**_V3, "rope_interleave": False, "attention_bias": True},
    "glm4_moe_lite": {**CHECKPOINTS["tiny-glm"], "max_position_embeddings": 512},
    "minicpm3": {**CHECKPOINTS["tiny-minicpm3"], "max_position_embeddings": 512, **_PLAIN},
    "minicpm3-longrope": {
        **CHECKPOINTS["tiny-minicpm3"],
        "max_position_embeddings": 512,
        "rope_scaling": {
            "type": "longrope",
            "factor": 4.0,
            "short_factor": [1.0, 1.1, 1.2, 1.3],
            "long_factor": [1.0, 1.5, 3.0, 5.0],
            "original_max_position_embeddings": 512,
        },
    },
    "longcat_flash": {**CHECKPOINTS["tiny-longcat"], "max_position_embeddings": 512},
    "mistral4": {
        **CHECKPOINTS["tiny-mistral4"],
        "max_position_embeddings": 512,
        "rope_parameters": _yarn(rope_theta=10000.0, llama_4_scaling_beta=0.3),
    },
}


# with a gate per head
GATED: dict[str, Json] = {
    "bailing_hybrid": {
        **{name: value for name, value in _V3.items() if not name.startswith("rope")},
        "architectures": ["BailingMoeV3ForCausalLM"],
        "model_type": "bailing_hybrid",
        "q_lora_rank": None,
        "rope_theta": 6000000.0,
        "short_conv_kernel_size": 4,
    },
}
_TINY_INDEX: Json = {"index_n_heads": 16, "index_head_dim": 16, "index_topk": 24}
SPARSE: dict[str, Json] = {
    "deepseek_v32": {**_V3, "model_type": "deepseek_v32", **_TINY_INDEX},
    "glm_moe_dsa": {
        **_V3,
        "model_type": "glm_moe_dsa",
        "num_hidden_layers": 3,
        "rope_scaling": None,
        "indexer_types": ["full", "full", "shared"],
        **_TINY_INDEX,
    },
}


# columns that are shared but never rotated
UNROTATED: dict[str, Json] = {
    "kimi_linear": {
        **{name: value for name, value in _V3.items() if not name.startswith("rope")},
        "model_type": "kimi_linear",
        "q_lora_rank": None,
        "layer_types": ["full_attention"] * 3,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
    },
}


class Peer(NamedTuple):
    """A transformers attention module, its rope if any, and our layer with the same weights."""

    theirs: nn.Module
    rotary: nn.Module | None
    ours: MLAAttention

    def full(self, hidden: Tensor) -> Tensor:
        """Their output for a whole sequence [S, hidden] at positions 0.."""
        S = hidden.shape[0]
        positions = torch.arange(S)[None]
        causal = torch.ones(S, S, dtype=torch.bool).tril()[None, None]
        out = self.theirs(
            hidden_states=hidden[None],
            position_embeddings=self.rotary and self.rotary(hidden[None], positions),
            attention_mask=causal if hasattr(self.theirs, "indexer") else None,
            position_ids=positions,
        )
        result: Tensor = out[0][0]
        return result


def make_peer(family: str, seed: int = 0) -> Peer:
    """Both modules with the same random weights of unit gain."""
    from transformers import CONFIG_MAPPING

    fields = {**FAMILIES, **GATED, **SPARSE, **UNROTATED}[family]
    if fields["model_type"] not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {fields['model_type']}")
    given = {name: value for name, value in fields.items() if name != "model_type"}
    config = CONFIG_MAPPING[fields["model_type"]](**given)
    config._attn_implementation = "sdpa"
    name = fields["model_type"]
    modeling = import_module(f"transformers.models.{name}.modeling_{name}")
    attention = next(
        getattr(modeling, entry)
        for entry in dir(modeling)
        if entry.endswith(("Attention", "FlashMLA")) and not entry.endswith("FlashAttention")
    )
    rotary = [getattr(modeling, n) for n in dir(modeling) if n.endswith("RotaryEmbedding")]
    torch.manual_seed(seed)
    theirs = attention(config, layer_idx=0).eval().requires_grad_(False)
    for parameter in theirs.parameters():
        noise = torch.randn_like(parameter)
        if parameter.dim() > 1:
            parameter.copy_(noise * parameter.shape[-1] ** -0.5)
        else:
            parameter.add_(0.2 * noise)
    # transformers fixes the latent norms' epsilon, whatever the config says
    ours = MLAAttention(replace(MLAConfig.from_hf(config), latent_eps=1e-6))
    ours.load_state_dict(theirs.state_dict())
    return Peer(theirs, rotary[0](config) if rotary else None, ours)
