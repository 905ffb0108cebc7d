"""Plain transformers as the other engine of V4: a prompt in two passes, dumped by hooks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from openmla.bisect import Dump, Settings

NAMES = {
    "q_a_proj": "q_a",
    "q_a_norm": "q_a_normed",
    "q_b_proj": "q",
    "kv_proj": "kv",
    "kv_norm": "kv_normed",
    "compressor.kv_proj": "pool_kv",
    "compressor.gate_proj": "pool_score",
    "compressor.indexer.kv_proj": "index_pool_kv",
    "compressor.indexer.gate_proj": "index_pool_score",
    "compressor.indexer.q_b_proj": "index_q",
    "compressor.indexer.scorer.weights_proj": "index_weights",
    "compressor.indexer.scorer": "index_scores",
    "compressor.indexer": "chosen",
    "o_a_proj": "o_a",
    "o_b_proj": "output",
}
INPUTS = {"kv_proj": "hidden_in", "o_a_proj": "out"}


def dump_v4(
    model: Any, tokens: Tensor, *, first: int, between: Callable[[Any], None] | None = None
) -> Dump:
    """The first tokens in one pass, the rest in another; `between` is given the cache."""
    from transformers import DynamicCache

    parts: defaultdict[str, list[Tensor]] = defaultdict(list)
    past = DynamicCache(config=model.config)
    handles: list[Any] = []

    def keep(key: str, out: Tensor) -> None:
        parts[key].append(out[0].clone())

    def keeper(i: int, name: str) -> Any:
        def hook(module: Any, args: Any, out: Tensor) -> None:
            keep(f"layers.{i}.{NAMES[name]}", out)
            if name in INPUTS:
                keep(f"layers.{i}.{INPUTS[name]}", args[0].flatten(2))

        return hook

    for i, layer in enumerate(model.model.layers):
        for name, part in layer.self_attn.named_modules():
            if name in NAMES:
                handles.append(part.register_forward_hook(keeper(i, name)))
    if between is not None and first == 0:
        between(past)
    for chunk in tokens.split([first, len(tokens) - first] if first else [len(tokens)]):
        model(chunk[None], past_key_values=past, use_cache=True)
        if between is not None and first and len(chunk) == first:
            between(past)
    for handle in handles:
        handle.remove()
    tensors = {name: _joined(found) for name, found in parts.items()}
    for i, kept in enumerate(past.layers):
        for name, key in (("compressor", "entries"), ("indexer", "index_entries")):
            made = getattr(kept, "compressed_kv", {}).get(name)
            if made is not None:
                tensors[f"layers.{i}.{key}"] = made[0].clone()
    tensors["tokens"] = tokens
    return Dump(tensors, Settings(model_type="deepseek_v4"))


def _joined(parts: list[Tensor]) -> Tensor:
    """Passes one after the other; of fewer entries, padded to those of the last pass."""
    if parts[0].dim() == 2 and len({part.shape[1] for part in parts}) > 1:
        width = max(part.shape[1] for part in parts)
        empty = 0.0 if parts[0].is_floating_point() else -1
        parts = [pad(part, (0, width - part.shape[1]), value=empty) for part in parts]
    return torch.cat(parts)
