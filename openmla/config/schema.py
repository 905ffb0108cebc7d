"""MLAConfig and its parts: frozen, validated at creation, without derived fields."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from openmla.errors import ConfigError, check_kind

ROPE_KINDS = ("none", "default", "yarn", "longrope")
PAIRINGS = ("pairs", "halves")
OUTPUT_GATES = ("head", "element")
# Far above every existing model. Memory depends on these dimensions (a tuple per layer, a table row
# per position), so they are limited in case a config is damaged or made up.
MAX_LAYERS = 100_000
MOST_DRAFTS = 8  # draft (MTP) layers after a model's own
MAX_POSITIONS = 2**24
MAX_WIDTH = 2**20  # for all other dimensions
INDEXED_RATIO = 4  # V4 layers with overlapping windows and an indexer that selects entries


def _require(ok: bool, field: str, expectation: str, value: object) -> None:
    if not ok:
        raise ConfigError(f"config: {field} must be {expectation}, got {value!r}.")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_finite(value: object) -> bool:
    """Whether a value is an int or float within the range of a float."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return -sys.float_info.max <= value <= sys.float_info.max  # False for NaN


def _is_positive(value: Any) -> bool:
    return is_finite(value) and bool(value > 0)


def require_size(field: str, value: Any, *, least: int = 1, most: int = MAX_WIDTH) -> None:
    """Raise unless a value is an integer within its bounds."""
    what = "a positive integer" if least == 1 else f"an integer of at least {least}"
    _require(_is_int(value) and value >= least, field, what, value)
    _require(value <= most, field, f"at most {most}", value)


def yarn_mscale(factor: float, mscale: float) -> float:
    """Return YaRN's magnitude term: 1 without extension, else 0.1 * mscale * ln(factor) + 1."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


@dataclass(frozen=True)
class RopeConfig:
    """RoPE settings: how positions rotate the R rotary columns of queries and keys.

    Attributes:
        kind: "default", "yarn" or "longrope". "none" keeps the R columns and never rotates them
            (Kimi-Linear). "external" means that the caller rotates, as engines and attached models
            do.
        theta: the base of the rotation frequencies.
        pairing: "pairs" rotates columns (2i, 2i+1), "halves" columns (i, i + R/2).
        factor: context extension factor of yarn and longrope.
        original_positions: positions the model was trained with, for yarn and longrope.
        beta_fast: yarn.
        beta_slow: yarn.
        truncate: yarn: whether the ramp begins and ends at whole column pairs.
        mscale: yarn: magnitude of cos and sin.
        mscale_all_dim: yarn: magnitude of the softmax scale.
        attention_factor: multiplies cos and sin, instead of the magnitude that `kind` implies.
        short_factor: longrope: R/2 frequency divisors for short contexts.
        long_factor: longrope: R/2 frequency divisors for long contexts.
        learned: whether the model multiplies the frequencies by R/2 learned factors, which
            RopeTable takes as `alpha` (Mistral Large 4).
    """

    kind: str = "default"
    theta: float = 10000.0
    pairing: str = "pairs"
    factor: float = 1.0
    original_positions: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    learned: bool = False

    def __post_init__(self) -> None:
        if self.kind not in (*ROPE_KINDS, "external"):
            raise ConfigError(
                f"config: rope type {self.kind!r} is not supported. "
                f"Supported: {', '.join(ROPE_KINDS)}."
            )
        _require(self.pairing in PAIRINGS, "rope pairing", "pairs or halves", self.pairing)
        _require(_is_positive(self.theta), "rope_theta", "a positive number", self.theta)
        _require(
            _is_positive(self.factor) and self.factor >= 1, "rope factor", "at least 1", self.factor
        )
        if self.attention_factor is not None:
            _require(
                _is_positive(self.attention_factor),
                "rope attention_factor",
                "a positive number",
                self.attention_factor,
            )
        for name in ("mscale", "mscale_all_dim"):
            value = getattr(self, name)
            ok = value == 0 or _is_positive(value)
            _require(ok, f"rope {name}", "zero or a positive number", value)
        if self.kind in ("yarn", "longrope"):
            field = "rope original_max_position_embeddings"
            require_size(field, self.original_positions, least=2, most=MAX_POSITIONS)
        if self.kind == "yarn":
            _require(_is_positive(self.beta_slow), "rope beta_slow", "positive", self.beta_slow)
            _require(
                _is_positive(self.beta_fast) and self.beta_fast >= self.beta_slow,
                "rope beta_fast",
                f"at least beta_slow={self.beta_slow}",
                self.beta_fast,
            )
            _require(self.theta > 1, "rope_theta", "above 1 for yarn", self.theta)
        for name in ("short_factor", "long_factor"):
            factors = getattr(self, name)
            _require(
                all(_is_positive(f) for f in factors), f"rope {name}", "positive numbers", factors
            )
            _require(
                bool(factors) == (self.kind == "longrope"),
                f"rope {name}",
                "given for longrope and for nothing else",
                factors,
            )

    @property
    def cos_sin_scale(self) -> float:
        """The factor of cos and sin.

        YaRN with mscale_all_dim but no mscale follows the original model code (mscale counts
        as 1); transformers 5.17 drops the denominator there.
        """
        if self.attention_factor is not None:
            return self.attention_factor
        if self.kind == "yarn":
            numerator = yarn_mscale(self.factor, self.mscale)
            return numerator / yarn_mscale(self.factor, self.mscale_all_dim)
        if self.kind == "longrope" and self.factor > 1:
            return math.sqrt(1 + math.log(self.factor) / math.log(self.original_positions))
        return 1.0

    @property
    def logit_scale(self) -> float:
        """The factor of the softmax scale: m squared, with m from mscale_all_dim."""
        if self.kind in ("none", "default"):
            return 1.0
        return yarn_mscale(self.factor, self.mscale_all_dim) ** 2


def check_layer_number(layer: int, num_layers: int = 0) -> None:
    """Raise unless a model of num_layers (0: unknown) can have this layer. Draft (MTP) layers are
    numbered after the model's own."""
    _require(_is_int(layer) and layer >= 0, "layer", "an integer of at least 0", layer)
    most = num_layers + MOST_DRAFTS - 1
    if num_layers and layer > most:
        last = num_layers - 1
        _require(False, "layer", f"in 0..{last}, or a draft layer up to {most}", layer)


@dataclass(frozen=True)
class IndexerConfig:
    """The lightning indexer of sparse models, which selects the top-k keys of each query.

    Attributes:
        num_heads: HI, the indexer's heads.
        head_dim: DI, the width of a head.
        topk: K, how many keys are selected for a query.
        pairing: "pairs" or "halves", as in RopeConfig.
        rope_side: "first" or "last": which R of the DI columns are rotated.
        norm_eps: epsilon of the LayerNorm of keys.
        shared: per layer, True if it has no indexer and uses the previous layer's selection. Empty
            if every layer has one.
        own_query: whether queries are projected from the hidden state, after a LayerNorm, and not
            from the low-rank query of the attention (Mistral Large 4).

    ```python
    import openmla

    indexer = openmla.IndexerConfig(num_heads=4, head_dim=16, topk=32)
    sizes = {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 24}
    config = openmla.MLAConfig.from_numbers(num_heads=4, **sizes, indexer=indexer)
    cache = openmla.allocate_cache(config, num_blocks=2, block_size=16, format="bf16")
    print(cache.index)  # indexer keys, besides latent rows
    ```
    """

    num_heads: int
    head_dim: int
    topk: int
    pairing: str = "halves"
    rope_side: str = "first"
    norm_eps: float = 1e-6
    shared: tuple[bool, ...] = ()
    own_query: bool = False

    def __post_init__(self) -> None:
        for name in ("num_heads", "head_dim", "topk"):
            require_size(f"indexer {name}", getattr(self, name))
        _require(self.pairing in PAIRINGS, "indexer pairing", "pairs or halves", self.pairing)
        _require(self.rope_side in ("first", "last"), "rope_side", "first or last", self.rope_side)
        _require(_is_positive(self.norm_eps), "indexer norm_eps", "positive", self.norm_eps)
        if self.shared:
            first = "shared" if self.shared[0] else "full"
            _require(first == "full", "indexer_types[0]", "full (nothing to share yet)", first)

    def is_shared(self, layer: int) -> bool:
        """Whether a layer uses an earlier layer's selection. Draft (MTP) layers do not."""
        check_layer_number(layer, len(self.shared))
        return layer < len(self.shared) and self.shared[layer]


@dataclass(frozen=True)
class CompressorConfig:
    """The compressor settings of DeepSeek V4: window, entries, and grouped output projection.

    Attributes:
        ratios: the compress ratio of each layer. 0 or 1 (kept as 0): window only; 4: overlapping
            windows pooled into entries, of which an indexer selects; 128: all entries. Draft (MTP)
            layers, past the list, are window only.
        window: tokens in the sliding window.
        output_groups: groups of heads in the output projection.
        output_lora_rank: rank of the output projection per group.
        rope: RoPE settings of the layers with a ratio above 0. MLAConfig.rope holds those of the
            other layers, which the reference model does not extend with YaRN. To match an engine
            that does, set YaRN there.
    """

    ratios: tuple[int, ...]
    window: int
    output_groups: int
    output_lora_rank: int
    rope: RopeConfig

    def __post_init__(self) -> None:
        for layer, ratio in enumerate(self.ratios):
            ok = _is_int(ratio) and ratio in (0, 1, 4, 128)
            _require(ok, f"compress_ratios[{layer}]", "0, 1, 4 or 128", ratio)
        object.__setattr__(self, "ratios", tuple(0 if r == 1 else r for r in self.ratios))
        for name in ("window", "output_groups", "output_lora_rank"):
            require_size(name, getattr(self, name))

    def ratio(self, layer: int) -> int:
        """Return the tokens per entry of a layer; 0 if it has no entries."""
        check_layer_number(layer, len(self.ratios))
        return self.ratios[layer] if layer < len(self.ratios) else 0


@dataclass(frozen=True)
class MLAConfig:
    """The dimensions of a model's attention; frozen. docs/mla.md defines H, C, P, R and V.

    Make one with from_hf() or from_numbers(), or take one of openmla.PRESETS.

    Attributes:
        model_type: the model type, as in config.json.
        hidden_size: width of the hidden state. 0 in configs of from_numbers(), which can plan and
            attend but not make a layer.
        num_layers: attention layers (LongCat has two per block).
        num_heads: H, the query heads on this rank.
        q_lora_rank: rank of the query projection, or None.
        kv_lora_rank: C, the width of the latent.
        qk_nope_head_dim: P, the columns of a head without RoPE.
        qk_rope_head_dim: R, the rotated columns.
        v_head_dim: V, the width of a value head.
        max_positions: the longest sequence.
        rope: the RoPE settings.
        latent_eps: epsilon of the two latent norms: the config's rms_norm_eps, as engines use it.
            transformers fixes 1e-6 for most families.
        attention_bias: whether the projections have a bias.
        q_factor: multiplies the query (LongCat).
        latent_factor: multiplies the latent (LongCat).
        llama4_beta: if not 0, the query at position p is multiplied by
            1 + llama4_beta * ln(1 + floor(p / llama4_positions)) (Mistral 4).
        llama4_positions: see llama4_beta.
        log_scale: whether the query of head h at position p is multiplied by s_h ln(p + 1) + b_h,
            and those of the indexer too, with learned s and b (Mistral Large 4).
        output_gate: "head" multiplies each head's output by the sigmoid of a projection of the
            hidden state (Ling 3.0), "element" each element of it (Kimi K3). None: no gate.
        norm_gate: if not 0, the latent norms multiply by 1 + weight, and then by norm_gate times
            the sigmoid of a low-rank projection of the result (GigaChat 3.5).
        rope_norm: whether the R shared columns of a row are normalized before RoPE (dots3).
        window: how many keys a token attends to, the last ones, its own included (dots3). 0: all.
        indexer: the indexer of a sparse model.
        compressor: the compressor of DeepSeek V4.
        softmax_scale: overrides the softmax scale that `scale` derives.
        kinds: the config of each kind of layer, if layers differ in more than DeepSeek V4's
            compress ratio; the other fields then describe layer 0. layer() returns the config of a
            layer, which is what plans and ops take.
        layer_kinds: per layer, its index in `kinds`.
        kv_sources: per layer, the layer whose rows it attends to: itself, or an earlier layer of
            the same kind (Mistral Large 4). Empty if every layer has rows of its own.

    ```python
    from dataclasses import replace

    import openmla

    config = openmla.PRESETS["tiny-v3"]
    rank = replace(config, num_heads=config.num_heads // 2)  # tensor parallel over 2 ranks
    print(rank.num_heads, rank.latent_dim, rank.scale)
    ```
    """

    model_type: str
    hidden_size: int
    num_layers: int
    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    max_positions: int
    rope: RopeConfig = RopeConfig()
    latent_eps: float = 1e-6
    attention_bias: bool = False
    q_factor: float = 1.0
    latent_factor: float = 1.0
    llama4_beta: float = 0.0
    llama4_positions: int = 0
    log_scale: bool = False
    output_gate: str | None = None
    norm_gate: float = 0.0
    rope_norm: bool = False
    window: int = 0
    indexer: IndexerConfig | None = None
    compressor: CompressorConfig | None = None
    softmax_scale: float | None = None
    kinds: tuple[MLAConfig, ...] = ()
    layer_kinds: tuple[int, ...] = ()
    kv_sources: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("num_heads", "kv_lora_rank", "v_head_dim"):
            require_size(name, getattr(self, name))
        require_size("hidden_size", self.hidden_size, least=0 if self.is_external else 1)
        require_size("num_layers", self.num_layers, most=MAX_LAYERS)
        require_size("max_positions", self.max_positions, most=MAX_POSITIONS)
        for name in ("qk_nope_head_dim", "qk_rope_head_dim"):
            require_size(name, getattr(self, name), least=0)
        _require(self.qk_head_dim > 0, "qk_nope_head_dim + qk_rope_head_dim", "positive", 0)
        if self.q_lora_rank is not None:
            require_size("q_lora_rank", self.q_lora_rank)
        for name in ("latent_eps", "q_factor", "latent_factor"):
            value = getattr(self, name)
            _require(_is_positive(value), name, "a positive number", value)
        gate = self.output_gate
        _require(gate in (None, *OUTPUT_GATES), "output_gate", "None, head or element", gate)
        ok = self.norm_gate == 0 or _is_positive(self.norm_gate)
        _require(ok, "norm_gate", "zero or a positive number", self.norm_gate)
        require_size("window", self.window, least=0, most=MAX_POSITIONS)
        alone = self.window == 0 or (self.indexer is None and self.compressor is None)
        _require(alone, "window", "0 with an indexer or a compressor", self.window)
        scale = self.softmax_scale
        ok = scale is None or _is_positive(scale)
        _require(ok, "softmax_scale", "a positive number", scale)
        self._check_rope()
        if self.indexer is not None:
            self._check_indexer(self.indexer)
        if self.compressor is not None:
            self._check_compressor(self.compressor)
        self._check_kinds()
        self._check_sources()

    def _check_sources(self) -> None:
        sources = self.kv_sources
        _require(
            len(sources) in (0, self.num_layers),
            "kv_sources",
            f"one per layer ({self.num_layers})",
            f"{len(sources)} of them",
        )
        for layer, source in enumerate(sources):
            known = _is_int(source) and 0 <= source <= layer and sources[source] == source
            if known and self.kinds:
                known = self.layer_kinds[source] == self.layer_kinds[layer]
            what = "the layer itself, or an earlier one of its kind with rows of its own"
            _require(known, f"kv_sources[{layer}]", what, source)

    def _check_kinds(self) -> None:
        numbered = range(len(self.kinds))
        _require(
            len(self.layer_kinds) == (self.num_layers if self.kinds else 0)
            and all(kind in numbered for kind in self.layer_kinds),
            "layer_kinds",
            f"an index in kinds for each of {self.num_layers} layers, and empty without kinds",
            self.layer_kinds,
        )
        for kind in self.kinds:
            _require(not kind.kinds, "kinds", "configs of one kind each", kind)
            _require(kind.compressor is None, "kinds", "without a compressor", kind)
            for name in ("model_type", "hidden_size", "num_layers", "max_positions", "kv_sources"):
                mine, its = getattr(self, name), getattr(kind, name)
                _require(mine == its, f"{name} of every kind", repr(mine), its)

    def _check_rope(self) -> None:
        R = self.qk_rope_head_dim
        if self.rope.kind not in ("none", "external"):
            _require(R > 0 and R % 2 == 0, "qk_rope_head_dim", "even and positive", R)
        for name in ("short_factor", "long_factor"):
            factors = getattr(self.rope, name)
            _require(
                len(factors) in (0, R // 2),
                f"rope {name}",
                f"a list of R/2={R // 2} numbers",
                f"{len(factors)} numbers",
            )
        beta = self.llama4_beta
        _require(beta == 0 or _is_positive(beta), "llama_4_scaling_beta", "zero or positive", beta)
        _require(
            (beta != 0) == (self.llama4_positions > 0),
            "llama4_positions",
            "positive with llama4_beta and 0 without",
            self.llama4_positions,
        )

    def _check_indexer(self, indexer: IndexerConfig) -> None:
        known = self.q_lora_rank is not None or indexer.own_query
        known = known or self.hidden_size == 0  # the caller projects
        _require(known, "q_lora_rank", "an integer when there is an indexer", None)
        _require(
            indexer.head_dim >= self.qk_rope_head_dim,
            "index_head_dim",
            f"at least qk_rope_head_dim={self.qk_rope_head_dim}",
            indexer.head_dim,
        )
        _require(
            len(indexer.shared) in (0, self.num_layers),
            "indexer types",
            f"one per layer ({self.num_layers})",
            f"{len(indexer.shared)} of them",
        )

    def _check_compressor(self, compressor: CompressorConfig) -> None:
        for name in ("output_gate", "norm_gate"):
            value = getattr(self, name)
            _require(not value, name, "absent with a compressor", value)
        _require(
            len(compressor.ratios) == self.num_layers,
            "compress_ratios",
            f"one per layer ({self.num_layers})",
            f"{len(compressor.ratios)} of them",
        )
        _require(
            self.qk_head_dim == self.kv_lora_rank == self.v_head_dim,
            "head_dim",
            "the same for q, k and v where one latent is key and value",
            (self.qk_head_dim, self.kv_lora_rank, self.v_head_dim),
        )
        _require(
            self.num_heads % compressor.output_groups == 0,
            "o_groups",
            f"a divisor of num_attention_heads={self.num_heads}",
            compressor.output_groups,
        )
        _require(
            4 not in compressor.ratios or self.indexer is not None,
            "index_topk",
            "given where a layer has compress ratio 4",
            None,
        )

    def __repr__(self) -> str:
        """Show the fields that distinguish models; dataclasses.asdict() has all fields."""
        if self.kinds:
            parts = []
            for number, kind in enumerate(self.kinds):
                count = self.layer_kinds.count(number)
                parts.append(f"kind {number}, {count} of {self.num_layers} layers: {kind!r}")
            return f"MLAConfig({self.model_type}: {'; '.join(parts)})"
        rope = self.rope.kind if self.rope.factor == 1 else f"{self.rope.kind} {self.rope.factor:g}"
        hidden = f"hidden {self.hidden_size}" if self.hidden_size else "projected by others"
        parts = [
            f"{self.num_layers} layers, {self.num_heads} heads, {hidden}",
            f"q_lora {self.q_lora_rank}, C={self.kv_lora_rank}, P={self.qk_nope_head_dim}, "
            f"R={self.qk_rope_head_dim}, V={self.v_head_dim}",
            f"rope {rope}, {self.max_positions} positions",
        ]
        if self.window:
            parts.append(f"window {self.window}")
        if self.indexer is not None:
            indexer = self.indexer
            parts.append(
                f"indexer of {indexer.num_heads} heads, DI={indexer.head_dim}, K={indexer.topk}"
            )
        if self.compressor is not None:
            ratios = "/".join(map(str, sorted(set(self.compressor.ratios))))
            parts.append(f"window {self.compressor.window}, compress ratios {ratios}")
        if self.softmax_scale is not None:
            parts.append(f"scale {self.softmax_scale:g}")
        return f"MLAConfig({self.model_type}: {'; '.join(parts)})"

    def check_layer(self, where: str) -> None:
        """Raise unless the config has what a layer with parameters needs."""
        if self.hidden_size == 0:
            raise ConfigError(
                f"{where}: config has no hidden_size and no RoPE settings, as it was made by "
                "from_numbers(). Project and rotate yourself and call attend_step(), or make the "
                "config with from_hf()."
            )

    def check_one_kind(self, where: str) -> None:
        """Raise if layers are of several kinds, each of which has a config of its own."""
        if self.kinds:
            raise ConfigError(
                f"{where}: config must be that of one layer, because {self.model_type} has layers "
                f"of {len(self.kinds)} kinds. Pass config.layer(number)."
            )

    def layer(self, number: int) -> MLAConfig:
        """Return the config of one layer; layers of one kind have the same object."""
        if not self.kinds:
            return self
        return self.kinds[self.kind(number)]

    def kind(self, layer: int) -> int:
        """Return the number of a layer's kind. Layers of one kind share a plan in each step.

        DeepSeek V4's number is the compress ratio. If all layers are alike, it is 0.
        """
        if self.compressor is not None:
            return self.compressor.ratio(layer)
        if not self.kinds:
            return 0
        require_size("layer", layer, least=0, most=self.num_layers - 1)
        return self.layer_kinds[layer]

    def kv_source(self, layer: int) -> int:
        """Return the layer whose rows a layer attends to. Draft (MTP) layers have their own."""
        check_layer_number(layer, len(self.kv_sources))
        return self.kv_sources[layer] if layer < len(self.kv_sources) else layer

    @property
    def every_kind(self) -> tuple[MLAConfig, ...]:
        """The config of each kind of layer; this one if all layers are alike."""
        return self.kinds or (self,)

    @property
    def is_external(self) -> bool:
        """Whether the caller applies RoPE."""
        return self.rope.kind == "external"

    @property
    def qk_head_dim(self) -> int:
        """Width of a query or expanded key head: P + R."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def sliding_window(self) -> int:
        """Recent tokens that a token attends to directly; 0 if that is not limited."""
        return self.window if self.compressor is None else self.compressor.window

    @property
    def latent_dim(self) -> int:
        """D, the width of a cached row: C + R, or C if the latent includes rotated columns (V4)."""
        if self.compressor is not None:
            return self.kv_lora_rank
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def scale(self) -> float:
        """The softmax scale: softmax_scale, or else (P + R)^-0.5 times YaRN's m squared."""
        if self.softmax_scale is not None:
            return self.softmax_scale
        return self.qk_head_dim**-0.5 * self.rope.logit_scale

    @classmethod
    def from_numbers(
        cls,
        *,
        num_heads: int,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        scale: float | None = None,
        indexer: IndexerConfig | None = None,
        compressor: CompressorConfig | None = None,
        max_positions: int = MAX_POSITIONS,
        model_type: str = "engine",
    ) -> MLAConfig:
        """Make a config from the dimensions of an engine's attention layer, without RoPE settings.

        Such a config can plan, allocate caches and attend. The caller projects and applies RoPE. It
        cannot make a layer (MLAAttention, RopeTable).

        Args:
            num_heads: H, the query heads on this rank.
            kv_lora_rank: C, the width of the latent.
            qk_nope_head_dim: P, the columns of a head without RoPE.
            qk_rope_head_dim: R, the rotated columns.
            v_head_dim: V, the width of a value head.
            scale: the softmax scale. Defaults to (P + R)^-0.5.
            indexer: the indexer of a sparse model.
            compressor: the compressor of DeepSeek V4.
            max_positions: bounds the sequences of DeepSeek V4 and, if it is small, the default
                workspace. Nothing else uses it.
            model_type: a name for messages.

        ```python
        import openmla

        config = openmla.MLAConfig.from_numbers(
            num_heads=16,
            kv_lora_rank=512,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
        )
        assert config.latent_dim == 576
        ```
        """
        for name, part, kind in (
            ("indexer", indexer, IndexerConfig),
            ("compressor", compressor, CompressorConfig),
        ):
            if part is not None:
                check_kind("config", name, part, kind)
        layers = 1
        if compressor is not None:
            layers = len(compressor.ratios)
        elif indexer is not None and indexer.shared:
            layers = len(indexer.shared)
        return cls(
            model_type=model_type,
            hidden_size=0,
            num_layers=layers,
            num_heads=num_heads,
            q_lora_rank=None,
            kv_lora_rank=kv_lora_rank,
            qk_nope_head_dim=qk_nope_head_dim,
            qk_rope_head_dim=qk_rope_head_dim,
            v_head_dim=v_head_dim,
            max_positions=max_positions,
            rope=RopeConfig(kind="external"),
            indexer=indexer,
            compressor=compressor,
            softmax_scale=scale,
        )

    @classmethod
    def from_layers(cls, layers: Sequence[MLAConfig]) -> MLAConfig:
        """Make the config of a model whose layers differ, from the config of each layer.

        Args:
            layers: the config of every layer, in order. Their model_type, hidden_size, num_layers
                and max_positions must be the same.

        ```python
        from dataclasses import replace

        import openmla

        narrow = openmla.PRESETS["tiny-v3"]
        wide = replace(narrow, kv_lora_rank=2 * narrow.kv_lora_rank)
        config = openmla.MLAConfig.from_layers([narrow, wide, narrow])
        assert config.layer(1) == wide
        ```
        """
        kinds = tuple(dict.fromkeys(layers))
        if len(kinds) == 1:
            return kinds[0]
        return replace(layers[0], kinds=kinds, layer_kinds=tuple(map(kinds.index, layers)))

    @classmethod
    def from_hf(cls, source: Mapping[str, Any] | str | os.PathLike[str] | Any) -> MLAConfig:
        """Read the config of a Hugging Face model.

        Args:
            source: the path of a config.json or of its folder, its contents as a dict, or a
                transformers config. For a model that wraps a text model (vision, audio), the config
                of the text model is read.

        Raises:
            ConfigError: the model type is not supported, or a field about attention has a value
                that is not supported. The message names both.

        ```python
        from pathlib import Path

        import openmla

        config = openmla.MLAConfig.from_hf(Path(openmla.__file__).parent / "demo")
        print(config)
        ```
        """
        from openmla.config.huggingface import read_config

        return read_config(source)
