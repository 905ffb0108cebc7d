"""DeepSeek V4: vLLM's own model, with openmla's attention, selection and metadata.

vLLM's V4 has no attention backend interface. Therefore its model is registered a second time, as a
class that is vLLM's own unless this backend is selected. If it is, the layers are changed once they
are built. vLLM still projects, writes rows and pools tokens into entries, in the formats "fp8_dsv4"
and "index_fp8". The metadata of a step is built here as well, for every cache of the model: vLLM's
metadata is made for its own kernels, and building it fails on CPUs. v4_cuda.py has what only CUDA
needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.models import deepseek_v4
from vllm.models.deepseek_v4.attention import DeepseekV4Attention
from vllm.models.deepseek_v4.compressor import CompressorMetadata
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from openmla.errors import ConfigError
from openmla.integrations.vllm.options import option
from openmla.ops import Segment, index_select, mqa_sparse

SCORES = 2**24  # tokens times entries held at once
CHOOSING = 4  # compress ratio of the layers that select entries


class DeepseekV4ForCausalLM(deepseek_v4.DeepseekV4ForCausalLM):
    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        if vllm_config.attention_config.backend is not AttentionBackendEnum.CUSTOM:
            super().__init__(vllm_config=vllm_config, prefix=prefix)
            return
        for name in ("query_dtype", "prefill_dtype", "index_format", "fp8_per_tensor"):
            if option(vllm_config, name, None) is not None:
                raise ConfigError(
                    f"openmla: option {name} is not supported for DeepSeek V4. Remove it."
                )
        backend = option(vllm_config, "backend", "auto")
        if current_platform.is_cpu():
            super().__init__(vllm_config=vllm_config, prefix=prefix)
            take_over(self, backend)
        elif current_platform.is_cuda():
            from openmla.integrations.vllm import v4_cuda

            v4_cuda.check(vllm_config)
            with v4_cuda.building(vllm_config):
                super().__init__(vllm_config=vllm_config, prefix=prefix)
            for layer in take_over(self, backend):
                v4_cuda.take_over(layer)
        else:
            raise ConfigError(
                "openmla: DeepSeek V4 with --attention-backend CUSTOM needs CUDA or a CPU, got "
                f"{current_platform.device_type}. Remove the option."
            )


def take_over(model: nn.Module, backend: str = "auto") -> list[Any]:
    """Change this model's layers and caches, not vLLM's classes. Returns the attention layers."""
    module: Any
    layers = []
    for module in model.modules():
        if isinstance(module, AttentionLayerBase):
            module.get_attn_backend = partial(with_our_builder, module.get_attn_backend())
        if isinstance(module, DeepseekV4Attention):
            module.forward_mqa = Attend(module, backend)
            layers.append(module)
    for module in layers:
        if module.indexer is not None:
            module.indexer.indexer_op = Chooser(module.indexer, backend)
    return layers


@cache
def with_our_builder(backend: type) -> type:
    """A subclass of one of vLLM's cache backends; shapes, layouts and block sizes are unchanged."""
    ours = {"get_builder_cls": staticmethod(lambda: Builder)}
    return type(f"OpenMLA{backend.__name__}", (backend,), ours)


@dataclass
class Metadata(CompressorMetadata):
    """A step for one of the caches: for vLLM's writing and pooling, and for openmla."""

    query_start_loc: Tensor | None = None  # [B+1] i32
    row_lens: Tensor | None = None  # [T] i32, rows or finished entries up to each token
    kv_scale: Tensor | None = None  # [] f32, 1
    max_seq_len: int = 0
    num_prefill_tokens: int = 0  # all of them; vLLM adds decode tokens
    num_decode_tokens: int | None = 0


class Builder(AttentionMetadataBuilder[Metadata]):
    """Builds every step in the same way, from lengths on the device. Tensors belong to vLLM or are
    slices of buffers, so a captured CUDA graph reads the metadata of the step it replays."""

    _cudagraph_support: ClassVar = AttentionCGSupport.ALWAYS

    def __init__(self, *args: Any, **given: Any) -> None:
        super().__init__(*args, **given)
        config, device = self.vllm_config, self.device
        sizes = config.compilation_config.cudagraph_capture_sizes or []
        tokens = max(config.scheduler_config.max_num_batched_tokens, *sizes, 1)
        self.max_model_len = config.model_config.max_model_len
        self.every = torch.arange(tokens, dtype=torch.int32, device=device)
        self.owners = torch.zeros(tokens, dtype=torch.int32, device=device)
        self.row_lens = torch.zeros(tokens, dtype=torch.int32, device=device)
        self.slots = torch.full((tokens,), -1, dtype=torch.int64, device=device)
        self.one = torch.ones((), device=device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Metadata:
        m, spec = common_attn_metadata, self.kv_cache_spec
        B, T, ratio = m.num_reqs, m.num_actual_tokens, spec.tokens_per_state
        start_loc, tokens = m.query_start_loc[: B + 1], self.every[:T]
        table = m.block_table_tensor[:B].clamp_(min=0)  # same as vLLM's own builder for states
        owners, row_lens, slots = self.owners[:T], self.row_lens[:T], m.slot_mapping[:T]
        found = torch.searchsorted(start_loc, tokens, right=True, out_int32=True) - 1
        torch.clamp(found, max=B - 1, out=owners)  # tokens that pad a step have slot -1
        positions = m.seq_lens[owners] - start_loc[owners + 1] + tokens
        torch.clamp((positions + 1) // ratio, min=0, out=row_lens)
        if ratio > 1:  # the slot of the entry that a token completes
            entries, BS = positions // ratio, spec.block_size // ratio
            finishes = ((positions + 1) % ratio == 0) & (slots >= 0)
            columns = (entries // BS).where(finishes, 0)
            ends = (table[owners, columns].long() * BS + entries % BS).where(finishes, -1)
            self.slots[T:].fill_(-1)  # else a larger graph would repeat earlier writes
            slots = self.slots[:T].copy_(ends)
        return Metadata(
            block_table=table,
            slot_mapping=slots,
            block_size=spec.block_size,
            token_to_req_indices=owners,
            query_start_loc=start_loc,
            row_lens=row_lens,
            kv_scale=self.one,
            max_seq_len=m.max_seq_len,
            num_prefill_tokens=T,
        )

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Metadata:
        """A full graph is replayed for contexts of any length."""
        metadata = self.build(0, common_attn_metadata)
        metadata.max_seq_len = self.max_model_len
        return metadata


class Chooser(nn.Module):
    """Replaces vLLM's SparseAttnIndexer: writes selected positions into the layers' buffer."""

    def __init__(self, indexer: Any, backend: str = "auto") -> None:
        super().__init__()
        self.k_cache, self.chosen = indexer.k_cache, indexer.topk_indices_buffer
        self.backend = backend

    def forward(self, hidden_states: Tensor, q: Tensor, k: None, weights: Tensor) -> Tensor:
        """Write the selected positions. vLLM runs V4 with breakable CUDA graphs: selection and
        attention are breaks, run eagerly at every replay with the step of that replay. In vLLM 0.33
        its caller is such a break. In 0.32 the caller is one only if breakable graphs were on when
        its module was imported."""
        eager_break_during_capture(self.choose)(q, weights)
        return self.chosen

    def choose(self, q: Tensor, weights: Tensor) -> None:
        steps = get_forward_context().attn_metadata
        if not isinstance(steps, dict):  # the profiling run
            return
        step, K = steps[self.k_cache.prefix], self.chosen.shape[1]
        T, num_keys = len(step.row_lens), max(step.max_seq_len // CHOOSING, 1)
        if num_keys <= K:  # every entry is attended to: see entries()
            return
        width = max(SCORES // num_keys, 1)
        for first in range(0, T, width):
            rows = slice(first, min(first + width, T))
            self.chosen[rows], _ = index_select(
                q[rows],
                weights[rows],  # include the queries' scales
                self.k_cache.kv_cache,
                step.block_table,
                step.query_start_loc.clamp(rows.start, rows.stop) - rows.start,
                step.row_lens[rows],
                format="index_fp8",
                num_keys=num_keys,
                K=K,
                backend=self.backend,
            )


class Attend:
    """A layer's forward_mqa: attends to its window and its entries, all written already."""

    def __init__(self, layer: Any, backend: str = "auto") -> None:
        self.layer, self.backend = layer, backend

    def __call__(self, q: Tensor, kv: Tensor, positions: Tensor, output: Tensor) -> None:
        eager_break_during_capture(self.attend)(q, positions, output)

    def attend(self, q: Tensor, positions: Tensor, output: Tensor) -> None:
        layer, steps = self.layer, get_forward_context().attn_metadata
        H = layer.n_local_heads  # vLLM pads heads on CUDA
        if not isinstance(steps, dict):  # the profiling run, which measures memory
            output.zero_()
            output[:, :H].copy_(torch.zeros_like(output[:, :H]))
            return
        window, step = layer.swa_cache_layer, steps[layer.swa_cache_layer.prefix]
        rows = partial(Segment, kv_scale=step.kv_scale, format="fp8_dsv4")
        first = rows(
            window.kv_cache, kind="window", block_table=step.block_table, span=layer.window_size
        )
        second = None
        if layer.compress_ratio > 1:
            second = rows(layer.kv_cache, **entries(layer, steps[layer.prefix], len(q)))
        attended, _ = mqa_sparse(
            q[:, :H], step.query_start_loc, positions, first, second, layer.attn_sink[:H],
            C=layer.head_dim, scale=layer.scale, backend=self.backend,
        )  # fmt: skip
        output[:, :H].copy_(attended)


def entries(layer: Any, step: Metadata, T: int) -> dict[str, Any]:
    """All finished entries, or the selected ones if there may be more than can be selected."""
    ratio, table, chosen = layer.compress_ratio, step.block_table, layer.topk_indices_buffer
    if ratio != CHOOSING or step.max_seq_len // ratio <= chosen.shape[1]:
        columns = -(-step.max_seq_len // step.block_size)
        return {"kind": "prefix", "block_table": table[:, :columns], "span": ratio}
    lens = chosen.new_full((T,), chosen.shape[1])
    return {"kind": "positions", "block_table": table, "rows": chosen[:T], "row_lens": lens}
