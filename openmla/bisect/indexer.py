"""Components of the lightning indexer: queries, keys, scores and the top-k selection."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from openmla.bisect.layer import ANY, ROW, TOKENS, Component, Layer
from openmla.bisect.precision import EXACT, Precision
from openmla.bisect.rope import FAULTS, rotate
from openmla.cache.format import get_format
from openmla.config import IndexerConfig, MLAConfig
from openmla.layers.indexer import hadamard_transform


def of_indexer(layer: Layer) -> IndexerConfig:
    """The layer's indexer config. A layer without an indexer has none of these components."""
    assert layer.config.indexer is not None
    return layer.config.indexer


def _index_q(layer: Layer, p: Precision) -> Tensor:
    q = layer.linear("indexer.wq_b", layer.get("q_a_normed", p), p)
    return q.view(layer.num_tokens, of_indexer(layer).num_heads, -1)


def _index_k(layer: Layer, p: Precision) -> Tensor:
    return layer.linear("indexer.wk", layer.get("hidden_in", p), p)


def _index_k_normed(layer: Layer, p: Precision) -> Tensor:
    norm = "indexer.k_norm"
    weight, bias = layer.weight(norm), layer.weights[f"{norm}.bias"]
    return p.layer_norm(layer.get("index_k", p), weight, bias, layer.eps[norm])


def _turned(layer: Layer, x: Tensor, p: Precision, fault: str) -> Tensor:
    """R of the channels rotated, then all Hadamard-transformed, if the subject does that."""
    indexer, R = of_indexer(layer), layer.config.qk_rope_head_dim
    start = 0 if indexer.rope_side == "first" else indexer.head_dim - R
    before, turned, behind = x.tensor_split((start, start + R), dim=-1)
    rope, positions = layer.config.rope, torch.arange(layer.num_tokens)
    turned = rotate(
        turned, positions, rope, p, pairing=indexer.pairing,
        order=layer.settings.index_rope_order, fault=fault,
    )  # fmt: skip
    whole = torch.cat([p.take(before), turned, p.take(behind)], dim=-1)
    return hadamard_transform(whole) if layer.settings.index_hadamard == "true" else whole


def _index_q_rotated(layer: Layer, p: Precision, fault: str = "") -> Tensor:
    return _turned(layer, layer.get("index_q", p), p, fault)


def _index_k_rotated(layer: Layer, p: Precision, fault: str = "") -> Tensor:
    return _turned(layer, layer.get("index_k_normed", p), p, fault)


def _index_cache(layer: Layer, p: Precision) -> Tensor:
    rows = layer.get("index_k_rotated", p)
    return rows if p.exact else layer.round_trip("index_cache", rows)


def _index_weights(layer: Layer, p: Precision) -> Tensor:
    return layer.linear("indexer.weights_proj", layer.get("hidden_in", p), p)


def scores(q: Tensor, keys: Tensor, weights: Tensor, layer: Layer, p: Precision) -> Tensor:
    """[T, S]: relu of every head's products, weighted; kept wide, as every scoring kernel does."""
    indexer = of_indexer(layer)
    if layer.settings.index_format:  # a packed format also quantizes queries
        encoded, scales = get_format(layer.settings.index_format).encode_query(q.float())
        if scales is not None:
            q = (encoded.to(p.wide) * scales[..., None].to(p.wide)).to(p.wide)
    total = torch.zeros((len(q), len(keys)), dtype=p.wide)
    for head in range(indexer.num_heads):
        products = p.product(q[:, head], keys.T).relu()
        total += products * weights[:, head, None].to(p.wide)
    return total * (indexer.num_heads**-0.5 * indexer.head_dim**-0.5)


def _index_scores(layer: Layer, p: Precision) -> Tensor:
    if layer.has("index_cache"):
        keys = layer.dumped("index_cache").to(p.dtype)
    else:
        keys = layer.round_trip("index_cache", layer.get("index_k_rotated", p))
    q, weights = layer.get("index_q_rotated", p), layer.get("index_weights", p)
    return scores(q, keys, weights, layer, p).where(layer.usable_scores, 0)


def _chosen(layer: Layer, p: Precision) -> Tensor:
    """The top-k of the keys that a token sees; -1 if it sees fewer."""
    found = layer.get("index_scores", EXACT)
    places = torch.arange(layer.num_tokens)
    hidden = places > places[:, None]
    K = min(of_indexer(layer).topk, layer.num_tokens)
    best = found.masked_fill(hidden, -torch.inf).topk(K, dim=1).indices
    return best.masked_fill(best > places[:, None], -1)


def indexer_components(config: MLAConfig) -> Mapping[str, Component]:
    """The indexer's components by key, in order; they come before attention."""
    assert config.indexer is not None
    HI, DI, T = config.indexer.num_heads, config.indexer.head_dim, TOKENS
    listed = (
        Component("index_q", "index query projection", _index_q, (T, HI, DI)),
        Component("index_k", "index key projection", _index_k, (T, DI)),
        Component("index_k_normed", "norm of the index keys", _index_k_normed, (T, DI)),
        Component(
            "index_q_rotated", "RoPE of the index queries", _index_q_rotated, (T, HI, DI),
            alternatives={fault: partial(_index_q_rotated, fault=fault) for fault in FAULTS},
        ),
        Component(
            "index_k_rotated", "RoPE of the index keys", _index_k_rotated, (T, DI),
            alternatives={fault: partial(_index_k_rotated, fault=fault) for fault in FAULTS},
        ),
        Component("index_cache", "cached index keys", _index_cache, (T, ROW)),
        Component("index_weights", "weights of the index heads", _index_weights, (T, HI)),
        Component("index_scores", "index scores", _index_scores, (T, T), "scores"),
        Component("chosen", "choice of keys", _chosen, (T, ANY), "choice"),
    )  # fmt: skip
    return {component.name: component for component in listed}
