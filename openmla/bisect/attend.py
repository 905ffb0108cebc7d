"""Attention as a component: the dumped queries over the dumped keys, absorbed or expanded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from openmla.bisect.layer import Layer
from openmla.bisect.precision import Precision

AT_ONCE = 2**24  # scores held at once, over all heads


@dataclass(frozen=True)
class Mistake:
    """A known way for attention to go wrong; the defaults mean no mistake."""

    scale: float | None = None
    first: int = 0  # keys before this one are not seen
    ahead: int = 0  # keys after its own that a query sees; -1: it misses its own
    everything: bool = False  # misread block: its rows, those read, its size
    moved: tuple[int, int, int] | None = None  # rows to and from which one block was read, and size


class Attended(NamedTuple):
    out: Tensor  # [T, H, V]
    lse: Tensor  # [T, H]
    out_latent: Tensor  # [T, H, C]


class Keys(NamedTuple):
    """The keys that queries attend to, as stored and as projected: [S, C] and [S, R], or if
    expanded [H, S, P + R] and [H, S, V]."""

    stored: tuple[Tensor, Tensor]
    fresh: tuple[Tensor, Tensor]


NONE = Mistake()


def attend(
    layer: Layer, precision: Precision, *, form: str = "absorbed", mistake: Mistake = NONE
) -> Attended:
    """Softmax attention of every token over its keys. `form` determines what is rounded."""
    config = layer.config
    P, H, C = config.qk_nope_head_dim, config.num_heads, config.kv_lora_rank
    q_nope, q_pe = layer.get("q", precision)[..., :P], layer.get("q_pe", precision)
    scale = config.scale if mistake.scale is None else mistake.scale
    keys = _keys(layer, precision, mistake)
    kv_b = precision.take(layer.weight("kv_b_proj")).view(H, -1, C)
    w_uk, w_uv = kv_b[:, :P], kv_b[:, P:]
    if form == "expanded":  # for all tokens at once: all chunks of queries use the same keys
        both = layer.fresh_from is not None
        stored = _expanded(keys.stored, w_uk, w_uv, precision)
        fresh_keys = _expanded(keys.fresh, w_uk, w_uv, precision) if both else stored
        keys = Keys(stored, fresh_keys)
    run = _Keyed(w_uk, w_uv, precision, keys, scale)
    ways = {"absorbed": run.absorbed, "expanded": run.expanded}
    step = max(AT_ONCE // (H * layer.num_tokens), 1)
    parts = []
    for start in range(0, layer.num_tokens, step):
        rows = slice(start, min(start + step, layer.num_tokens))
        seen, fresh = visible(layer, rows, precision, mistake)
        parts.append(ways[form](q_nope[rows], q_pe[rows], seen, fresh))
    return Attended(*(torch.cat(part) for part in zip(*parts, strict=True)))


def visible(
    layer: Layer, rows: slice, precision: Precision, mistake: Mistake
) -> tuple[Tensor, Tensor | None]:
    """[n, S] bool: the keys that each of `rows` sees; and those it reads as projected."""
    places = torch.arange(layer.num_tokens)
    own = places[rows, None]
    seen = (places >= mistake.first) & (places <= own + mistake.ahead)
    if layer.chooses and not mistake.everything:
        chosen = layer.get_chosen()[rows]
        picked = torch.zeros((len(own), layer.num_tokens + 1), dtype=torch.bool)
        outside = (chosen < 0) | (chosen >= layer.num_tokens)
        picked.scatter_(1, chosen.masked_fill(outside, layer.num_tokens), True)
        seen = seen & picked[:, :-1]
    fresh = None
    if layer.fresh_from is not None:
        fresh = places >= layer.fresh_from[rows, None]
    return seen, fresh


def _keys(layer: Layer, precision: Precision, mistake: Mistake) -> Keys:
    C = layer.config.kv_lora_rank
    rows = torch.cat([layer.get("kv_c", precision), layer.get("k_pe", precision)], dim=-1)
    if layer.has("cache"):
        stored = layer.dumped("cache").to(precision.dtype)
    else:
        stored = layer.round_trip("cache", rows)
    if mistake.moved is not None:
        stored = moved_rows(stored, mistake.moved)
    return Keys((stored[:, :C], stored[:, C:]), (rows[:, :C], rows[:, C:]))


def moved_rows(rows: Tensor, moved: tuple[int, int, int]) -> Tensor:
    """Replace one block of rows by another: destination, source, size."""
    to, source, size = moved
    size = min(size, len(rows) - to, len(rows) - source)
    rows = rows.clone()
    rows[to : to + size] = rows[source : source + size].clone()
    return rows


def out_of_latent(layer: Layer, precision: Precision) -> Tensor:
    """The dumped latent attention output, projected to the heads' values."""
    H, P = layer.config.num_heads, layer.config.qk_nope_head_dim
    w_uv = precision.take(layer.weight("kv_b_proj")).view(H, -1, layer.config.kv_lora_rank)[:, P:]
    latent = layer.get("out_latent", precision).transpose(0, 1)
    return precision.product(latent, w_uv.mT).to(precision.dtype).transpose(0, 1)


def _expanded(
    rows: tuple[Tensor, Tensor], w_uk: Tensor, w_uv: Tensor, p: Precision
) -> tuple[Tensor, Tensor]:
    """Keys and values of every head, rounded."""
    k_nope = p.product(rows[0], w_uk.mT).to(p.dtype)
    k = torch.cat([k_nope, rows[1].expand(len(k_nope), -1, -1)], dim=-1)
    return k, p.product(rows[0], w_uv.mT).to(p.dtype)


class _Keyed(NamedTuple):
    w_uk: Tensor  # [H, P, C]
    w_uv: Tensor  # [H, V, C]
    precision: Precision
    keys: Keys
    scale: float

    def absorbed(
        self, q_nope: Tensor, q_pe: Tensor, seen: Tensor, fresh: Tensor | None
    ) -> Attended:
        """Attention in latent space. Scores stay in the wide dtype, as in flash kernels."""
        p = self.precision
        q_latent = p.product(q_nope.transpose(0, 1), self.w_uk).to(p.dtype)  # [H, n, C]

        def score(keys: tuple[Tensor, Tensor]) -> Tensor:
            nope = p.product(q_latent, keys[0].T)
            return (nope + p.product(q_pe.transpose(0, 1), keys[1].T)) * self.scale

        def value(probs: Tensor, keys: tuple[Tensor, Tensor]) -> Tensor:
            return p.product(probs, keys[0])

        latent, lse = self._softmax(score, value, seen, fresh)
        out = p.product(latent, self.w_uv.mT).to(p.dtype)
        return Attended(*(part.transpose(0, 1) for part in (out, lse, latent)))

    def expanded(
        self, q_nope: Tensor, q_pe: Tensor, seen: Tensor, fresh: Tensor | None
    ) -> Attended:
        """Attention with keys and values per head, all rounded, as in transformers' eager mode."""
        p = self.precision
        q = torch.cat([q_nope, q_pe], dim=-1).transpose(0, 1)  # [H, n, E]

        def score(keys: tuple[Tensor, Tensor]) -> Tensor:
            return (p.product(q, keys[0].mT).to(p.dtype) * self.scale).to(p.wide)

        def value(probs: Tensor, keys: tuple[Tensor, Tensor]) -> Tensor:
            return p.product(probs, keys[1])

        out, lse = self._softmax(score, value, seen, fresh)
        latent = out.new_zeros((*out.shape[:2], self.w_uv.shape[2]))  # the expanded form has none
        return Attended(*(part.transpose(0, 1) for part in (out, lse, latent)))

    def _softmax(
        self,
        score: Callable[[tuple[Tensor, Tensor]], Tensor],
        value: Callable[[Tensor, tuple[Tensor, Tensor]], Tensor],
        seen: Tensor,
        fresh: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        p = self.precision
        scores = score(self.keys.stored)
        if fresh is not None:
            scores = score(self.keys.fresh).where(fresh, scores)
        scores = scores.masked_fill(~seen, -torch.inf)
        lse = scores.logsumexp(-1)
        probs = (scores - lse[..., None].where(lse[..., None].isfinite(), 0)).exp().to(p.dtype)
        if fresh is None:
            return value(probs, self.keys.stored).to(p.dtype), lse
        stored = value(probs.masked_fill(fresh, 0), self.keys.stored)
        out = stored + value(probs.masked_fill(~fresh, 0), self.keys.fresh)
        return out.to(p.dtype), lse
