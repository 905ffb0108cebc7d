"""V4's compressor as a component: pools tokens into entries, and models stale state."""

from __future__ import annotations

import torch
from torch import Tensor

from openmla.bisect.layer import Layer
from openmla.bisect.precision import Precision
from openmla.bisect.rope import rotate
from openmla.layers.indexer import hadamard_transform

STALE = (
    "as if the compressor's state were one window old",
    "as if the compressor's state were one token old",
    "as if the compressor's state were lost: nothing of the window before is in the pool",
)

NOT_RESET = "as if the compressor's state of an earlier request had not been reset"


def pool(
    layer: Layer, p: Precision, kv: Tensor, score: Tensor, module: str, fault: str = ""
) -> Tensor:  # [n, D]
    """Pool every `ratio` tokens [T, CD] into one entry: softmax over the pool, norm, RoPE.

    Overlapping windows have twice as many channels as an entry: the first half of a token's
    channels goes into the entry of the next window.
    """
    compressor = layer.config.compressor
    assert compressor is not None
    ratio, D = compressor.ratio(layer.number), layer.weight(f"{module}.kv_norm").shape[0]
    n = layer.num_tokens // ratio
    if fault == STALE[1]:
        kv, score = (torch.cat([part[:1], part[:-1]]) for part in (kv, score))
    bias = p.take(layer.weights[f"{module}.position_bias"])
    values = p.take(kv)[: n * ratio].unflatten(0, (n, ratio))
    z = p.take(score)[: n * ratio].unflatten(0, (n, ratio)) + bias
    if kv.shape[1] == 2 * D:
        back = 2 if fault == STALE[0] else 1
        older, older_z = torch.zeros_like(values), torch.full_like(z, -torch.inf)
        if fault != STALE[2]:
            older[back:], older_z[back:] = values[: n - back], z[: n - back]
        values = torch.cat([older[..., :D], values[..., D:]], dim=1)
        z = torch.cat([older_z[..., :D], z[..., D:]], dim=1)
    weights = z.to(p.wide).softmax(dim=1).to(p.dtype)
    pooled = (weights * values).sum(1)
    normed = layer.norm(f"{module}.kv_norm", pooled, p)
    R = layer.config.qk_rope_head_dim
    turned = rotate(
        normed[:, D - R :], torch.arange(n) * ratio, compressor.rope, p,
        pairing="pairs", order="kept",
    )  # fmt: skip
    return torch.cat([normed[:, : D - R], turned], dim=-1)


def entries(layer: Layer, p: Precision, fault: str = "") -> Tensor:
    """Entries that attention reads besides its window, through the cache format if rounding."""
    kv, score = layer.get("pool_kv", p), layer.get("pool_score", p)
    made = pool(layer, p, kv, score, "compressor", fault)
    return made if p.exact else layer.round_trip("cache", made)


def index_entries(layer: Layer, p: Precision, fault: str = "") -> Tensor:
    """The indexer's keys, from a compressor of its own."""
    kv, score = layer.get("index_pool_kv", p), layer.get("index_pool_score", p)
    made = pool(layer, p, kv, score, "compressor.indexer", fault)
    if layer.settings.index_hadamard == "true":
        made = hadamard_transform(made)
    return made if p.exact else layer.round_trip("index_cache", made)
