"""Components of V2 and V3 layers, in the order in which a layer computes them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from openmla.bisect.attend import NONE, Mistake, attend, moved_rows, out_of_latent
from openmla.bisect.layer import ROW, TOKENS, Component, Layer
from openmla.bisect.precision import Precision
from openmla.bisect.rope import FAULTS, rotate
from openmla.config import MLAConfig

FORMS = ("absorbed", "expanded")


def _q_a(layer: Layer, p: Precision) -> Tensor:
    return layer.linear("q_a_proj", layer.get("hidden_in", p), p)


def _q_a_normed(layer: Layer, p: Precision) -> Tensor:
    return layer.norm("q_a_layernorm", layer.get("q_a", p), p)


def _q(layer: Layer, p: Precision) -> Tensor:
    config = layer.config
    if config.q_lora_rank is None:
        q = layer.linear("q_proj", layer.get("hidden_in", p), p)
    else:
        q = layer.linear("q_b_proj", layer.get("q_a_normed", p), p)
    return q.view(layer.num_tokens, config.num_heads, config.qk_head_dim)


def _kv_a(layer: Layer, p: Precision) -> Tensor:
    return layer.linear("kv_a_proj_with_mqa", layer.get("hidden_in", p), p)


def _kv_c(layer: Layer, p: Precision) -> Tensor:
    return layer.norm("kv_a_layernorm", layer.get("kv_a", p)[:, : layer.config.kv_lora_rank], p)


def _rotated(layer: Layer, x: Tensor, p: Precision, fault: str) -> Tensor:
    rope, positions = layer.config.rope, torch.arange(layer.num_tokens)
    order = layer.settings.rope_order
    return rotate(x, positions, rope, p, pairing=rope.pairing, order=order, fault=fault)


def _q_pe(layer: Layer, p: Precision, fault: str = "") -> Tensor:
    return _rotated(layer, layer.get("q", p)[..., layer.config.qk_nope_head_dim :], p, fault)


def _k_pe(layer: Layer, p: Precision, fault: str = "") -> Tensor:
    return _rotated(layer, layer.get("kv_a", p)[:, layer.config.kv_lora_rank :], p, fault)


def _cache(layer: Layer, p: Precision) -> Tensor:
    """Cache rows: exact, or through the cache format and back if rounding is modeled."""
    rows = torch.cat([layer.get("kv_c", p), layer.get("k_pe", p)], dim=-1)
    return rows if p.exact else layer.round_trip("cache", rows)


def _lse(layer: Layer, p: Precision, form: str = "absorbed", mistake: Mistake = NONE) -> Tensor:
    lse = attend(layer, p, form=form, mistake=mistake).lse
    return lse / torch.tensor(2.0).log().to(lse) if layer.settings.lse_base == "2" else lse


def _other_base(layer: Layer, p: Precision) -> Tensor:
    ln2 = torch.tensor(2.0).log().to(p.wide)
    lse = _lse(layer, p)
    return lse * ln2 if layer.settings.lse_base == "2" else lse / ln2


def _out_latent(layer: Layer, p: Precision, mistake: Mistake = NONE) -> Tensor:
    return attend(layer, p, mistake=mistake).out_latent


def _out(layer: Layer, p: Precision, form: str = "absorbed", mistake: Mistake = NONE) -> Tensor:
    if layer.has("out_latent"):
        return out_of_latent(layer, p)
    return attend(layer, p, form=form, mistake=mistake).out


def _reread(
    layer: Layer, p: Precision, moved: tuple[int, int, int], *, part: str, stored: bool = False
) -> Tensor:
    if stored:
        return moved_rows(_cache(layer, p), moved)
    if part == "out" and layer.has("out_latent"):
        return out_of_latent(layer, p)
    found: Tensor = getattr(attend(layer, p, mistake=Mistake(moved=moved)), part)
    return found


def _output(layer: Layer, p: Precision) -> Tensor:
    return layer.linear("o_proj", layer.get("out", p).flatten(1), p)


def mistakes(config: MLAConfig) -> dict[str, Mistake]:
    """Mistakes to try if attention is outside its budget."""
    tried = {
        "as if the softmax scale were left out": Mistake(scale=1.0),
        "as if every row of keys began one key late": Mistake(first=1),
        "as if a query did not see its own key": Mistake(ahead=-1),
        "as if a query saw one key of the future": Mistake(ahead=1),
    }
    if config.rope.logit_scale != 1:
        plain = Mistake(scale=config.scale / config.rope.logit_scale)
        tried["as if YaRN's factor were left out of the softmax scale"] = plain
    if config.indexer is not None:
        tried["as if every key were attended to, not the chosen ones"] = Mistake(everything=True)
    return tried


def dense_components(config: MLAConfig) -> Mapping[str, Component]:
    """The layer's components by key, in order."""
    H, R, E = config.num_heads, config.qk_rope_head_dim, config.qk_head_dim
    C, V = config.kv_lora_rank, config.v_head_dim
    T, tried = TOKENS, mistakes(config)
    queries = [Component("q", "query projection", _q, (T, H, E))]
    if config.q_lora_rank is not None:
        rank = config.q_lora_rank
        queries = [
            Component("q_a", "query down-projection", _q_a, (T, rank)),
            Component("q_a_normed", "norm of the low-rank query", _q_a_normed, (T, rank)),
            *queries,
        ]
    listed = [
        *queries,
        Component("kv_a", "key-value down-projection", _kv_a, (T, C + R)),
        Component("kv_c", "norm of the latent", _kv_c, (T, C)),
        Component(
            "q_pe", "RoPE of the queries", _q_pe, (T, H, R),
            alternatives={fault: partial(_q_pe, fault=fault) for fault in FAULTS},
        ),
        Component(
            "k_pe", "RoPE of the keys", _k_pe, (T, R),
            alternatives={fault: partial(_k_pe, fault=fault) for fault in FAULTS},
        ),
        Component(
            "cache", "cache rows", _cache, (T, ROW),
            reread=partial(_reread, part="rows", stored=True),
        ),
    ]  # fmt: skip
    listed += [
        Component(
            "lse", "log-sum-exp of attention", _lse, (T, H), "lse",
            peers=tuple(partial(_lse, form=form) for form in FORMS),
            alternatives={
                "as if it were in base 2 where base e is said, or the other way": _other_base,
                **{text: partial(_lse, mistake=each) for text, each in tried.items()},
            },
            reread=partial(_reread, part="lse"),
        ),
        Component(
            "out_latent", "attention in latent space", _out_latent, (T, H, C),
            alternatives={t: partial(_out_latent, mistake=each) for t, each in tried.items()},
            reread=partial(_reread, part="out_latent"),
        ),
        Component(
            "out", "attention", _out, (T, H, V),
            peers=tuple(partial(_out, form=form) for form in FORMS),
            alternatives={text: partial(_out, mistake=each) for text, each in tried.items()},
            reread=partial(_reread, part="out"),
        ),
        Component("output", "output projection", _output, (T, config.hidden_size)),
    ]  # fmt: skip
    return {component.name: component for component in listed}
