"""Turns a step of vLLM's scheduler into a plan, captured in CUDA graphs or not."""

from __future__ import annotations

import time
from operator import sub
from typing import Any, ClassVar, NamedTuple

import torch
import vllm.envs as envs
from torch import Tensor
from vllm.logger import init_logger
from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadataBuilder
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder

import openmla
from openmla.integrations.vllm.backend import OpenMLAMetadata
from openmla.integrations.vllm.options import option
from openmla.integrations.vllm.ranks import dcp_ranks, plan_over_dcp
from openmla.parallel import Ranks

logger = init_logger("vllm.openmla")

# Locations of a step's rows. Two groups of layers share a selection only if these are equal.
PLACES = ("block_table_tensor", "slot_mapping")


def first_rows(tensor: Tensor, n: int) -> Tensor:
    """tensor[:n]. Slicing takes longer than this comparison, even if it keeps everything."""
    return tensor if len(tensor) == n else tensor[:n]


class Decode(NamedTuple):
    """Single tokens over this rank's keys, under decode context parallelism."""

    plan: openmla.Plan
    seq_lens: Tensor


def config_of(layer: Any, num_heads: int, vllm_config: Any) -> openmla.MLAConfig:
    """This rank's part of a layer. The config file is no use: vLLM changes what it loads."""
    indexer, text = None, vllm_config.model_config.hf_text_config
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
        max_positions=vllm_config.model_config.max_model_len,
    )


class OpenMLABuilder(MLACommonMetadataBuilder[OpenMLAMetadata]):
    """Without context parallelism this uses nothing of vLLM's MLA builder, which would reserve
    memory for vLLM's own prefill."""

    _cudagraph_support: ClassVar = AttentionCGSupport.UNIFORM_BATCH

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        self.ranks = vllm_config.parallel_config.decode_context_parallel_size
        context = vllm_config.compilation_config.static_forward_context
        layers = [context[name] for name in layer_names]
        # with context parallelism vLLM's builder splits a dense step into decode and prefill
        self.is_split = self.ranks > 1 and not layers[0].use_sparse
        if self.is_split:
            super().__init__(kv_cache_spec, layer_names, vllm_config, device, OpenMLAMetadata)
        else:
            AttentionMetadataBuilder.__init__(self, kv_cache_spec, layer_names, vllm_config, device)
            self.reorder_batch_threshold = None  # requests stay in order
        # A decode plan reads vLLM's own tensors, so a draft step has nothing to rebuild.
        self.supports_draft_decode_metadata_update = self.ranks == 1
        # Among layers that share a selection, the one with the indexer has the index cache.
        self.layer = next((layer for layer in layers if layer.indexer is not None), layers[0])
        self.leader: Any = None  # the layer in another group whose indexer selects for this one
        if self.layer.use_sparse and self.layer.indexer is None:
            leaders = [one for one in context.values() if getattr(one, "indexer", None) is not None]
            if not leaders:
                raise ValueError(
                    "openmla: a pipeline stage with sparse layers must have an indexer, got none."
                )
            self.leader = leaders[0]
        heads = self.layer.num_heads * self.ranks  # vLLM gathers them for decode
        self.config = config_of(self.layer, heads, vllm_config)
        self.options = {
            "dtype": vllm_config.model_config.dtype,
            "backend": option(vllm_config, "backend", "auto"),
            "query_dtype": option(vllm_config, "query_dtype", None),
            "batch_invariant": bool(envs.VLLM_BATCH_INVARIANT),
        }
        self.prefill_dtype = option(vllm_config, "prefill_dtype", None)
        if self.prefill_dtype is not None and self.ranks > 1:
            raise ValueError(
                "openmla: prefill_dtype is not supported with decode context parallelism, where "
                "vLLM runs prefill itself. Leave it out."
            )
        drafts = vllm_config.speculative_config
        self.dcp: Ranks | None = None
        if self.ranks > 1 and not self.is_split:
            if drafts is not None:
                raise ValueError(
                    "openmla: speculative decoding of a sparse model is not supported with decode "
                    "context parallelism. Leave out --speculative-config."
                )
            self.dcp = dcp_ranks(vllm_config)
        for layer in layers:
            layer.impl.bind(layer, self)
        self.drafting = drafts is not None
        # A separate draft model reads one token more per request than vLLM's host lengths include:
        # the one that the target model has just sampled.
        standalone = drafts is not None and drafts.method == "draft_model"
        self.ahead = int(standalone and layer_names[0].startswith("draft_model."))
        self.width = 1 + (drafts.num_speculative_tokens if drafts and self.ranks == 1 else 0)
        if drafts is not None and drafts.uses_draft_kv_cache():
            self._check_draft_backend(drafts, vllm_config.use_v2_model_runner)
        sizes = vllm_config.compilation_config.cudagraph_capture_sizes or []
        requests = max(vllm_config.scheduler_config.max_num_seqs, *sizes, 1)
        self.max_tokens = requests * self.width
        self.every = torch.arange(self.max_tokens + 1, dtype=torch.int32)
        self.planners: dict[str | None, openmla.DecodePlanner] = {}  # by output format
        self.planned_cache: openmla.LayerCache | None = None
        self.latest: OpenMLAMetadata | None = None

    @staticmethod
    def _check_draft_backend(drafts: Any, runner_v2: bool) -> None:
        if drafts.attention_backend is None and not runner_v2:
            logger.warning_once(
                "With model runner V1, draft layers use an attention backend of vLLM's own unless "
                '--speculative-config has "attention_backend": "CUSTOM".'
            )

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        if vllm_config.parallel_config.decode_context_parallel_size == 1:
            return cls._cudagraph_support
        if hasattr(vllm_config.model_config.hf_text_config, "index_topk"):
            return AttentionCGSupport.NEVER  # ranks exchange candidates; capturing that is untested
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> OpenMLAMetadata:
        if self.is_split:
            return super().build(common_prefix_len, common_attn_metadata, fast_build)
        m = common_attn_metadata
        if self.leader is not None:
            return self._leaders_metadata(m)
        metadata = OpenMLAMetadata(
            num_reqs=m.num_reqs,
            max_query_len=m.max_query_len,
            max_seq_len=m.max_seq_len,
            num_actual_tokens=m.num_actual_tokens,
            query_start_loc=m.query_start_loc,
            slot_mapping=m.slot_mapping,
            num_decodes=0,
            num_decode_tokens=0,
            num_prefills=m.num_reqs,
            common=m,
        )
        cache = self.cache()
        if self.dcp is None:
            metadata.plan = self.plan(m, cache)
        else:
            metadata.num_decodes, metadata.num_prefills = m.num_reqs, 0
            metadata.num_decode_tokens = m.num_actual_tokens
            metadata.plan = plan_over_dcp(
                m, cache, self.config, self.dcp, self.decode_planner(cache), self.options
            )
            metadata.decode = Decode(metadata.plan, m.dcp_local_seq_lens[: m.num_reqs])
        self.latest = metadata
        return metadata

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> OpenMLAMetadata:
        """vLLM's MLA builder requires that no query be longer than its threshold for reordering,
        which is only set with context parallelism."""
        if self.is_split:
            return super().build_for_cudagraph_capture(common_attn_metadata)
        return self.build(0, common_attn_metadata)

    def update_draft_decode_metadata(self, metadata: OpenMLAMetadata) -> None:
        """Called inside the graph of a draft step, once vLLM has written its lengths."""
        for output, plan in ((None, metadata.plan), ("fp8", metadata.quantized_plan)):
            if plan is not None:
                m = metadata.common
                B = m.num_reqs
                self.planners[output].update(plan, m.seq_lens[:B], m.query_start_loc[: B + 1])

    def quantized_plan(self, metadata: OpenMLAMetadata) -> openmla.Plan:
        """The plan of this step with fp8 output and one scale, made on first use."""
        if metadata.quantized_plan is None:
            metadata.quantized_plan = self.plan(metadata.common, self.cache(), "fp8")
        return metadata.quantized_plan

    def _leaders_metadata(self, m: Any) -> OpenMLAMetadata:
        """The metadata of the layers that select keys, which holds the selection."""
        latest = self.leader.impl.builder.latest
        # vLLM makes this tensor once per step; the others keep their addresses from step to step
        if latest is None or latest.common.query_start_loc_cpu is not m.query_start_loc_cpu:
            raise ValueError(
                "openmla: layers that share a selection must be planned in the same step as those "
                "that select, and after them."
            )
        for name in PLACES:
            theirs, ours = getattr(latest.common, name), getattr(m, name)
            if theirs.data_ptr() != ours.data_ptr() or theirs.shape != ours.shape:
                raise ValueError(
                    "openmla: layers that share a selection must have their rows in the same "
                    f"blocks, got another {name}."
                )
        return latest

    def cache(self) -> openmla.LayerCache:
        """The cache as vLLM bound it. For a new one, kernels are compiled and planners made."""
        cache: openmla.LayerCache = self.layer.impl.cache_of(self.layer.kv_cache)
        if cache is not self.planned_cache:
            self.planned_cache, self.planners = cache, {}
            self._warm_up(cache)
        return cache

    def _warm_up(self, cache: openmla.LayerCache) -> None:
        """Compile this group's kernels before vLLM serves, unless the user disabled the warm-up."""
        if self.device.type != "cuda" or not self.vllm_config.kernel_config.enable_jit_warmup:
            return
        started = time.perf_counter()
        scheduler = self.vllm_config.scheduler_config
        openmla.warmup(
            self.config,
            cache,
            max_requests=scheduler.max_num_seqs,
            max_tokens=scheduler.max_num_batched_tokens,
            prefill_dtype=self.prefill_dtype,
            **self.options,
        )
        torch.cuda.synchronize(self.device)
        logger.info(
            "openmla compiled its attention kernels in %.1f s.", time.perf_counter() - started
        )

    def plan(self, m: Any, cache: openmla.LayerCache, output: str | None = None) -> openmla.Plan:
        B, T = m.num_reqs, m.num_actual_tokens
        if not self._is_uniform(m, B, T):
            return self._plan_requests(m, cache, output)
        return self.decode_planner(cache, output).plan(
            block_table=m.block_table_tensor,
            seq_lens=m.seq_lens,
            query_start_loc=m.query_start_loc,
            slot_mapping=m.slot_mapping,
            num_requests=B,
            num_tokens=T,
        )

    def decode_planner(
        self, cache: openmla.LayerCache, output: str | None = None
    ) -> openmla.DecodePlanner:
        if output not in self.planners:
            self.planners[output] = openmla.DecodePlanner(
                self.config, cache, max_tokens=self.max_tokens, output=output, **self.options
            )
        return self.planners[output]

    def _is_uniform(self, m: Any, B: int, T: int) -> bool:
        """Whether every request has the same few tokens, except for padding at the end."""
        width = T // B
        if width * B != T or width > self.width:
            return False
        if self.device.type == "cpu" and self.config.indexer is not None:
            return False  # nothing is captured, and short contexts need no indexer
        if width == m.max_query_len == 1:
            return True  # vLLM schedules no request without tokens
        starts = m.query_start_loc_cpu[: B + 1]
        even = self.every[: B + 1] * width
        return torch.equal(starts, even) or torch.equal(starts, even.clamp_(max=starts[-1]))

    def _plan_requests(self, m: Any, cache: openmla.LayerCache, output: str | None) -> openmla.Plan:
        """Plan a step that includes prefill, request by request."""
        B, T = m.num_reqs, m.num_actual_tokens
        starts = m.query_start_loc_cpu.tolist()[: B + 1]
        query_lens = list(map(sub, starts[1:], starts))
        lens = m.seq_lens_cpu_upper_bound.tolist()[:B]
        given: dict[str, Any] = {}
        if self.drafting:  # only the device knows how many draft tokens were accepted
            exact = [n > self.width + self.ahead for n in query_lens]
            given = {"device_seq_lens": m.seq_lens[:B], "exact": exact}
        batch = openmla.Batch(
            query_lens=query_lens,
            # a request that pads the step has no tokens and a stale length
            seq_lens=[S + self.ahead if n else 0 for S, n in zip(lens, query_lens, strict=True)],
            block_table=first_rows(m.block_table_tensor, B),
            slot_mapping=first_rows(m.slot_mapping, T),
            padding=T - starts[-1],
            **given,
        )
        # only the absorbed form is bitwise reproducible for a prompt chunked or partly cached
        # differently
        form = "absorbed" if self.options["batch_invariant"] else "auto"
        return openmla.make_plan(
            batch, self.config, cache, output=output, prefill_dtype=self.prefill_dtype, form=form,
            **self.options,
        )  # fmt: skip

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
        cache = self.cache()
        if not hasattr(self, "no_slots"):  # vLLM has written the rows
            self.no_slots = torch.full((self.max_tokens,), -1, device=self.device)
        plan = self.decode_planner(cache).plan(
            block_table=block_table_tensor,
            seq_lens=seq_lens_device,
            query_start_loc=query_start_loc_device,
            slot_mapping=self.no_slots[:num_decode_tokens],
        )
        return Decode(plan, seq_lens_device)
