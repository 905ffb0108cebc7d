"""record(): a dump of this package's own steps inside a transformers model: a prompt, then tokens
one by one, so that prefill and decode are both in it."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from openmla.bisect.dump import DTYPES, Dump, Settings
from openmla.cache import PagedCache
from openmla.config import MLAConfig
from openmla.integrations.transformers import attach, attachment_of, detach
from openmla.integrations.transformers.attachment import Attended

DECODED = 4  # tokens that are given one by one, if the prompt is long enough
# Modules whose outputs are components, by their names in transformers' attention modules.
OUTPUTS = {
    "q_a_proj": "q_a",
    "q_a_layernorm": "q_a_normed",
    "q_proj": "q",
    "q_b_proj": "q",
    "kv_a_proj_with_mqa": "kv_a",
    "kv_a_layernorm": "kv_c",
    "indexer.wq_b": "index_q",
    "indexer.wk": "index_k",
    "indexer.k_norm": "index_k_normed",
    "indexer.weights_proj": "index_weights",
    "o_proj": "output",
}


class Recorder:
    """Collects what modules and steps of an attached model compute, token after token."""

    def __init__(self, config: MLAConfig, modules: list[nn.Module], num_tokens: int) -> None:
        self.config, self.num_tokens = config, num_tokens
        self.parts: defaultdict[str, list[Tensor]] = defaultdict(list)
        self.last: dict[int, Attended] = {}
        self.handles = [
            part.register_forward_hook(self._keeper(number, OUTPUTS[name]))
            for number, module in enumerate(modules)
            for name, part in module.named_modules()
            if name in OUTPUTS
        ]

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()

    def keep(self, number: int, key: str, rows: Tensor) -> None:
        self.parts[f"layers.{number}.{key}"].append(rows.detach().cpu())

    def _keeper(self, number: int, key: str) -> Any:
        def keep(module: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
            self.keep(number, key, out.flatten(0, 1))
            if key in ("kv_a", "kv"):
                self.keep(number, "hidden_in", args[0].flatten(0, 1))

        return keep

    def watch(self, step: Attended) -> None:
        """After every layer's step."""
        config, number, plan = self.config, step.layer, step.plan
        self.keep(number, "q_pe", step.queries[..., config.qk_nope_head_dim :])
        self.keep(number, "k_pe", step.rows[:, config.kv_lora_rank :])
        self.keep(number, "slots", plan.slot_mapping)
        self.keep(number, "out", step.out)
        self.last[number] = step
        if number == 0:
            fresh = torch.full((plan.num_tokens,), self.num_tokens)
            if plan.prefill is not None:  # expanded: its own rows as they were projected
                fresh[plan.prefill.rows] = plan.seq_lens[0] - plan.num_tokens
            self.parts["fresh_from"].append(fresh)
        indexer = config.indexer
        if indexer is not None and not indexer.is_shared(number):
            first = plan.seq_lens[0] - plan.num_tokens
            seen = torch.arange(first + 1, plan.seq_lens[0] + 1)[:, None]
            places = torch.arange(indexer.topk).expand(plan.num_tokens, -1)
            chosen = places.masked_fill(places >= seen, -1).clone()
            if plan.sparse is not None and step.selection is not None:
                rows = plan.sparse.rows
                rows = rows.cpu() if isinstance(rows, Tensor) else rows
                chosen[rows] = step.selection.positions.cpu().long()
            self.keep(number, "chosen", chosen)

    def dump(self, tokens: Tensor, dtype: torch.dtype) -> Dump:
        """Everything, with what the caches hold in the end."""
        tensors = {name: torch.cat(parts) for name, parts in self.parts.items()}
        tensors["tokens"] = tokens.cpu()
        config, settings = self.config, {}
        for number, step in self.last.items():
            slots = tensors.pop(f"layers.{number}.slots")
            found = {"cache": step.cache.latent, "index_cache": step.cache.index}
            for key, width in (("cache", config.latent_dim), ("index_cache", _index_width(config))):
                rows = found[key]
                if rows is None:
                    continue
                stored = rows.layout.stored(rows.data, slots.to(rows.data.device), width)
                tensors[f"layers.{number}.{key}"] = stored.cpu()
                settings["cache_format" if key == "cache" else "index_format"] = rows.format
                if rows.format == "index_fp32":  # keys as they came
                    tensors[f"layers.{number}.index_k_rotated"] = stored.to("cpu", dtype)
            latent = step.cache.latent
            if latent is not None and latent.layout.scaled:
                tensors[f"layers.{number}.kv_scale"] = latent.kv_scale.cpu()
                if latent.rope_ratio is not None:
                    tensors[f"layers.{number}.rope_ratio"] = latent.rope_ratio.cpu()
            settings["block_size"] = str(step.plan.block_size or "")
        return Dump(tensors, _settings(config, dtype, settings))


def _index_width(config: MLAConfig) -> int:
    return 0 if config.indexer is None else config.indexer.head_dim


def _settings(config: MLAConfig, dtype: torch.dtype, found: dict[str, str]) -> Settings:
    """transformers' modules write rotated pairs first members first, all but V2's and V4's."""
    kept = config.model_type in ("deepseek_v2", "deepseek_v4")
    order = "kept" if kept or config.rope.pairing == "halves" else "split"
    names = {known: name for name, known in DTYPES.items()}
    return Settings(
        model_type=config.model_type,
        dtype=names[dtype],
        rope_order=order,
        index_rope_order="kept" if kept else "split",
        **found,
    )


@torch.no_grad()
def record(model: Any, tokens: Tensor, **options: Any) -> Dump:
    """Run a model's tokens [T] here, with attach()'s options, and say what every layer computed."""
    attach(model, capture=False, **options)
    attachment = attachment_of(model)
    recorder = Recorder(attachment.config, attachment.modules, len(tokens))
    attachment.watcher = recorder.watch
    decoded = min(DECODED, len(tokens) // 2)
    past = DynamicCache(config=model.config)
    try:
        for part in tokens.split([len(tokens) - decoded, *[1] * decoded]):
            model(part[None], past_key_values=past, use_cache=True)
    finally:
        recorder.remove()
        detach(model)
    return recorder.dump(tokens, model.dtype)
