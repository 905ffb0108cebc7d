"""Components of V4 layers: a latent that is both key and value, window, entries, sink."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from openmla.bisect.attend import AT_ONCE
from openmla.bisect.indexer import of_indexer, scores
from openmla.bisect.layer import ANY, ENTRIES, ROW, TOKENS, Component, Layer
from openmla.bisect.pooled import NOT_RESET, STALE, entries, index_entries
from openmla.bisect.precision import EXACT, Precision
from openmla.bisect.rope import FAULTS, rotate
from openmla.config import INDEXED_RATIO, CompressorConfig, MLAConfig
from openmla.layers.indexer import hadamard_transform


@dataclass(frozen=True)
class Mistake:
    """A known way for V4's attention to go wrong; the defaults mean no mistake."""

    scale: float | None = None
    window: int = 0  # extra keys beyond the window
    early: int = 0  # tokens before its end from which an entry is visible
    everything: bool = False  # the selection of entries is ignored
    sink: bool = True


NONE = Mistake()
MISTAKES = {
    "as if the softmax scale were left out": Mistake(scale=1.0),
    "as if the sink were left out": Mistake(sink=False),
    "as if the window began one key late": Mistake(window=-1),
    "as if the window began one key early": Mistake(window=1),
    "as if entries were seen one token before they are finished": Mistake(early=1),
    "as if entries were seen one token late": Mistake(early=-1),
    "as if every entry were attended to, not the chosen ones": Mistake(everything=True),
}


def _compressor(layer: Layer) -> CompressorConfig:
    assert layer.config.compressor is not None
    return layer.config.compressor


def _ratio(layer: Layer) -> int:
    return _compressor(layer).ratio(layer.number)


def _linear(layer: Layer, p: Precision, module: str, given: str) -> Tensor:
    return layer.linear(module, layer.get(given, p), p)


def _norm(layer: Layer, p: Precision, module: str, given: str) -> Tensor:
    return layer.norm(module, layer.get(given, p), p)


def _q(layer: Layer, p: Precision) -> Tensor:
    q = layer.linear("q_b_proj", layer.get("q_a_normed", p), p)
    return q.view(layer.num_tokens, layer.config.num_heads, -1)


def _turned(layer: Layer, x: Tensor, p: Precision, fault: str, inverse: bool = False) -> Tensor:
    """Rotate the last R columns with the RoPE of the layer's kind."""
    rope = _compressor(layer).rope if _ratio(layer) else layer.config.rope
    start = x.shape[-1] - layer.config.qk_rope_head_dim
    turned = rotate(
        x[..., start:], torch.arange(layer.num_tokens), rope, p, pairing="pairs", order="kept",
        inverse=inverse, fault=fault,
    )  # fmt: skip
    return torch.cat([p.take(x[..., :start]), turned], dim=-1)


def _q_rotated(layer: Layer, p: Precision, fault: str = "") -> Tensor:
    normed = p.rms_norm(layer.get("q", p), None, layer.eps["q_b_norm"])
    return _turned(layer, normed, p, fault)


def _rows(layer: Layer, p: Precision, fault: str = "") -> Tensor:
    return _turned(layer, layer.get("kv_normed", p), p, fault)


def _cache(layer: Layer, p: Precision) -> Tensor:
    rows = layer.get("rows", p)
    return rows if p.exact else layer.round_trip("cache", rows)


def _index_q(layer: Layer, p: Precision) -> Tensor:
    q = layer.linear("compressor.indexer.q_b_proj", layer.get("q_a_normed", p), p)
    return q.view(layer.num_tokens, of_indexer(layer).num_heads, -1)


def _index_q_rotated(layer: Layer, p: Precision, fault: str = "") -> Tensor:
    turned = _turned(layer, layer.get("index_q", p), p, fault)
    return hadamard_transform(turned) if layer.settings.index_hadamard == "true" else turned


def _index_scores(layer: Layer, p: Precision) -> Tensor:
    keys = layer.get("index_entries", p)
    if not layer.has("index_entries"):
        keys = layer.round_trip("index_cache", keys)
    q, weights = layer.get("index_q_rotated", p), layer.get("index_weights", p)
    return scores(q, keys, weights, layer, p).where(layer.usable_scores, 0)


def _chosen(layer: Layer, p: Precision) -> Tensor:
    limits = layer.num_choices()[:, None]
    places = torch.arange(layer.num_entries)
    found = layer.get("index_scores", EXACT).masked_fill(places >= limits, -torch.inf)
    best = found.topk(min(of_indexer(layer).topk, layer.num_entries), dim=1).indices
    return best.masked_fill(best >= limits, -1)


def _visible(layer: Layer, rows: slice, mistake: Mistake) -> Tensor:
    """[rows, T + n] bool: visible rows of the window, then visible entries."""
    places = torch.arange(layer.num_tokens)
    own, span = places[rows, None], _compressor(layer).window + mistake.window
    seen = (places <= own) & (places > own - span)
    n = layer.num_entries
    if not n:
        return seen
    finished = (own + 1 + mistake.early) // _ratio(layer)
    ready = torch.arange(n) < finished
    if _ratio(layer) == INDEXED_RATIO and not mistake.everything:
        chosen = layer.get_chosen()[rows]
        picked = torch.zeros((len(own), n + 1), dtype=torch.bool)
        outside = (chosen < 0) | (chosen >= n)
        ready &= picked.scatter_(1, chosen.masked_fill(outside, n), True)[:, :n]
    return torch.cat([seen, ready], dim=1)


def _attend(
    layer: Layer, p: Precision, short: bool = False, mistake: Mistake = NONE
) -> tuple[Tensor, Tensor]:
    """Out [T, H, D], still rotated, and lse [T, H] without the sink. `short`: scores are rounded,
    as in transformers' eager attention."""
    q = layer.get("q_rotated", p).transpose(0, 1)  # [H, T, D]
    if layer.has("cache"):
        keys = layer.dumped("cache").to(p.dtype)
    else:
        keys = layer.round_trip("cache", layer.get("rows", p))
    if layer.num_entries:
        found = layer.get("entries", p)
        found = found if layer.has("entries") else layer.round_trip("cache", found)
        keys = torch.cat([keys, found])
    step = max(AT_ONCE // (layer.config.num_heads * len(keys)), 1)
    starts = range(0, layer.num_tokens, step)
    parts = [
        _attend_rows(layer, p, slice(start, start + step), (q, keys), short, mistake)
        for start in starts
    ]
    out, lse = (torch.cat(part) for part in zip(*parts, strict=True))
    return out, lse


def _attend_rows(
    layer: Layer,
    p: Precision,
    rows: slice,
    given: tuple[Tensor, Tensor],  # q [H, T, D], keys [S, D]
    short: bool,
    mistake: Mistake,
) -> tuple[Tensor, Tensor]:
    q, keys = given
    scale = layer.config.scale if mistake.scale is None else mistake.scale
    logits = p.product(q[:, rows], keys.T) * scale
    logits = (logits.to(p.dtype) if short else logits).to(p.wide)
    logits = logits.masked_fill(~_visible(layer, rows, mistake), -torch.inf)
    lse = logits.logsumexp(-1)
    total = lse
    if mistake.sink:
        total = torch.logaddexp(lse, layer.weights["sinks"].to(p.wide)[:, None])
    probs = (logits - total[..., None]).exp().to(p.dtype)
    out = p.product(probs, keys).to(p.dtype)
    return out.transpose(0, 1), lse.transpose(0, 1)


def _attended(layer: Layer, p: Precision, short: bool = False, mistake: Mistake = NONE) -> Tensor:
    return _attend(layer, p, short, mistake)[0]


def _lse(layer: Layer, p: Precision, short: bool = False, mistake: Mistake = NONE) -> Tensor:
    lse = _attend(layer, p, short, mistake)[1]
    return lse / torch.tensor(2.0).log().to(lse) if layer.settings.lse_base == "2" else lse


def _other_base(layer: Layer, p: Precision) -> Tensor:
    ln2 = torch.tensor(2.0).log().to(p.wide)
    lse = _lse(layer, p)
    return lse * ln2 if layer.settings.lse_base == "2" else lse / ln2


def _out(
    layer: Layer, p: Precision, short: bool = False, mistake: Mistake = NONE, fault: str = ""
) -> Tensor:
    """Attention output, rotated back. Uses the dumped attention if available, else computes it."""
    attended = layer.get("attended", p) if layer.has("attended") else None
    if attended is None:
        attended = _attended(layer, p, short, mistake)
    return _turned(layer, attended, p, fault, inverse=True)


def _o_a(layer: Layer, p: Precision) -> Tensor:
    groups = _compressor(layer).output_groups
    out = layer.get("out", p).reshape(layer.num_tokens, groups, -1).transpose(0, 1)
    weight = p.take(layer.weight("o_a_proj")).view(groups, -1, out.shape[-1])
    return p.product(out, weight.mT).to(p.dtype).transpose(0, 1).flatten(1)


def _parts_before(config: MLAConfig) -> list[Component]:
    """Components up to the queries and raw rows."""
    T, H, D, rank = TOKENS, config.num_heads, config.latent_dim, config.q_lora_rank or 0
    linear = partial(partial, _linear)
    return [
        Component(
            "q_a", "query down-projection",
            linear(module="q_a_proj", given="hidden_in"), (T, rank),
        ),
        Component(
            "q_a_normed", "norm of the low-rank query",
            partial(_norm, module="q_a_norm", given="q_a"), (T, rank),
        ),
        Component("q", "query projection", _q, (T, H, D)),
        Component(
            "kv", "key-value projection", linear(module="kv_proj", given="hidden_in"), (T, D)
        ),
        Component(
            "kv_normed", "norm of the rows", partial(_norm, module="kv_norm", given="kv"), (T, D)
        ),
        Component(
            "q_rotated", "norm and RoPE of the queries", _q_rotated, (T, H, D),
            alternatives={fault: partial(_q_rotated, fault=fault) for fault in FAULTS},
        ),
        Component(
            "rows", "RoPE of the rows", _rows, (T, D),
            alternatives={fault: partial(_rows, fault=fault) for fault in FAULTS},
        ),
        Component("cache", "rows of the window", _cache, (T, ROW)),
    ]  # fmt: skip


def _parts_of_entries(config: MLAConfig, ratio: int) -> list[Component]:
    """Components of the compressor, and of the indexer that selects its entries."""
    T, D = TOKENS, config.latent_dim
    chooses = ratio == INDEXED_RATIO
    linear = partial(partial, _linear, given="hidden_in")
    width = 2 * D if chooses else D
    made = [
        Component(
            "pool_kv", "compressor's projection", linear(module="compressor.kv_proj"), (T, width)
        ),
        Component(
            "pool_score", "compressor's gate", linear(module="compressor.gate_proj"), (T, width)
        ),
        Component(
            "entries", "compressed entries", entries, (ENTRIES, D),
            alternatives={text: partial(entries, fault=text) for text in STALE},
            first_row=NOT_RESET,
        ),
    ]  # fmt: skip
    if not chooses:
        return made
    assert config.indexer is not None
    HI, DI = config.indexer.num_heads, config.indexer.head_dim
    return [
        *made,
        Component(
            "index_pool_kv", "index compressor's projection",
            linear(module="compressor.indexer.kv_proj"), (T, 2 * DI),
        ),
        Component(
            "index_pool_score", "index compressor's gate",
            linear(module="compressor.indexer.gate_proj"), (T, 2 * DI),
        ),
        Component(
            "index_entries", "compressed index keys", index_entries, (ENTRIES, DI),
            alternatives={text: partial(index_entries, fault=text) for text in STALE},
            first_row=NOT_RESET,
        ),
        Component("index_q", "index query projection", _index_q, (T, HI, DI)),
        Component(
            "index_q_rotated", "RoPE of the index queries", _index_q_rotated, (T, HI, DI),
            alternatives={fault: partial(_index_q_rotated, fault=fault) for fault in FAULTS},
        ),
        Component(
            "index_weights", "weights of the index heads",
            linear(module="compressor.indexer.scorer.weights_proj"), (T, HI),
        ),
        Component("index_scores", "index scores", _index_scores, (T, ENTRIES), "scores"),
        Component("chosen", "choice of entries", _chosen, (T, ANY), "choice"),
    ]  # fmt: skip


def compressed_components(config: MLAConfig, layer: int) -> Mapping[str, Component]:
    """The layer's components by key, in order."""
    assert config.compressor is not None
    ratio, groups = config.compressor.ratio(layer), config.compressor.output_groups
    T, H, D = TOKENS, config.num_heads, config.latent_dim
    rank = groups * config.compressor.output_lora_rank
    attention = [
        Component(
            "lse", "log-sum-exp of attention, without the sink", _lse, (T, H), "lse",
            peers=tuple(partial(_lse, short=short) for short in (False, True)),
            alternatives={
                "as if it were in base 2 where base e is said, or the other way": _other_base,
                **{text: partial(_lse, mistake=each) for text, each in MISTAKES.items()},
            },
        ),
        Component(
            "attended", "attention", _attended, (T, H, D),
            peers=tuple(partial(_attended, short=short) for short in (False, True)),
            alternatives={t: partial(_attended, mistake=each) for t, each in MISTAKES.items()},
        ),
        Component(
            "out", "attention, rotated back", _out, (T, H, D),
            peers=tuple(partial(_out, short=short) for short in (False, True)),
            alternatives={
                **{text: partial(_out, mistake=each) for text, each in MISTAKES.items()},
                **{fault: partial(_out, fault=fault) for fault in FAULTS},
            },
        ),
        Component("o_a", "grouped output projection", _o_a, (T, rank)),
        Component(
            "output", "output projection", partial(_linear, module="o_b_proj", given="o_a"),
            (T, config.hidden_size),
        ),
    ]  # fmt: skip
    between = _parts_of_entries(config, ratio) if ratio else []
    listed = [*_parts_before(config), *between, *attention]
    return {component.name: component for component in listed}
