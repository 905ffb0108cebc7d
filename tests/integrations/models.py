"""Tiny random language models of every family, float32, for comparison with themselves."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from tests.config.checkpoints import CHECKPOINTS
from tests.layers.families import FAMILIES as ATTENTION

VOCAB = 97
OUTSIDE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
_LONGCAT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "ffn_hidden_size": 96,
    "expert_ffn_hidden_size": 32,
    "n_routed_experts": 4,
    "zero_expert_num": 2,
    "moe_topk": 2,
    "num_hidden_layers": 4,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
_PLAIN_V3 = {**CHECKPOINTS["tiny-v3"], "max_position_embeddings": 512, "rope_scaling": None}
_KIMI_LINEAR = {
    **{name: value for name, value in _PLAIN_V3.items() if not name.startswith("rope")},
    "model_type": "kimi_linear",
    "q_lora_rank": None,
    "num_local_experts": 4,
    "linear_head_dim": 16,
    "linear_num_heads": 4,
    "layer_types": ["linear_attention", "full_attention", "full_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
}
MODELS: dict[str, dict[str, Any]] = {
    **ATTENTION,
    "youtu": {**_PLAIN_V3, "model_type": "youtu"},
    "axk1": {**_PLAIN_V3, "model_type": "axk1"},
    "kimi_linear": _KIMI_LINEAR,
}


def make_model(family: str, seed: int = 0, **changes: Any) -> Any:
    """A causal language model with unit-gain random weights."""
    from transformers import CONFIG_MAPPING

    fields = {**MODELS[family], **changes}
    model_type = fields.pop("model_type")
    outside = _LONGCAT if model_type == "longcat_flash" else OUTSIDE
    if model_type == "kimi_linear":
        outside = {n: v for n, v in OUTSIDE.items() if n not in ("n_routed_experts", "n_group")}
    config = CONFIG_MAPPING[model_type](**{**fields, **outside})
    modeling = import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    cls = next(getattr(modeling, name) for name in dir(modeling) if name.endswith("ForCausalLM"))
    torch.manual_seed(seed)
    model = cls(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
    return model


def padded_prompts(B: int = 5, S: int = 20, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts of different lengths, padded on the left."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, VOCAB, (B, S), generator=generator)
    mask = torch.ones_like(ids)
    for b in range(B):
        mask[b, : 3 * b] = 0
    return ids * mask, mask


def on(device: str, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(tensor.to(device) for tensor in tensors)
