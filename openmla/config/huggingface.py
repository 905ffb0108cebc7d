"""Reads Hugging Face configs into MLAConfig: config.json, dict or object."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from openmla.config.families import FAMILIES, REFUSED, Family
from openmla.config.schema import (
    MAX_LAYERS,
    MAX_POSITIONS,
    ROPE_KINDS,
    CompressorConfig,
    IndexerConfig,
    MLAConfig,
    RopeConfig,
    is_finite,
    require_size,
)
from openmla.config.sources import (
    Fields,
    expect,
    read_flag,
    read_integer,
    read_number,
    read_share,
    text_fields,
)
from openmla.errors import ConfigError

# All supported keys of a rope dict. The last three are read elsewhere or repeat a top-level field.
ROPE_KEYS = {
    "rope_type",
    "type",
    "rope_theta",
    "factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "attention_factor",
    "truncate",
    "short_factor",
    "long_factor",
    "partial_rotary_factor",
    "llama_4_scaling_beta",
    "max_position_embeddings",
}

DOTS3_LAYERS = ("indexed_attention", "full_attention", "sliding_attention")
# Fields of sliding layers with their defaults, which checkpoints prefix by swa_.
DOTS3_SLIDING = {
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 1024,
    "kv_lora_rank": 1024,
    "head_dim": 256,
    "qk_nope_head_dim": 192,
    "v_head_dim": 128,
}
NOTHING: Fields = {}
DOTS3_THETA = {"sliding_attention": ("swa_rope_theta", 5e4)}  # of others: rope_theta, 8e7

V4_LAYER_RATIOS = {
    "sliding_attention": 0,
    "compressed_sparse_attention": 4,
    "heavily_compressed_attention": 128,
}


def read_config(
    source: Fields | str | os.PathLike[str] | Any, *, rotated: bool = False
) -> MLAConfig:
    """Same as MLAConfig.from_hf(). `rotated`: the caller applies RoPE, of any kind."""
    fields, wrapper = text_fields(source)
    model_type = fields.get("model_type")
    if wrapper is None and model_type == "kimi_k25":
        raise ConfigError("config: text_config is missing for kimi_k25.")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        of = "" if wrapper is None else f", the text model of {wrapper!r},"
        why = f". Supported: {', '.join(sorted(FAMILIES))}."
        if isinstance(model_type, str) and model_type in REFUSED:
            why = f": {REFUSED[model_type]}."
        raise ConfigError(f"config: model_type {model_type!r}{of} is not supported{why}")
    family = FAMILIES[model_type]
    _refuse_other_attention(fields, family)
    read = _read_latent
    if family.compressed:
        read = _read_v4
    elif family.by_layer:
        read = _read_dots3
    config = read(fields, model_type, family, rotated)
    return _mixed_rope(config, fields) if family.mixed_rope else config


def _mixed_rope(config: MLAConfig, fields: Fields) -> MLAConfig:
    """Return Mistral Large 4's two kinds of layers, and whose latents each layer reads."""
    interval = read_integer(fields, "no_rope_layer_interval", 4)
    require_size("no_rope_layer_interval", interval)
    count = config.num_layers
    rotated = fields.get("no_rope_layers")  # 1 where a layer has RoPE
    if rotated is None:
        rotated = [int((layer + 1) % interval != 0) for layer in range(count)]
    known = isinstance(rotated, list | tuple) and len(rotated) == count
    if not known or any(value not in (0, 1) for value in rotated):
        raise ConfigError(
            f"config: no_rope_layers must be 0 or 1 for each of {count} layers, got {rotated!r}."
        )
    sources = _shared_latents(fields, [bool(value) for value in rotated])
    turned = replace(
        config,
        rope=replace(config.rope, learned=True),
        log_scale=True,
        kv_sources=sources,
    )
    unturned = replace(
        turned,
        qk_nope_head_dim=config.qk_head_dim,
        qk_rope_head_dim=0,
        rope=RopeConfig(kind="none"),
        softmax_scale=None if config.rope.logit_scale == 1 else config.scale,
    )
    return MLAConfig.from_layers([turned if value else unturned for value in rotated])


def _shared_latents(fields: Fields, rotated: list[bool]) -> tuple[int, ...]:
    """Return the layer whose latents each layer reads, or () if each has its own.

    transformers 5.23 does not look at the named layer: a layer without latents gets those of the
    last layer of its kind that a later one names. Raises where the two rules differ.
    """
    count = len(rotated)
    named = fields.get("kv_source_layers")
    if named is None or list(named) == list(range(count)):
        return ()
    if not isinstance(named, list | tuple) or len(named) != count:
        raise ConfigError(
            f"config: kv_source_layers must list a layer for each of {count} layers, got {named!r}."
        )
    stored: dict[bool, int] = {}
    for layer, (source, kind) in enumerate(zip(named, rotated, strict=True)):
        if source == layer:
            if layer in named[layer + 1 :]:
                stored[kind] = layer
        elif stored.get(kind) != source:
            raise ConfigError(
                f"config: kv_source_layers[{layer}] must be {stored.get(kind)}, the last earlier "
                "layer of its kind whose latents are shared, because transformers reads that one, "
                f"got {source!r}."
            )
    return tuple(named)


def _rope_fields(fields: Fields) -> Fields:
    """Return the rope dict, under its new or old name, with top-level fields merged in."""
    scaling = fields.get("rope_parameters")
    if scaling is None:
        scaling = fields.get("rope_scaling")
    if scaling is None:
        scaling = {}
    if not isinstance(scaling, Mapping):
        raise ConfigError(f"config: rope_parameters must be a dict, got {scaling!r}.")
    folded = dict(scaling)
    for name in ("rope_theta", "original_max_position_embeddings"):
        if folded.get(name) is None and fields.get(name) is not None:
            folded[name] = fields[name]
    return folded


def _read_rope(rope: Fields, fields: Fields, family: Family, rotated: bool) -> RopeConfig:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "deepseek_yarn":  # a name of engines; they differ in this field's default
        read_number(rope, "mscale_all_dim")
        kind = "yarn"
    foreign = rotated and kind not in ROPE_KINDS
    unknown = sorted(set(rope) - ROPE_KEYS)
    if unknown and not foreign:
        raise ConfigError(
            f"config: RoPE field {unknown[0]!r} is not supported, got {rope[unknown[0]]!r}."
        )
    pairing = family.pairing
    if "rope_interleave" in fields:
        if pairing == "pairs":
            pairing = "pairs" if read_flag(fields, "rope_interleave", True) else "halves"
        else:
            expect(fields, "rope_interleave", False, "where the rope pairs halves")
    if family.rope_kind == "none":
        return RopeConfig(kind="none", pairing=pairing)
    if foreign:
        return RopeConfig(
            kind="external",
            pairing=pairing,
            factor=max(read_number(rope, "factor", 1.0), 1.0),
            mscale_all_dim=read_number(rope, "mscale_all_dim", 0.0),
        )
    if kind in ROPE_KINDS and kind not in family.rope_kinds:
        raise ConfigError(f"config: rope type {kind!r} is not supported for this model type.")
    theta = read_number(rope, "rope_theta", family.default_theta)
    if kind not in ("yarn", "longrope"):
        return RopeConfig(kind=kind, theta=theta, pairing=pairing)  # raises if kind is unknown
    max_positions = read_integer(fields, "max_position_embeddings")
    original = read_integer(rope, "original_max_position_embeddings", max_positions)
    for name, value in (
        ("max_position_embeddings", max_positions),
        ("original_max_position_embeddings", original),
    ):
        require_size(name, value, most=MAX_POSITIONS)
    factor = read_number(rope, "factor", max(max_positions / original, 1.0))
    attention_factor = rope.get("attention_factor")
    if attention_factor is not None:
        attention_factor = read_number(rope, "attention_factor")
    scaling: dict[str, Any]
    if kind == "longrope":
        scaling = {name: _factors(rope, name) for name in ("short_factor", "long_factor")}
    else:
        scaling = {
            "beta_fast": read_number(rope, "beta_fast", 32.0),
            "beta_slow": read_number(rope, "beta_slow", 1.0),
            "truncate": read_flag(rope, "truncate", True),
            "mscale": read_number(rope, "mscale", 1.0),
        }
    return RopeConfig(
        kind=kind,
        theta=theta,
        pairing=pairing,
        factor=factor,
        original_positions=original,
        mscale_all_dim=read_number(rope, "mscale_all_dim", 0.0),
        attention_factor=attention_factor,
        **scaling,
    )


def _factors(rope: Fields, name: str) -> tuple[float, ...]:
    value = rope.get(name)
    if not isinstance(value, list | tuple) or not all(map(is_finite, value)):
        raise ConfigError(f"config: rope {name} must be a list of numbers, got {value!r}.")
    return tuple(float(factor) for factor in value)


def _read_indexer(fields: Fields, family: Family, num_layers: int) -> IndexerConfig | None:
    if family.indexer_pairing is None:
        return None
    interleave = read_flag(fields, "indexer_rope_interleave", family.indexer_pairing == "pairs")
    shared = _shared_layers(fields, num_layers)
    from_config = family.indexer_norm == "config"
    return IndexerConfig(
        num_heads=read_integer(fields, "index_n_heads"),
        head_dim=read_integer(fields, "index_head_dim"),
        topk=read_integer(fields, "index_topk"),
        pairing="pairs" if interleave else "halves",
        rope_side=family.indexer_side,
        norm_eps=read_number(fields, "rms_norm_eps", 1e-6) if from_config else 1e-6,
        shared=shared if any(shared) else (),
        own_query=family.mixed_rope,
    )


def _shared_layers(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """Return which layers reuse the selection of the previous one: a list, pattern or schedule."""
    listed = fields.get("indexer_types")
    if listed is None:
        listed = fields.get("index_topk_pattern")
    if listed is not None:
        names = {"F": False, "S": True, "full": False, "shared": True}
        entries = listed if isinstance(listed, str | list | tuple) else ()
        known = all(isinstance(entry, str) and entry in names for entry in entries)
        if not known or len(entries) != num_layers:
            raise ConfigError(
                f"config: indexer_types must list 'full' or 'shared' for each of {num_layers} "
                f"layers, got {listed!r}."
            )
        return tuple(names[entry] for entry in entries)
    frequency = read_integer(fields, "index_topk_freq", 1)
    offset = read_integer(fields, "index_skip_topk_offset", 2)
    if frequency < 1:
        raise ConfigError(f"config: index_topk_freq must be at least 1, got {frequency}.")
    return tuple(max(layer - offset + 1, 0) % frequency != 0 for layer in range(num_layers))


def _refuse_other_attention(fields: Fields, family: Family) -> None:
    """Raise for fields that request attention of another kind, in any model type."""
    expect(fields, "is_causal", True, "(bidirectional attention is not supported)")
    expect(fields, "use_bidirectional_attention", False, "(it is not supported)")
    expect(fields, "attn_logit_softcapping", None, "(soft-capped scores are not supported)")
    expect(fields, "alibi", False, "(ALiBi is not supported)")
    unrotated = family.rope_kind == "none"
    never = "never " if unrotated else ""
    expect(fields, "mla_use_nope", unrotated, f"where the shared columns are {never}rotated")


def _output_gate(fields: Fields, family: Family) -> str | None:
    """Return the gate that the family has, or that the config asks for."""
    for name in ("mla_use_output_gate", "gated_attention"):  # Kimi K3, GigaChat 3.5
        if read_flag(fields, name, False):
            return "element"
    return family.output_gate


def _norm_gate(fields: Fields, family: Family) -> float:
    if not family.gated_norms:
        return 0.0
    expect(fields, "norm_type", "ZeroCenteredGatedNorm", "(other norms are not supported)")
    expect(fields, "num_krope_heads", 1, "(other numbers are not supported)")
    expect(fields, "attention_type", "LlamaLatentAttention", "(others are not supported)")
    expect(fields, "output_gate_type", "sigmoid", "(others are not supported)")
    return read_number(fields, "layernorm_gating_weight", 2.0)


def _refuse_foreign_fields(fields: Fields, num_heads: int) -> None:
    expect(fields, "num_key_value_heads", num_heads, "(every head has its own expanded key)")
    expect(fields, "sliding_window", None, "for this model type")


def _refuse_other_bailing(fields: Fields) -> None:
    """Raise unless Ling 3.0: 2.5 and 2.6 (no gate, no KDA layers) share its model_type."""
    architectures = fields.get("architectures")
    kda = fields.get("short_conv_kernel_size") is not None  # for KDA layers, set in all of Ling 3.0
    if not kda or "V2_5" in str(architectures):
        raise ConfigError(
            "config: bailing_hybrid is supported for Ling 3.0 only, which has "
            f"short_conv_kernel_size, got architectures {architectures!r}."
        )
    gate = "gated_attention_proj_granularity_type"
    expect(fields, gate, "head_wise", "(other gates are not supported)")
    expect(fields, "use_mla_nope", False, "for bailing_hybrid")
    expect(fields, "rope_interleave", True, "for bailing_hybrid")
    expect(fields, "use_qkv_bias", False, "for bailing_hybrid")


def _num_layers(fields: Fields, family: Family) -> int:
    # LongCat: num_layers counts blocks; num_hidden_layers, if given, counts attention layers.
    name = "num_hidden_layers" if family.layers_per_block == 1 else "num_layers"
    blocks = read_integer(fields, name)
    require_size(name, blocks, most=MAX_LAYERS // family.layers_per_block)
    return blocks * family.layers_per_block


def _read_latent(fields: Fields, model_type: str, family: Family, rotated: bool) -> MLAConfig:
    hidden_size = read_integer(fields, "hidden_size")
    require_size("hidden_size", hidden_size)  # before it is divided
    num_heads = read_integer(fields, "num_attention_heads")
    kv_lora_rank = read_integer(fields, "kv_lora_rank")
    q_lora_rank = None if fields.get("q_lora_rank") is None else read_integer(fields, "q_lora_rank")
    if family.needs_q_lora and q_lora_rank is None:
        raise ConfigError(f"config: q_lora_rank is missing for {model_type}.")
    _refuse_foreign_fields(fields, num_heads)
    if family.needs_kda:
        _refuse_other_bailing(fields)
    rope_fields = _rope_fields(fields)
    if family.needs_rope_fields and "factor" not in rope_fields:
        raise ConfigError(f"config: rope_parameters is missing for {model_type}.")
    R = read_integer(fields, "qk_rope_head_dim")
    P = read_integer(fields, "qk_nope_head_dim")
    for name, value in (("qk_rope_head_dim", R), ("qk_nope_head_dim", P)):
        require_size(name, value, least=0)
    expect(fields, "qk_head_dim", P + R, "= qk_nope_head_dim + qk_rope_head_dim")
    if family.head_dim_is_rope:
        expect(fields, "head_dim", R, "= qk_rope_head_dim")
    if family.needs_rope_fields and rope_fields.get("partial_rotary_factor") is not None:
        partial = read_share(rope_fields, "partial_rotary_factor")
        if int(partial * (P + R)) != R:
            raise ConfigError(
                f"config: partial_rotary_factor must be {R}/{P + R} "
                f"(qk_rope_head_dim / qk_head_dim), got {partial!r}."
            )
    beta = read_number(rope_fields, "llama_4_scaling_beta", 0.0)
    original = read_integer(rope_fields, "original_max_position_embeddings") if beta else 0
    scale_q = scale_latent = False
    if family.scaled_latents is not None and kv_lora_rank > 0:
        scale_q, scale_latent = (read_flag(fields, name, True) for name in family.scaled_latents)
    num_layers = _num_layers(fields, family)
    return MLAConfig(
        model_type=family.reads_as or model_type,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        q_lora_rank=q_lora_rank,
        kv_lora_rank=kv_lora_rank,
        qk_nope_head_dim=P,
        qk_rope_head_dim=R,
        v_head_dim=_v_head_dim(fields, family, hidden_size, num_heads),
        max_positions=_max_positions(fields),
        rope=_read_rope(rope_fields, fields, family, rotated),
        latent_eps=read_number(fields, "rms_norm_eps", 1e-6),
        attention_bias=read_flag(fields, "attention_bias", False),
        q_factor=(hidden_size / q_lora_rank) ** 0.5 if scale_q and q_lora_rank else 1.0,
        latent_factor=(hidden_size / kv_lora_rank) ** 0.5 if scale_latent else 1.0,
        llama4_beta=beta,
        llama4_positions=original,
        output_gate=_output_gate(fields, family),
        norm_gate=_norm_gate(fields, family),
        rope_norm=family.by_layer,
        indexer=_read_indexer(fields, family, num_layers),
    )


def _v_head_dim(fields: Fields, family: Family, hidden_size: int, num_heads: int) -> int:
    default = None
    if family.even_values and num_heads > 0:
        default = hidden_size // num_heads
    return read_integer(fields, "v_head_dim", default)


def _max_positions(fields: Fields) -> int:
    # kimi_linear and bailing_hybrid checkpoints may have model_max_length instead.
    fallback = fields.get("model_max_length")
    return read_integer(fields, "max_position_embeddings", fallback)


def _read_dots3(fields: Fields, model_type: str, family: Family, rotated: bool) -> MLAConfig:
    """Read the fields of every layer: those of the model, overridden for sliding layers."""
    for name in ("attention_gate_type", "swa_attention_gate_type"):
        expect(fields, name, "headwise", "(other gates are not supported)")
    expect(fields, "apply_mla_qkv_lora_rescale", True, "for dots3")
    expect(fields, "indexer_rope_interleave", True, "for dots3")
    types = _dots3_types(fields, _num_layers(fields, family))
    ropes, overrides = _dots3_ropes(fields, types), _dots3_overrides(fields, types)
    window = read_integer(fields, "sliding_window", fields.get("sliding_window_size") or 512)
    read: dict[tuple[str, int], MLAConfig] = {}
    layers = []
    for number, kind in enumerate(types):
        part = overrides.get(number, NOTHING)
        key = kind, id(part)  # a checkpoint has one part for all sliding layers
        if key not in read:
            own = {**fields, **part, **ropes[kind], "head_dim": None, "sliding_window": None}
            indexed = kind == "indexed_attention"
            mine = family if indexed else family._replace(indexer_pairing=None)
            read[key] = _read_latent(own, model_type, mine, rotated)
            if kind == "sliding_attention":
                require_size("sliding_window", window, most=MAX_POSITIONS)
                read[key] = replace(read[key], window=window)
        layers.append(read[key])
    return MLAConfig.from_layers(layers)


def _dots3_types(fields: Fields, num_layers: int) -> list[str]:
    """Return the type of each layer. Checkpoints call indexed layers full ones, and say use_dsa."""
    given, indexed = fields.get("layer_types"), read_flag(fields, "use_dsa", True)
    said = fields.get("per_layer_config") is not None and fields.get("use_dsa") is None
    canonical = given is not None and said
    if given is None:
        every = not read_flag(fields, "use_sliding_window", True)
        sliding = (not every and i >= 2 and i % 4 != 1 for i in range(num_layers))
        given = ["sliding_attention" if each else "full_attention" for each in sliding]
    if not isinstance(given, list | tuple) or len(given) != num_layers:
        raise ConfigError(
            f"config: layer_types must be a list of {num_layers} types, got {given!r}."
        )
    unknown = [name for name in given if name not in DOTS3_LAYERS]
    if unknown:
        raise ConfigError(
            f"config: layer_types must be some of {', '.join(DOTS3_LAYERS)}, got {unknown[0]!r}."
        )
    if canonical:
        return list(given)
    old, new = DOTS3_LAYERS[1::-1] if indexed else DOTS3_LAYERS[:2]
    return [new if name == old else name for name in given]


def _dots3_overrides(fields: Fields, types: list[str]) -> dict[int, Fields]:
    """Return the fields that some layers have instead of the model's."""
    given = fields.get("per_layer_config")
    if given is None:
        sliding = {
            name: read_integer(fields, f"swa_{name}", n) for name, n in DOTS3_SLIDING.items()
        }
        rest = sliding.pop("head_dim") - sliding["qk_nope_head_dim"]
        sliding["qk_rope_head_dim"] = read_integer(fields, "swa_qk_rope_head_dim", rest)
        return {i: sliding for i, kind in enumerate(types) if kind == "sliding_attention"}
    if not isinstance(given, Mapping) or not all(
        str(number).isdecimal() and isinstance(part, Mapping) for number, part in given.items()
    ):
        raise ConfigError(f"config: per_layer_config must be a dict of dicts, got {given!r}.")
    return {int(number): part for number, part in given.items()}


def _dots3_ropes(fields: Fields, types: list[str]) -> dict[str, Fields]:
    """Return the RoPE fields of each type of layer."""
    given = fields.get("rope_parameters") or fields.get("rope_scaling")
    ropes: dict[str, Fields] = {}
    for kind in set(types):
        name, default = DOTS3_THETA.get(kind, ("rope_theta", 8e7))
        rope = {"rope_theta": read_number(fields, name, default)}
        if given is not None:
            mine = given.get(kind) if isinstance(given, Mapping) else None
            if not isinstance(mine, Mapping):
                raise ConfigError(
                    f"config: rope_parameters must have a dict for {kind!r}, got {given!r}."
                )
            rope = {"rope_theta": default, **mine}
        ropes[kind] = {"rope_parameters": rope, "rope_scaling": None}
    return ropes


def _read_v4(fields: Fields, model_type: str, family: Family, rotated: bool) -> MLAConfig:
    D = read_integer(fields, "head_dim")
    num_layers = _num_layers(fields, family)
    require_size("head_dim", D)
    expect(fields, "num_key_value_heads", 1, f"for {model_type}")
    R = fields.get("qk_rope_head_dim")
    if R is None:
        R = int(D * read_share(fields, "partial_rotary_factor", 1 / 8))
    if not isinstance(R, int) or isinstance(R, bool) or R > D:
        raise ConfigError(f"config: qk_rope_head_dim must be at most head_dim={D}, got {R!r}.")
    main, compressed = _v4_ropes(fields, family, rotated)
    indexer = _read_indexer(fields, family, num_layers)
    assert indexer is not None
    return MLAConfig(
        model_type=model_type,
        hidden_size=read_integer(fields, "hidden_size"),
        num_layers=num_layers,
        num_heads=read_integer(fields, "num_attention_heads"),
        q_lora_rank=read_integer(fields, "q_lora_rank"),
        kv_lora_rank=D,
        qk_nope_head_dim=D - R,
        qk_rope_head_dim=R,
        v_head_dim=D,
        max_positions=_max_positions(fields),
        rope=main,
        latent_eps=read_number(fields, "rms_norm_eps", 1e-6),
        attention_bias=read_flag(fields, "attention_bias", False),
        indexer=replace(indexer, shared=()),  # layers without one select no entries
        compressor=CompressorConfig(
            ratios=_v4_ratios(fields, num_layers),
            window=read_integer(fields, "sliding_window"),
            output_groups=read_integer(fields, "o_groups"),
            output_lora_rank=read_integer(fields, "o_lora_rank"),
            rope=compressed,
        ),
    )


def _v4_ropes(fields: Fields, family: Family, rotated: bool) -> tuple[RopeConfig, RopeConfig]:
    """Return the RoPE settings of window-only layers (never extended) and of compressed layers."""
    rope = _rope_fields(fields)
    if isinstance(rope.get("main"), Mapping) and isinstance(rope.get("compress"), Mapping):
        main, compressed = dict(rope["main"]), dict(rope["compress"])
    else:  # the checkpoint's own form, which scales cos and sin only on request
        main = {"rope_theta": read_number(fields, "rope_theta", 10000.0)}
        compressed = {"attention_factor": 1.0, **rope}
        compressed["rope_theta"] = read_number(fields, "compress_rope_theta", 160000.0)
    ropes = []
    for terms in (main, compressed):
        if not (terms.get("mscale") and terms.get("mscale_all_dim")):  # valid only as a pair
            terms = {**terms, "mscale": None, "mscale_all_dim": None}
        read = _read_rope(terms, fields, family, rotated)
        if read.kind in ("yarn", "longrope"):
            read = replace(read, attention_factor=read.cos_sin_scale)
        # In V4 they scale cos and sin, never the logits.
        ropes.append(replace(read, mscale=1.0, mscale_all_dim=0.0))
    return ropes[0], ropes[1]


def _v4_ratios(fields: Fields, num_layers: int) -> tuple[int, ...]:
    types = fields.get("layer_types")
    if types is not None:
        rates = fields.get("compress_rates") or {}
        if not isinstance(types, list | tuple) or not isinstance(rates, Mapping):
            raise ConfigError(
                "config: layer_types must be a list and compress_rates a dict, "
                f"got {types!r} and {rates!r}."
            )
        for name, ratio in V4_LAYER_RATIOS.items():
            if ratio:
                expect(rates, name, ratio, "(other rates are not supported)")
        unknown = [name for name in types if name not in list(V4_LAYER_RATIOS)]
        if unknown:
            raise ConfigError(
                f"config: layer_types must be some of {', '.join(V4_LAYER_RATIOS)}, got "
                f"{unknown[0]!r}."
            )
        ratios = [V4_LAYER_RATIOS[name] for name in types]
    else:
        given = fields.get("compress_ratios")
        if not isinstance(given, list | tuple) or not all(isinstance(r, int) for r in given):
            raise ConfigError(f"config: compress_ratios must be a list of integers, got {given!r}.")
        ratios = [0 if ratio == 1 else ratio for ratio in given]
    if any(ratios[num_layers:]):
        raise ConfigError(
            "config: compress_ratios must be 0 for draft layers (past num_hidden_layers"
            f"={num_layers}), got {ratios[num_layers:]!r}."
        )
    return tuple(ratios[:num_layers])
