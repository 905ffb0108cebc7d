"""Model families, one entry each: what a model type fixes that its config does not say."""

from __future__ import annotations

from typing import NamedTuple


class Family(NamedTuple):
    """One model type, for from_hf(), attach() and the layers."""

    refused: str = ""  # why neither from_hf() nor attach() takes it
    reads_as: str = ""  # the model type it is another name of; transformers does not have this one
    mark: str = "kv_a_proj_with_mqa"  # what transformers' attention modules have, and no others
    compressed: bool = False  # V4: windows and entries
    pairing: str = "pairs"
    rope_kind: str | None = None  # None: as the config says
    default_theta: float = 10000.0
    needs_rope_fields: bool = False  # a rope dict that says which columns turn, too
    indexer_pairing: str | None = None  # None: no indexer
    indexer_side: str = "first"  # which channels of the indexer are rotated
    indexer_norm: str = "fixed"  # its LayerNorm's epsilon: 1e-6, or "config" for rms_norm_eps
    needs_q_lora: bool = False
    scaled_latents: bool = False
    layers_per_block: int = 1
    head_dim_is_rope: bool = False  # head_dim, where given, is the rope's width
    even_values: bool = False  # v_head_dim, where not given, is a head's share of hidden_size
    needs_kda: bool = False  # beside MLA: an older model without has the same model type
    head_gate: bool = False
    output_gate: bool = False  # which the layers here do not have: attach() only


MODEL_TYPES = {
    "deepseek_v2": Family(),
    "deepseek_v3": Family(),
    "kimi_k2": Family(reads_as="deepseek_v3"),
    "glm4_moe_lite": Family(),
    "youtu": Family(),
    "axk1": Family(),
    "minicpm3": Family(pairing="halves", even_values=True),
    "kimi_linear": Family(rope_kind="none"),
    "mistral4": Family(needs_rope_fields=True),
    "bailing_hybrid": Family(default_theta=6e6, needs_kda=True, head_gate=True),
    "longcat_flash": Family(
        default_theta=1e7,
        needs_q_lora=True,
        scaled_latents=True,
        layers_per_block=2,
        head_dim_is_rope=True,
    ),
    "deepseek_v32": Family(indexer_pairing="halves", needs_q_lora=True),
    "glm_moe_dsa": Family(indexer_pairing="pairs", needs_q_lora=True),
    "axk2": Family(indexer_pairing="halves", needs_q_lora=True, output_gate=True),
    "hy_v4": Family(
        pairing="halves",
        indexer_pairing="halves",
        indexer_side="last",
        indexer_norm="config",
        needs_q_lora=True,
        output_gate=True,
    ),
    "deepseek_v4": Family(
        mark="o_a_proj",
        compressed=True,
        indexer_pairing="pairs",
        indexer_side="last",
        needs_q_lora=True,
    ),
    "mistral_large4_text": Family(
        refused="layers without RoPE have rows of another width, and queries have a learned scale"
    ),
    "glm5_next_text": Family(refused="its indexer scores pools of tokens instead of tokens"),
}

# The same, by who asks: what from_hf() reads, what attach() takes, and what neither does and why.
FAMILIES = {name: family for name, family in MODEL_TYPES.items() if not family.refused}
SUPPORTED = tuple(sorted(name for name, family in FAMILIES.items() if not family.reads_as))
REFUSED = {name: family.refused for name, family in MODEL_TYPES.items() if family.refused}
