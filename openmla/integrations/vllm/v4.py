"""DeepSeek V4 on CPUs: vLLM's own model, but who chooses entries and who attends is openmla.

vLLM's V4 asks for no attention backend. So its model is registered once more, as a class that is
vLLM's own unless this backend is chosen; then its layers are changed once they are made. vLLM still
projects, writes rows and pools tokens into entries; the bytes are "fp8_dsv4" and "index_fp8". What
a step hands to its layers is made here, too: vLLM 0.32 asks Triton for that, and fails on CPUs even
where there is one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.models import deepseek_v4
from vllm.models.deepseek_v4.attention import DeepseekV4Attention
from vllm.models.deepseek_v4.compressor import CompressorMetadata
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionMetadataBuilder
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from openmla.errors import ConfigError
from openmla.integrations.vllm.options import option
from openmla.ops import Segment, index_select, mqa_sparse

SCORES = 2**24  # of tokens and entries, held at once
CHOOSING = 4  # the compress ratio whose layers choose among their entries


class DeepseekV4ForCausalLM(deepseek_v4.DeepseekV4ForCausalLM):
    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        chosen = vllm_config.attention_config.backend is AttentionBackendEnum.CUSTOM
        if chosen and not current_platform.is_cpu():
            raise ConfigError(
                "openmla: DeepSeek V4 must be on a CPU to run with --attention-backend CUSTOM, got "
                f"{current_platform.device_type}; leave the option out for vLLM's own."
            )
        for name in ("query_dtype", "prefill_dtype"):
            if chosen and option(vllm_config, name, None) is not None:
                raise ConfigError(f"openmla: {name} must not be given for DeepSeek V4.")
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        if chosen:
            take_over(self)


def take_over(model: nn.Module) -> None:
    """Of this model's layers and caches, not of vLLM's classes."""
    module: Any
    for module in model.modules():
        if isinstance(module, AttentionLayerBase):
            module.get_attn_backend = partial(with_our_builder, module.get_attn_backend())
        if isinstance(module, DeepseekV4Attention):
            module.forward_mqa = partial(attend, module)
            if module.indexer is not None:
                module.indexer.indexer_op = Chooser(module.indexer)


@cache
def with_our_builder(backend: type) -> type:
    """vLLM's backend of one of its caches: shapes, layouts and block sizes stay as they are."""
    ours = {"get_builder_cls": staticmethod(lambda: Builder)}
    return type(f"OpenMLA{backend.__name__}", (backend,), ours)


@dataclass
class Metadata(CompressorMetadata):
    """A step as one of the caches sees it: for vLLM's writing and pooling, and for what is ours."""

    query_start_loc: Tensor | None = None  # [B+1] i32
    row_lens: Tensor | None = None  # [T] i32, rows or finished entries up to each token
    max_seq_len: int = 0
    num_prefill_tokens: int = 0  # all of them; vLLM adds those that decode
    num_decode_tokens: int | None = 0


class Builder(AttentionMetadataBuilder[Metadata]):
    def __init__(self, *args: Any, **given: Any) -> None:  # abstract in vLLM
        super().__init__(*args, **given)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Metadata:
        m, spec = common_attn_metadata, self.kv_cache_spec
        B, T, ratio = m.num_reqs, m.num_actual_tokens, spec.tokens_per_state
        start_loc, table = m.query_start_loc[: B + 1], m.block_table_tensor[:B].clamp(min=0)
        tokens = torch.arange(T, dtype=torch.int32, device=table.device)
        owners = torch.searchsorted(start_loc, tokens, right=True, out_int32=True) - 1
        owners = owners.clamp(max=B - 1)  # tokens of nobody, whose slots are -1
        positions = m.seq_lens[owners] - start_loc[owners + 1] + tokens
        slots = m.slot_mapping[:T]
        if ratio > 1:  # of the entry that a token finishes
            entries, BS = positions // ratio, spec.block_size // ratio
            finishes = ((positions + 1) % ratio == 0) & (slots >= 0)
            columns = (entries // BS).where(finishes, 0)
            slots = (table[owners, columns].long() * BS + entries % BS).where(finishes, -1)
        return Metadata(
            block_table=table,
            slot_mapping=slots,
            block_size=spec.block_size,
            token_to_req_indices=owners,
            query_start_loc=start_loc,
            row_lens=(positions + 1) // ratio,
            max_seq_len=m.max_seq_len,
            num_prefill_tokens=T,
        )


class Chooser(nn.Module):
    """In the place of vLLM's SparseAttnIndexer: positions of entries into the layers' buffer."""

    def __init__(self, indexer: Any) -> None:
        super().__init__()
        self.k_cache, self.chosen = indexer.k_cache, indexer.topk_indices_buffer

    def forward(self, hidden_states: Tensor, q: Tensor, k: None, weights: Tensor) -> Tensor:
        steps = get_forward_context().attn_metadata
        if not isinstance(steps, dict):  # vLLM measures memory
            return self.chosen
        step = steps[self.k_cache.prefix]
        T, num_keys = len(step.row_lens), max(step.max_seq_len // CHOOSING, 1)
        width = max(SCORES // num_keys, 1)
        for first in range(0, T, width):
            rows = slice(first, min(first + width, T))
            self.chosen[rows], _ = index_select(
                q[rows],
                weights[rows],  # the queries' scales are in them
                self.k_cache.kv_cache,
                step.block_table,
                step.query_start_loc.clamp(rows.start, rows.stop) - rows.start,
                step.row_lens[rows],
                format="index_fp8",
                num_keys=num_keys,
                K=self.chosen.shape[1],
            )
        return self.chosen


def attend(layer: Any, q: Tensor, kv: Tensor, positions: Tensor, output: Tensor) -> None:
    """A layer's forward_mqa: its window and its entries, all written already."""
    steps = get_forward_context().attn_metadata
    if not isinstance(steps, dict):  # vLLM measures memory
        output.zero_()
        return
    window, step = layer.swa_cache_layer, steps[layer.swa_cache_layer.prefix]
    rows = partial(Segment, kv_scale=torch.ones((), device=q.device), format="fp8_dsv4")
    first = rows(
        window.kv_cache, kind="window", block_table=step.block_table, span=layer.window_size
    )
    second = None
    if layer.compress_ratio > 1:
        second = rows(layer.kv_cache, **entries(layer, steps[layer.prefix], len(q)))
    attended, _ = mqa_sparse(
        q, step.query_start_loc, positions, first, second, layer.attn_sink, C=layer.head_dim,
        scale=layer.scale,
    )  # fmt: skip
    output.copy_(attended)


def entries(layer: Any, step: Metadata, T: int) -> dict[str, Any]:
    """All that are finished, or those chosen where there may be more than can be."""
    ratio, table, chosen = layer.compress_ratio, step.block_table, layer.topk_indices_buffer
    if ratio != CHOOSING or step.max_seq_len // ratio <= chosen.shape[1]:
        columns = -(-step.max_seq_len // step.block_size)
        return {"kind": "prefix", "block_table": table[:, :columns], "span": ratio}
    lens = chosen.new_full((T,), chosen.shape[1])
    return {"kind": "positions", "block_table": table, "rows": chosen[:T], "row_lens": lens}
