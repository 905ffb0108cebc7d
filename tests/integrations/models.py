"""Tiny random language models of every family, float32, for comparison with themselves."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch

from tests.config.checkpoints import CHECKPOINTS, DOTS3_TINY, MISTRAL_LARGE4_TINY
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
K = 24  # top-k of the sparse models
_SPARSE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "index_head_dim": 16,
    "index_n_heads": 32,  # with few heads, keys tie at exactly zero and vanilla contradicts itself
    "index_topk": K,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
_SHARED = {"indexer_types": ["full", "shared", "full"]}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
SPARSE: dict[str, dict[str, Any]] = {
    "deepseek_v32": {"rope_parameters": _YARN},
    "glm_moe_dsa": _SHARED,
    "axk2": {},
    "hy_v4": _SHARED,
}
_V4: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "q_lora_rank": 32,
    "head_dim": 32,
    "qk_rope_head_dim": 8,
    "index_n_heads": 16,
    "index_head_dim": 16,
    "index_topk": 24,
    "o_groups": 2,
    "o_lora_rank": 16,
    "sliding_window": 32,
    "compress_ratios": [0, 4, 128, 4],
    "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 256},
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
_DOTS3_OUTSIDE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "shared_experts_intermediate_size": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
_PIXTRAL: dict[str, Any] = {
    "model_type": "pixtral",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "head_dim": 8,
    "patch_size": 4,
    "image_size": 16,
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


def make_sparse(family: str, seed: int = 0, **changes: Any) -> Any:
    """One with an indexer; norms, their biases and sinks are random too."""
    from transformers import CONFIG_MAPPING

    config = CONFIG_MAPPING[family](**{**_SPARSE, **SPARSE[family], **changes})
    modeling = import_module(f"transformers.models.{family}.modeling_{family}")
    cls = next(getattr(modeling, name) for name in dir(modeling) if name.endswith("ForCausalLM"))
    torch.manual_seed(seed)
    model = cls(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        noise = torch.randn_like(parameter)
        if parameter.dim() > 1:
            parameter.copy_(noise * parameter.shape[-1] ** -0.5)
        else:
            parameter.add_(0.2 * noise)
    return model


def model_of(family: str, seed: int = 0) -> Any:
    """A dense or a sparse one."""
    if family in SPARSE:
        return make_sparse(family, seed)
    return make_model(family, seed)


def make_v4(seed: int = 0, **changes: Any) -> Any:
    """All three kinds of layers, unit-gain random weights, sinks that matter."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    config = CONFIG_MAPPING["deepseek_v4"](**{**_V4, **changes})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
        elif name.endswith("sinks"):
            parameter.copy_(torch.randn_like(parameter))
    return model


def make_dots3(seed: int = 0, **changes: Any) -> Any:
    """Indexed and sliding layers in which every number differs; norms are random too."""
    import pytest
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    if "dots3_note_text" not in CONFIG_MAPPING:
        pytest.skip("this transformers has no dots3_note_text")
    fields = {name: value for name, value in DOTS3_TINY.items() if name != "model_type"}
    config = CONFIG_MAPPING["dots3_note_text"](**{**fields, **_DOTS3_OUTSIDE, **changes})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        noise = torch.randn_like(parameter)
        if parameter.dim() > 1:
            parameter.copy_(noise * parameter.shape[-1] ** -0.5)
        else:
            parameter.add_(0.2 * noise)
    return model


def make_mistral_large4(seed: int = 0, **changes: Any) -> Any:
    """Layers with and without RoPE; norms, query scales and RoPE factors are random too."""
    import pytest
    from transformers import CONFIG_MAPPING

    text = CONFIG_MAPPING["mistral_large4_text"] if "mistral_large4" in CONFIG_MAPPING else None
    if not hasattr(text, "kv_sharing_modes"):
        pytest.skip("mistral_large4 needs transformers 5.23")
    from transformers import MistralLarge4Config, MistralLarge4ForConditionalGeneration

    config = MistralLarge4Config(
        text_config={**MISTRAL_LARGE4_TINY, **OUTSIDE, **changes},
        vision_config=_PIXTRAL,
        image_token_index=90,
    )
    torch.manual_seed(seed)
    model = MistralLarge4ForConditionalGeneration(config).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        noise = torch.randn_like(parameter)
        if parameter.dim() > 1:
            parameter.copy_(noise * parameter.shape[-1] ** -0.5)
        elif "softmax_scaling" in name:  # 0 and 1 as they are made
            parameter.copy_(0.3 * torch.rand_like(parameter) + (1 if "bias" in name else 0))
        else:
            parameter.add_(0.2 * noise)
    for name, buffer in model.named_buffers():
        if name.endswith("rotary_emb.alpha"):
            buffer.copy_(0.3 * torch.randn_like(buffer))
    return model


def fill(model: Any) -> Any:
    """Unit-gain random weights."""
    torch.manual_seed(0)
    for parameter in model.eval().requires_grad_(False).parameters():
        if parameter.dim() > 1:
            parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
    return model


def make_mistral3(text: Any) -> Any:
    """A vision model around a text model, which is given as a config."""
    from transformers import Mistral3Config, Mistral3ForConditionalGeneration

    config = Mistral3Config(text_config=text, vision_config=_PIXTRAL, image_token_index=90)
    return fill(Mistral3ForConditionalGeneration(config))


# A model of each kind, and a batch for any of them.
MAKERS: dict[str, Callable[..., Any]] = {
    "dense": lambda **changes: make_model("deepseek_v3", **changes),
    "sparse": lambda **changes: make_sparse("deepseek_v32", **changes),
    "v4": make_v4,
}
IDS = torch.randint(2, VOCAB, (2, 40), generator=torch.Generator().manual_seed(0))
# Other weights and prompts on the same path are left to `make test-all` and to GPUs.
SEEDS: list[Any] = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))]


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
