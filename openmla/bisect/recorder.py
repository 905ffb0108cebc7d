"""record(): dump openmla's own steps inside a transformers model.

A prompt, then tokens one by one, so that the dump covers both prefill and decode.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from openmla.attention import IndexInputs
from openmla.attention.scores import score_chunk
from openmla.attention.select import choose_positions
from openmla.bisect.dump import DTYPES, Dump, Settings
from openmla.config import MLAConfig
from openmla.integrations.transformers import attach, attachment_of, detach
from openmla.integrations.transformers.attachment import Attended

DECODED = 4  # tokens decoded one by one, if the prompt is long enough
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
OUTPUTS_V4 = {
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
    "o_a_proj": "o_a",
    "o_b_proj": "output",
}


class Recorder:
    """Collects what the modules and steps of an attached model compute, token by token."""

    def __init__(self, config: MLAConfig, modules: list[nn.Module], num_tokens: int) -> None:
        self.config, self.num_tokens = config, num_tokens
        self.parts: defaultdict[str, list[Tensor]] = defaultdict(list)
        self.last: dict[int, Attended] = {}
        names = OUTPUTS if config.compressor is None else OUTPUTS_V4
        self.handles = [
            part.register_forward_hook(self._keeper(number, names[name]))
            for number, module in enumerate(modules)
            for name, part in module.named_modules()
            if name in names
        ]

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()

    def keep(self, number: int, key: str, rows: Tensor) -> None:
        # a copy, because RoPE changes queries in place
        self.parts[f"layers.{number}.{key}"].append(rows.detach().to("cpu", copy=True))

    def _keeper(self, number: int, key: str) -> Any:
        def keep(module: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
            rows = out if args[0].dim() == 2 else out.flatten(0, 1)  # some of V4's are flat already
            self.keep(number, key, rows)
            if key == "o_a":
                self.keep(number, "out", args[0].flatten(0, 1).flatten(1))
            if key in ("kv_a", "kv"):
                self.keep(number, "hidden_in", args[0].flatten(0, 1))

        return keep

    def watch(self, step: Attended) -> None:
        """Collect one layer's step; called after every step."""
        config, number, plan = self.config, step.layer, step.plan
        if config.compressor is not None:
            self._watch_v4(step)
            return
        self.keep(number, "q_pe", step.queries[..., config.qk_nope_head_dim :])
        self.keep(number, "k_pe", step.rows[:, config.kv_lora_rank :])
        self.keep(number, "slots", plan.slot_mapping)
        self.keep(number, "out", step.out)
        self.last[number] = step
        if number == 0:
            fresh = torch.full((plan.num_tokens,), self.num_tokens)
            expanded = plan.group("expanded")
            if expanded is not None:  # the request's own rows as projected
                fresh[_on_host(expanded.rows)] = plan.seq_lens[0] - plan.num_tokens
            self.parts["fresh_from"].append(fresh)
        indexer = config.indexer
        if indexer is None or indexer.is_shared(number):
            return
        if step.index_inputs is not None:
            self.keep(number, "index_q_rotated", step.index_inputs.q_idx)
        first = plan.seq_lens[0] - plan.num_tokens
        chosen = _first_keys(torch.arange(first, plan.seq_lens[0]), indexer.topk, ratio=1)
        if plan.select is not None and step.selection is not None:
            chosen[_on_host(plan.select.rows)] = step.selection.positions.cpu().long()
        if step.index_inputs is not None:
            self._keep_scores(step, step.index_inputs, plan.select, 1)
        self.keep(number, "chosen", chosen)

    def _keep_scores(
        self, step: Attended, index: IndexInputs | None, scored: Any, ratio: int
    ) -> None:
        """Keep scores of tokens that select keys, from the op that scored them; -inf elsewhere."""
        kept = torch.full((step.plan.num_tokens, self.num_tokens // ratio), -torch.inf)
        if index is not None and scored is not None:
            assert step.cache.index is not None
            rows = torch.arange(step.plan.num_tokens)
            q_idx, w_idx = index.q_idx[scored.rows], index.w_idx[scored.rows]
            rows = rows[_on_host(scored.rows)]
            for chunk, start_loc in zip(scored.chunks, scored.start_locs, strict=True):
                given = (q_idx, w_idx, step.cache.index, step.plan, scored, chunk, start_loc)
                kept[rows[chunk.rows], : chunk.num_keys] = score_chunk(*given).float().cpu()
        self.keep(step.layer, "index_scores", kept)

    def _watch_v4(self, step: Attended) -> None:
        """Keep the window's rows right after the step: later rows overwrite them."""
        number, window = step.layer, step.cache.window
        assert window is not None
        self.keep(number, "q_rotated", step.queries)
        self.keep(number, "rows", step.rows)
        self.keep(number, "attended", step.out)
        slots, D = step.plan.slot_mapping, self.config.latent_dim
        self.keep(number, "cache", window.layout.stored(window.data, slots, D))
        self.last[number] = step
        if step.cache.index is None:
            return
        shared, index, indexer = step.plan.shared, step.index_inputs, self.config.indexer
        assert shared is not None and indexer is not None
        chosen = _first_keys(shared.positions.cpu(), indexer.topk, ratio=step.cache.ratio)
        if index is not None:  # selected inside the step: repeat it
            self.keep(number, "index_q_rotated", index.q_idx)
            select = step.plan.select
            assert select is not None
            given = (index.q_idx, index.w_idx, step.cache.index, step.plan, select)
            chosen = choose_positions(*given).cpu().long()
            self._keep_scores(step, index, select, step.cache.ratio)
        else:
            self._keep_scores(step, None, None, step.cache.ratio)
        self.keep(number, "chosen", chosen)

    def _dump_v4(self, tensors: dict[str, Tensor], settings: dict[str, str]) -> None:
        for number, step in self.last.items():
            assert step.plan.shared is not None and step.cache.window is not None
            settings["cache_format"] = step.cache.window.format
            if step.cache.window.layout.scaled:
                tensors[f"layers.{number}.kv_scale"] = step.cache.window.kv_scale.cpu()
            ratio, table = step.cache.ratio, step.plan.shared.block_table
            kinds = (("entries", step.cache.compressed), ("index_entries", step.cache.index))
            for key, made in kinds:
                if made is None:
                    continue
                width = self.config.latent_dim if key == "entries" else _index_width(self.config)
                places = torch.arange(self.num_tokens // ratio, device=table.device)
                slots = table[0].long()[places // made.block_size] * made.block_size
                slots = slots + places % made.block_size
                rows = made.layout.read(made.data, slots, made.kv_scale, torch.float32, width)
                tensors[f"layers.{number}.{key}"] = rows.cpu()
                if key == "index_entries":
                    settings["index_format"] = made.format

    def dump(self, tokens: Tensor, dtype: torch.dtype) -> Dump:
        """Everything collected, and the final contents of the caches."""
        tensors = {name: torch.cat(parts) for name, parts in self.parts.items()}
        for name in [name for name in tensors if name.endswith("index_q_rotated")]:
            if len(tensors[name]) < self.num_tokens:  # missing for steps without a selection
                del tensors[name]
        tensors["tokens"] = tokens.cpu()
        config = self.config
        settings: dict[str, str] = {}
        if config.compressor is not None:
            self._dump_v4(tensors, settings)
            return Dump(tensors, _settings(config, dtype, settings))
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
                if rows.format == "index_fp32":  # keys are stored unrounded
                    tensors[f"layers.{number}.index_k_rotated"] = stored.to("cpu", dtype)
            latent = step.cache.latent
            if latent is not None and latent.layout.scaled:
                tensors[f"layers.{number}.kv_scale"] = latent.kv_scale.cpu()
                if latent.rope_ratio is not None:
                    tensors[f"layers.{number}.rope_ratio"] = latent.rope_ratio.cpu()
            settings["block_size"] = str(step.plan.block_size or "")
        return Dump(tensors, _settings(config, dtype, settings))


def _on_host(rows: Any) -> Any:
    """A plan's row indices (a slice or a tensor) on the host."""
    return rows.cpu() if isinstance(rows, Tensor) else rows


def _first_keys(positions: Tensor, topk: int, ratio: int) -> Tensor:
    """[T, K] i64: all keys of tokens that see at most K keys, then -1."""
    places = torch.arange(topk).expand(len(positions), -1)
    return places.masked_fill(places >= (positions[:, None] + 1) // ratio, -1)


def _index_width(config: MLAConfig) -> int:
    return 0 if config.indexer is None else config.indexer.head_dim


def _settings(config: MLAConfig, dtype: torch.dtype, found: dict[str, str]) -> Settings:
    """Settings of the dump. Modules write first members of pairs first, except V2's and V4's."""
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
    """Run a model on tokens [T] with attach()'s options, and dump what every layer computed."""
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
