"""A step of vLLM's scheduler as a plan, also for CUDA graphs."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadataBuilder
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder

import openmla
from openmla.integrations.vllm.backend import OpenMLAMetadata
from openmla.integrations.vllm.options import option


class Decode(NamedTuple):
    """Of single tokens over this rank's keys, under decode context parallelism."""

    plan: openmla.Plan
    seq_lens: Tensor


def config_of(layer: Any, num_heads: int, text: Any) -> openmla.MLAConfig:
    """This rank's part of a layer. Not from the model's file: vLLM changes what it loads."""
    indexer = None
    if layer.use_sparse:
        indexer = openmla.IndexerConfig(text.index_n_heads, text.index_head_dim, text.index_topk)
    return openmla.MLAConfig.from_numbers(
        num_heads=num_heads,
        kv_lora_rank=layer.kv_lora_rank,
        qk_nope_head_dim=layer.qk_nope_head_dim,
        qk_rope_head_dim=layer.qk_rope_head_dim,
        v_head_dim=layer.v_head_dim,
        scale=float(layer.scale),
        indexer=indexer,
    )


class OpenMLABuilder(MLACommonMetadataBuilder[OpenMLAMetadata]):
    """Without context parallelism nothing of the class above is used: it would reserve memory for
    vLLM's prefill."""

    _cudagraph_support: ClassVar = AttentionCGSupport.UNIFORM_BATCH

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        self.ranks = vllm_config.parallel_config.decode_context_parallel_size
        if self.ranks > 1:
            super().__init__(kv_cache_spec, layer_names, vllm_config, device, OpenMLAMetadata)
        else:
            AttentionMetadataBuilder.__init__(self, kv_cache_spec, layer_names, vllm_config, device)
            self.reorder_batch_threshold = None
        context = vllm_config.compilation_config.static_forward_context
        layers = [context[name] for name in layer_names]
        # Where layers share what one of them chose, that one has the index rows.
        self.layer = next((layer for layer in layers if layer.indexer is not None), layers[0])
        self.chooser: Any = None  # of another group: vLLM has those apart that choose nothing
        if self.layer.use_sparse and self.layer.indexer is None:
            everyone = context.values()
            choosers = [one for one in everyone if getattr(one, "indexer", None) is not None]
            if not choosers:
                raise ValueError(
                    "openmla: a pipeline stage of sparse layers must have an indexer, got none."
                )
            self.chooser = choosers[0]
        heads = self.layer.num_heads * self.ranks  # which vLLM gathers for decode
        self.config = config_of(self.layer, heads, vllm_config.model_config.hf_text_config)
        self.dtype = vllm_config.model_config.dtype
        self.backend = option(vllm_config, "backend", "auto")
        self.query_dtype = option(vllm_config, "query_dtype", None)
        self.prefill_dtype = option(vllm_config, "prefill_dtype", None)
        if self.prefill_dtype is not None and self.ranks > 1:
            raise ValueError(
                "openmla: prefill_dtype must not be given with decode context parallelism, where "
                "prompts are vLLM's own."
            )
        for layer in layers:
            layer.impl.bind(layer, self)
        drafts = vllm_config.speculative_config
        self.drafting = drafts is not None
        self.width = 1 + (drafts.num_speculative_tokens if drafts and self.ranks == 1 else 0)
        self.whole: dict[str, Tensor] | None = None
        self.latest: tuple[Any, Any] = (None, None)  # vLLM's metadata of a step, and ours

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        if vllm_config.parallel_config.decode_context_parallel_size > 1:
            return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
        return cls._cudagraph_support

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> OpenMLAMetadata:
        if self.ranks > 1:
            return super().build(common_prefix_len, common_attn_metadata, fast_build)
        m = common_attn_metadata
        if self.chooser is not None:  # one step, so that what it chooses is there for all
            step, metadata = self.chooser.impl.builder.latest
            if step is not m:
                raise ValueError(
                    "openmla: layers that share a choice must be planned after those that choose, "
                    "over the same blocks."
                )
            return metadata
        B, T = m.num_reqs, m.num_actual_tokens
        query_lens = m.query_start_loc_cpu[: B + 1].diff().tolist()
        given: dict[str, Any] = {}
        if self.drafting:  # accepted drafts are known on the device only, prompts here, too
            exact = [n > self.width for n in query_lens]
            given = {"device_seq_lens": m.seq_lens[:B], "exact": exact}
        batch = openmla.Batch(
            query_lens=query_lens,
            seq_lens=self._bounds(m, query_lens),
            block_table=m.block_table_tensor[:B],
            slot_mapping=m.slot_mapping[:T],
            padding=T - sum(query_lens),
            **given,
        )
        plan = self._plan(batch, B, T)
        metadata = OpenMLAMetadata(
            num_reqs=B,
            max_query_len=m.max_query_len,
            max_seq_len=m.max_seq_len,
            num_actual_tokens=T,
            query_start_loc=m.query_start_loc,
            slot_mapping=m.slot_mapping,
            num_decodes=0,
            num_decode_tokens=0,
            num_prefills=B,
            plan=plan,
        )
        self.latest = (m, metadata)
        return metadata

    @staticmethod
    def _bounds(m: Any, query_lens: list[int]) -> list[int]:
        """Lengths; requests that fill up a graph have whatever was there before."""
        lens = m.seq_lens_cpu_upper_bound[: m.num_reqs].tolist()
        return [S if n else 0 for S, n in zip(lens, query_lens, strict=True)]

    def _plan(self, batch: openmla.Batch, B: int, T: int, **more: Any) -> openmla.Plan:
        """Over buffers that stay where they are, if a graph may be captured of it or replayed."""
        cache = self.layer.impl.cache_of(self.layer.kv_cache)
        given: dict[str, Any] = {"dtype": self.dtype, "backend": self.backend, **more}
        given |= {"query_dtype": self.query_dtype, "prefill_dtype": self.prefill_dtype}
        if (
            self.device.type == "cuda"
            and B * self.width == T
            and max(batch.query_lens) <= self.width
        ):
            given["prefill_dtype"] = None  # nothing is expanded
            given["into"] = openmla.slice_buffers(
                self._buffers(cache, batch.block_table.shape[1]), max_requests=B, max_tokens=T
            )
        return openmla.make_plan(batch, self.config, cache, **given)

    def _buffers(self, cache: openmla.LayerCache, max_blocks: int) -> dict[str, Tensor]:
        if self.whole is None:
            sizes = self.vllm_config.compilation_config.cudagraph_capture_sizes or []
            requests = max(self.vllm_config.scheduler_config.max_num_seqs, *sizes, 1)
            self.whole = openmla.plan_buffers(
                self.config,
                cache,
                max_requests=requests,
                max_tokens=requests * self.width,
                max_blocks=max_blocks,
            )
        return self.whole

    def _build_decode(
        self,
        block_table_tensor: Tensor,
        seq_lens_device: Tensor,
        max_seq_len: int,
        query_start_loc_cpu: Tensor,
        query_start_loc_device: Tensor,
        num_decode_tokens: int,
        max_query_len: int,
        dcp_tot_seq_lens_device: Tensor | None,
    ) -> Decode:
        """Context parallelism: a token sees all of this rank's keys, of which there may be none."""
        query_lens = query_start_loc_cpu.diff().tolist()
        batch = openmla.Batch(
            query_lens=query_lens,
            seq_lens=[max(max_seq_len, 1) if n else 0 for n in query_lens],
            block_table=block_table_tensor,
            slot_mapping=torch.full((num_decode_tokens,), -1, device=self.device),
            device_seq_lens=seq_lens_device,
            padding=num_decode_tokens - sum(query_lens),
        )
        plan = self._plan(batch, len(query_lens), num_decode_tokens, form="absorbed")
        return Decode(plan, seq_lens_device)
