"""Model families, one entry each: properties of a model type that its config does not contain."""

from __future__ import annotations

from typing import NamedTuple

NO_CLASS = "transformers has no class for it"


class Family(NamedTuple):
    """One model type, for from_hf(), attach() and the layers."""

    refused: str = ""  # why from_hf() and attach() do not support it
    unattached: str = ""  # why attach() does not support it
    reads_as: str = ""  # model type that it is an alias of, unknown to transformers
    mark: str = "kv_a_proj_with_mqa"  # attribute that only attention modules in transformers have
    compressed: bool = False  # V4: window and entries
    pairing: str = "pairs"
    rope_kind: str | None = None  # None: from the config
    rope_kinds: tuple[str, ...] = ("default", "yarn", "longrope")  # those that it has been read for
    default_theta: float = 10000.0
    needs_rope_fields: bool = False  # the rope dict also sets the rotated columns
    indexer_pairing: str | None = None  # None: no indexer
    indexer_side: str = "first"  # rotated channels of the indexer
    indexer_norm: str = "fixed"  # LayerNorm epsilon: 1e-6, or "config" for rms_norm_eps
    needs_q_lora: bool = False
    scaled_latents: tuple[str, str] | None = None  # flags that scale the query and the latent
    layers_per_block: int = 1
    head_dim_is_rope: bool = False  # head_dim, if given, is the width of RoPE
    even_values: bool = False  # v_head_dim defaults to hidden_size / num_heads
    needs_kda: bool = False  # KDA layers next to MLA: an older model without them has the same type
    output_gate: str | None = None  # as in MLAConfig
    unknown_gate: bool = False  # a gate that attach() supports and the layers do not
    gated_norms: bool = False  # GigaChat 3.5
    mixed_rope: bool = False  # Mistral Large 4: layers without RoPE, learned scales, shared latents
    by_layer: bool = False  # dots3: three kinds of layers


_DOTS3 = Family(
    indexer_pairing="pairs",
    needs_q_lora=True,
    scaled_latents=("apply_mla_qkv_lora_rescale", "apply_mla_qkv_lora_rescale"),
    output_gate="head",
    by_layer=True,
)
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
    "bailing_hybrid": Family(default_theta=6e6, needs_kda=True, output_gate="head"),
    "longcat_flash": Family(
        default_theta=1e7,
        needs_q_lora=True,
        scaled_latents=("mla_scale_q_lora", "mla_scale_kv_lora"),
        layers_per_block=2,
        head_dim_is_rope=True,
    ),
    "deepseek_v32": Family(indexer_pairing="halves", needs_q_lora=True),
    "glm_moe_dsa": Family(indexer_pairing="pairs", needs_q_lora=True),
    "axk2": Family(indexer_pairing="halves", needs_q_lora=True, unknown_gate=True),
    "hy_v4": Family(
        pairing="halves",
        indexer_pairing="halves",
        indexer_side="last",
        indexer_norm="config",
        needs_q_lora=True,
        unknown_gate=True,
    ),
    "deepseek_v4": Family(
        mark="o_a_proj",
        compressed=True,
        indexer_pairing="pairs",
        indexer_side="last",
        needs_q_lora=True,
    ),
    "sarvam_mla": Family(unattached=NO_CLASS),
    "pangu_ultra_moe": Family(unattached=NO_CLASS, rope_kinds=("default",)),
    "gigachat3_5": Family(
        unattached=NO_CLASS,
        scaled_latents=("use_mla_scaling_factor", "use_mla_scaling_factor"),
        head_dim_is_rope=True,
        gated_norms=True,
    ),
    "dots3_note": _DOTS3._replace(reads_as="dots3_note_text"),  # its text fields, without a part
    "dots3_note_text": _DOTS3,
    "mistral_large4_text": Family(
        indexer_pairing="pairs",
        needs_rope_fields=True,
        head_dim_is_rope=True,
        mixed_rope=True,
    ),
    "glm5_next_text": Family(refused="its indexer scores pools of tokens instead of tokens"),
    "deepseek_v41": Family(
        refused="its compress ratios are 1 and 2, and it selects keys in two steps"
    ),
}

# Model types that from_hf() reads, that attach() supports, and that neither supports, with reasons.
FAMILIES = {name: family for name, family in MODEL_TYPES.items() if not family.refused}
SUPPORTED = tuple(
    sorted(n for n, family in FAMILIES.items() if not (family.reads_as or family.unattached))
)
REFUSED = {name: family.refused for name, family in MODEL_TYPES.items() if family.refused}
