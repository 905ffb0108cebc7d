"""MLAConfig and its parts: frozen, checked when made, nothing derived is stored."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from openmla.errors import ConfigError, check_kind

ROPE_KINDS = ("none", "default", "yarn", "longrope")
PAIRINGS = ("pairs", "halves")
# Far above every model there is. Memory is taken by these numbers, so a config that was damaged or
# made up must not choose them: a tuple per layer, a table of angles per position.
MAX_LAYERS = 100_000
MOST_DRAFTS = 8  # draft (MTP) layers after a model's own
MAX_POSITIONS = 2**24
MAX_WIDTH = 2**20  # of anything else that is counted
INDEXED_RATIO = 4  # of V4's layers: windows overlap and an indexer chooses among entries


def _require(ok: bool, field: str, expectation: str, value: object) -> None:
    if not ok:
        raise ConfigError(f"config: {field} must be {expectation}, got {value!r}.")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_finite(value: object) -> bool:
    """Whether a value is a number that a float can hold, whatever its type and size."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return -sys.float_info.max <= value <= sys.float_info.max  # False for NaN


def _is_positive(value: Any) -> bool:
    return is_finite(value) and bool(value > 0)


def require_size(field: str, value: Any, *, least: int = 1, most: int = MAX_WIDTH) -> None:
    """A ConfigError unless a value is an integer in its bounds."""
    what = "a positive integer" if least == 1 else f"an integer of at least {least}"
    _require(_is_int(value) and value >= least, field, what, value)
    _require(value <= most, field, f"at most {most}", value)


def yarn_mscale(factor: float, mscale: float) -> float:
    """YaRN's magnitude term: 1 without stretching, else 0.1 * mscale * ln(factor) + 1."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


@dataclass(frozen=True)
class RopeConfig:
    """How positions rotate the R shared columns.

    `pairing`: "pairs" rotates columns (2i, 2i+1), "halves" columns (i, i + R/2).
    `kind` "none" keeps the R columns but never rotates them (Kimi-Linear); "external" leaves it to
    whoever projects, by a kind of rope that is not known here (an attached model's, an engine's).
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
        """What cos and sin are multiplied with.

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
        """What the softmax scale is multiplied with: m squared, m from mscale_all_dim."""
        if self.kind in ("none", "default"):
            return 1.0
        return yarn_mscale(self.factor, self.mscale_all_dim) ** 2


def check_layer_number(layer: int, num_layers: int = 0) -> None:
    """Raise unless a model may have such a layer, of num_layers where these are known. Draft (MTP)
    layers come after its own."""
    _require(_is_int(layer) and layer >= 0, "layer", "an integer of at least 0", layer)
    most = num_layers + MOST_DRAFTS - 1
    if num_layers and layer > most:
        last = num_layers - 1
        _require(False, "layer", f"in 0..{last}, or a draft layer up to {most}", layer)


@dataclass(frozen=True)
class IndexerConfig:
    """The lightning indexer of sparse models: HI heads of width DI choose topk keys per query.

    `rope_side` says which R of the DI channels are rotated. `shared[l]` is True where layer l
    reuses the previous layer's selection and owns no indexer.
    """

    num_heads: int
    head_dim: int
    topk: int
    pairing: str = "halves"
    rope_side: str = "first"
    norm_eps: float = 1e-6
    shared: tuple[bool, ...] = ()

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
        """Whether a layer reuses an earlier selection; layers past the list (drafts) do not."""
        check_layer_number(layer, len(self.shared))
        return layer < len(self.shared) and self.shared[layer]


@dataclass(frozen=True)
class CompressorConfig:
    """What V4 adds: a window of raw rows, pooled rows per layer, a sink, a grouped output.

    `ratios[l]` is 0 or 1 (window only; kept as 0), 4 (overlapping pools, indexer) or 128 (all
    pools). Layers past the list (draft layers) are window only. `rope` serves the layers with
    ratio > 0, MLAConfig.rope the others: the reference model does not stretch theirs, and an
    engine that does is matched by giving it YaRN there.
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
        """Tokens per compressed entry of a layer, 0 where it has none."""
        check_layer_number(layer, len(self.ratios))
        return self.ratios[layer] if layer < len(self.ratios) else 0


@dataclass(frozen=True)
class MLAConfig:
    """The dimensions of one model's attention. The alphabet is in docs/mla.md.

    `num_heads` is the count on this rank. `num_layers` counts attention layers (LongCat has two
    per block). `q_factor` and `latent_factor` multiply the query and the latent (LongCat).
    The whole query is multiplied by 1 + llama4_beta * ln(1 + floor(p / llama4_positions)) when
    llama4_beta is not 0 (Mistral 4). With `head_gate` each head's output is multiplied by the
    sigmoid of a number projected from the hidden state (Ling 3.0). `latent_eps` is the config's
    rms_norm_eps, as engines use it; transformers fixes 1e-6 for the two latent norms of most
    families. `softmax_scale` overrides what `scale` is otherwise worked out to be. A `hidden_size`
    of 0 says that others project: such a config plans and attends, but makes no layer.
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
    head_gate: bool = False
    indexer: IndexerConfig | None = None
    compressor: CompressorConfig | None = None
    softmax_scale: float | None = None

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
        scale = self.softmax_scale
        ok = scale is None or _is_positive(scale)
        _require(ok, "softmax_scale", "a positive number", scale)
        self._check_rope()
        if self.indexer is not None:
            self._check_indexer(self.indexer)
        if self.compressor is not None:
            self._check_compressor(self.compressor)

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
        known = self.q_lora_rank is not None or self.hidden_size == 0  # or others project
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
        _require(not self.head_gate, "head_gate", "False with a compressor", self.head_gate)
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
        """What tells models apart; dataclasses.asdict() has every field."""
        rope = self.rope.kind if self.rope.factor == 1 else f"{self.rope.kind} {self.rope.factor:g}"
        hidden = f"hidden {self.hidden_size}" if self.hidden_size else "projected by others"
        parts = [
            f"{self.num_layers} layers, {self.num_heads} heads, {hidden}",
            f"q_lora {self.q_lora_rank}, C={self.kv_lora_rank}, P={self.qk_nope_head_dim}, "
            f"R={self.qk_rope_head_dim}, V={self.v_head_dim}",
            f"rope {rope}, {self.max_positions} positions",
        ]
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
        """Raise unless there is all a layer with parameters needs."""
        if self.hidden_size == 0:
            raise ConfigError(
                f"{where}: config must say hidden_size and rope, got one of from_numbers(), with "
                "which the caller projects and rotates. Use attend_step or attend_partial."
            )

    @property
    def is_external(self) -> bool:
        """Whether others rotate, by a rope that is not known here."""
        return self.rope.kind == "external"

    @property
    def qk_head_dim(self) -> int:
        """Width of a query or expanded key head: P + R."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_dim(self) -> int:
        """D, the width of a cached row: C + R, or C where the latent holds its own rope (V4)."""
        if self.compressor is not None:
            return self.kv_lora_rank
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def scale(self) -> float:
        """What multiplies the logits, in both forms: (P + R)^-0.5, times YaRN's m squared, unless
        softmax_scale says it."""
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
        """From what an engine's attention layer knows: H, C, P, R and V of this rank, its softmax
        scale (default: (P + R)^-0.5), its indexer's numbers. No rope and no file.

        Such a config plans, allocates and attends: whoever calls has projected and rotated. It
        makes no layer (MLAAttention, RopeTable), which needs hidden_size and rope. `max_positions`
        bounds V4's sequences and, if it is small, the default workspace; nothing else looks at it.
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
    def from_hf(cls, source: Mapping[str, Any] | str | os.PathLike[str] | Any) -> MLAConfig:
        """From a config.json (its path, or its folder's), its dict, or a transformers config.

        The same model gives the same MLAConfig whichever way it comes. The config of a model
        around a text model (vision, audio) is read by its text part. Anything about attention that
        is not understood raises ConfigError naming field and value.
        """
        from openmla.config.huggingface import read_config

        return read_config(source)
