"""Size of a model's weights: given, from its files, or estimated from its config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from openmla.cli.sizes import kinds
from openmla.config import MLAConfig
from openmla.config.sources import read_integer

# Fields of models with other layers than MLA, or with experts under other names.
OTHERS = {"linear_attn_config", "layer_group_size", "num_experts", "num_local_experts"}
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}


class Weights(NamedTuple):
    """Bytes of a whole model, and the minimum that a decode step reads."""

    total: float
    read: float
    source: str  # how the size is known


# Fields of the presets' published config.json that MLAConfig leaves out.
_V2 = {
    "vocab_size": 102400, "intermediate_size": 12288, "moe_intermediate_size": 1536,
    "n_routed_experts": 160, "n_shared_experts": 2, "num_experts_per_tok": 6,
    "first_k_dense_replace": 1, "dtype": "bfloat16",
}  # fmt: skip
_V3 = {
    "vocab_size": 129280, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
    "first_k_dense_replace": 3, "quantization_config": {"quant_method": "fp8"},
}  # fmt: skip
_GLM5 = {
    **_V3, "vocab_size": 154880, "intermediate_size": 12288, "quantization_config": None,
    "dtype": "bfloat16",
}  # fmt: skip
FIELDS: dict[str, dict[str, Any]] = {
    "deepseek-v2": _V2,
    "deepseek-v2-lite": {
        **_V2, "intermediate_size": 10944, "moe_intermediate_size": 1408, "n_routed_experts": 64,
    },
    "deepseek-v3": _V3,
    "deepseek-r1": _V3,
    "deepseek-v3.2": _V3,
    "kimi-k2": {
        **_V3, "vocab_size": 163840, "n_routed_experts": 384, "first_k_dense_replace": 1,
    },
    "glm-4.7-flash": {
        **_GLM5, "intermediate_size": 10240, "moe_intermediate_size": 1536, "n_routed_experts": 64,
        "num_experts_per_tok": 4, "first_k_dense_replace": 1,
    },
    "glm-5": _GLM5,
    "glm-5.2": _GLM5,
    "minicpm3": {
        "vocab_size": 73448, "intermediate_size": 6400, "tie_word_embeddings": True,
        "dtype": "bfloat16",
    },
}  # fmt: skip


def estimated(config: MLAConfig, fields: Mapping[str, Any]) -> Weights | None:
    """Estimate the size from the fields of a config.json, without norms, biases, scales and draft
    layers. None if fields are missing, or if a model has several kinds of layers or dtypes."""
    dtype, mixed = _stored(fields), not OTHERS.isdisjoint(fields)
    vocab, dense, expert, experts, shared, chosen, first = (
        read_integer(fields, name, 0)
        for name in (
            "vocab_size", "intermediate_size", "moe_intermediate_size", "n_routed_experts",
            "n_shared_experts", "num_experts_per_tok", "first_k_dense_replace",
        )
    )  # fmt: skip
    unknown = not vocab or not dense or (experts and not expert)
    if config.compressor is not None or mixed or dtype is None or unknown:
        return None
    hidden, dense_layers = config.hidden_size, first if experts else config.num_layers
    listed = fields.get("mlp_layer_types")
    if isinstance(listed, list):
        dense_layers = listed.count("dense")
    sparse_layers = config.num_layers - dense_layers
    embedding = (
        0 if fields.get("tie_word_embeddings") else vocab * hidden
    )  # one row is read per token
    read = vocab * hidden + _attention(config) + 3 * hidden * dense_layers * dense
    read += sparse_layers * hidden * (experts + 3 * expert * (shared + chosen))
    total = embedding + read + sparse_layers * hidden * 3 * expert * (experts - chosen)
    count = f"{total / 1e9:,.1f} B" if total >= 1e9 else f"{total / 1e6:,.1f} M"
    source = f"estimated from {count} parameters in {dtype}"
    return Weights(float(total * BYTES[dtype]), float(read * BYTES[dtype]), source)


def _stored(fields: Mapping[str, Any]) -> str | None:
    """The dtype of most weights, or None if the config does not specify it."""
    quantized = fields.get("quantization_config")
    if quantized:
        method = quantized.get("quant_method") if isinstance(quantized, Mapping) else None
        return "fp8" if method == "fp8" else None
    dtype = fields.get("dtype") or fields.get("torch_dtype")
    return dtype if dtype in BYTES else None


def _attention(config: MLAConfig) -> int:
    """Parameters of attention over all layers."""
    N, H, E = config.hidden_size, config.num_heads, config.qk_head_dim
    P, V, C = config.qk_nope_head_dim, config.v_head_dim, config.kv_lora_rank
    Q = config.q_lora_rank
    queries = N * H * E if Q is None else N * Q + Q * H * E
    each = queries + N * config.latent_dim + C * H * (P + V) + H * V * N
    indexer, keys = config.indexer, 0
    if indexer is not None:
        HI, DI = indexer.num_heads, indexer.head_dim
        own = sum(kind.num_layers for kind in kinds(config) if kind.indexed)
        keys = own * ((Q or N) * HI * DI + N * DI + N * HI)
    return config.num_layers * each + keys
