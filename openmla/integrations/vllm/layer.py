"""One layer: passes vLLM's weights and cache tensors to attend_step unchanged."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.compilation.breakable_cudagraph import (
    eager_break_during_capture,
    is_breakable_cudagraph_enabled,
)
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention.mla_attention import MLACommonImpl
from vllm.platforms import current_platform

import openmla
from openmla.integrations.vllm import prefill
from openmla.integrations.vllm.backend import OpenMLAMetadata
from openmla.integrations.vllm.memory import profiled_rows

FORMATS = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8",
}  # fmt: skip


def break_graphs_at(layer: Any) -> None:
    """Run a layer's attention eagerly where vLLM captures breakable CUDA graphs.

    vLLM makes its attention op such a break, but only if these graphs were on when its module was
    imported. On a first start they are not: vLLM inspects the model, which imports that module,
    before its config is complete. A graph without the break replays the step of its capture.
    """
    forward_impl = layer.forward_impl

    def run(
        q: Tensor, k_c_normed: Tensor, k_pe: Tensor, kv_cache: Tensor, attn_metadata: Any,
        output: Tensor, **given: Any,
    ) -> Any:  # fmt: skip
        """Look up the current step: a replay repeats the arguments of the capture."""
        current = get_forward_context().attn_metadata
        if isinstance(current, dict):
            attn_metadata = current[layer.layer_name]
        return forward_impl(
            q, k_c_normed, k_pe, layer.kv_cache, attn_metadata, output=output, **given
        )

    layer.forward_impl = eager_break_during_capture(run)


class OpenMLAImpl(MLACommonImpl[OpenMLAMetadata]):
    """vLLM's class serves prefill under decode context parallelism, which gathers the context of
    all ranks."""

    can_return_lse_for_decode = True
    supports_dcp = True
    supports_pcp = False
    masked_mha_available = False  # disables vLLM's own path; the plan picks masked attention
    supports_quant_query_input = False

    def __init__(self, *args: Any, topk_indices_buffer: Tensor | None = None, **given: Any) -> None:
        for name in ("alibi_slopes", "sliding_window", "logits_soft_cap"):
            if given.get(name) is not None:
                raise NotImplementedError(f"openmla: {name} is not supported for MLA.")
        given.pop("index_group_builder", None)
        super().__init__(*args, **given)
        self.supports_quant_query_input = False
        self.is_sparse = topk_indices_buffer is not None  # only sparse layers get one
        self.vllm_config = get_current_vllm_config()
        # with context parallelism, vLLM runs a dense model's prefill
        if (self.dcp_world_size == 1 or self.is_sparse) and not current_platform.is_cpu():
            prefill.select(self.vllm_config)
        self.layer: Any = None
        self._weights: openmla.AbsorbedWeights | None = None
        self._cache: tuple[Tensor | None, openmla.LayerCache | None] = (None, None)

    def bind(self, layer: Any, builder: Any) -> None:
        """Called by the builder, because forward_mha does not receive its layer."""
        self.layer, self.builder = layer, builder

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Set how many expanded rows vLLM's layer allocates in the profiling run. vLLM calls this
        after every weight load, and so before that run."""
        self._weights = None
        layers = self.vllm_config.compilation_config.static_forward_context.values()
        layer = next((one for one in layers if getattr(one, "impl", None) is self), None)
        # vLLM's own builder, for dense models with context parallelism, reads this number too
        if layer is not None and (self.dcp_world_size == 1 or self.is_sparse):
            layer._chunked_prefill_workspace_size = profiled_rows(layer, self.vllm_config)
            if is_breakable_cudagraph_enabled() and "forward_impl" not in vars(layer):
                break_graphs_at(layer)

    @property
    def weights(self) -> openmla.AbsorbedWeights:
        """vLLM's W_UK_T [H, P, C] and W_UV [H, C, V]: views of one weight, or copies that vLLM made
        of a quantized one."""
        if self._weights is None:
            w_uk, w_uv = self.layer.W_UK_T.data, self.layer.W_UV.data
            (H, P, C), V = w_uk.shape, w_uv.shape[2]
            together = ((P + V) * C, C, 1)
            after = w_uk.data_ptr() + P * C * w_uk.element_size()
            if w_uk.stride() == together and w_uv.data_ptr() == after:
                kv_b = w_uk.as_strided((H * (P + V), C), (C, 1))
            else:
                kv_b = torch.cat([w_uk, w_uv.transpose(1, 2)], 1).flatten(0, 1)
                w_uk, w_uv = kv_b.view(H, P + V, C).split([P, V], 1)
                w_uv = w_uv.transpose(1, 2)
            self._weights = openmla.AbsorbedWeights(kv_b, w_uk, w_uv)
        return self._weights

    def cache_of(self, kv_cache: Tensor) -> openmla.LayerCache:
        """Wrap vLLM's tensor [N, BS, W], with any stride between pages."""
        known, cache = self._cache
        if known is not kv_cache or cache is None:
            data = kv_cache
            if self.kv_cache_dtype in ("fp8", "fp8_e4m3"):
                data = data.view(torch.float8_e4m3fn)
            packed = self.kv_cache_dtype == "fp8_ds_mla"
            scales = self.layer._k_scale, self.layer._q_scale
            k_scale, q_scale = (each.to(data.device, torch.float32).reshape(()) for each in scales)
            latent = openmla.PagedCache(
                data,
                "fp8_ds_mla" if packed else FORMATS[data.dtype],
                k_scale,
                q_scale=q_scale,
            )
            index = None
            if self.layer.indexer is not None:
                index = self.layer.indexer.index_cache()
            cache = openmla.LayerCache(latent=latent, index=index)
            self._cache = (kv_cache, cache)
        return cache

    def record_logical_topk_ready(self) -> None:
        """Do nothing; vLLM calls it on sparse layers."""

    def do_kv_cache_update(self, *args: Any, **given: Any) -> None:
        """Do nothing unless under context parallelism: otherwise attend_step writes the rows."""
        if self.dcp_world_size > 1:
            super().do_kv_cache_update(*args, **given)

    def forward_mha(
        self,
        q: Tensor,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: OpenMLAMetadata,
        k_scale: Tensor,
        output: Tensor,
        output_scale: Tensor | None = None,
    ) -> None:
        if self.dcp_world_size > 1:
            super().forward_mha(
                q, kv_c_normed, k_pe, kv_c_and_k_pe_cache, attn_metadata, k_scale, output,
                output_scale,
            )  # fmt: skip
            return
        P = self.qk_nope_head_dim
        plan, selection = attn_metadata.plan, attn_metadata.selection
        out: Any = output.view(-1, self.num_heads, self.v_head_dim)
        if output_scale is not None:  # vLLM fused the quantization of o_proj's input
            plan = self.builder.quantized_plan(attn_metadata)
            scale = output_scale.reshape(())
            out = openmla.QuantizedOutput(output.flatten(1), None, scale, "fp8")
            if selection is not None:  # made for this step's other plan
                assert plan.select is not None
                selection = selection._replace(row_lens=plan.select.row_lens)
        assert plan is not None
        openmla.attend_step(
            openmla.Projected(q[..., :P], q[..., P:], kv_c_normed, k_pe.squeeze(1)),
            self.weights,
            self.cache_of(self.layer.kv_cache),
            plan,
            selection=selection,
            out=out,
        )

    def forward_mqa(
        self,
        q: Tensor | tuple[Tensor, Tensor],
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: OpenMLAMetadata,
        layer: Any,
    ) -> tuple[Tensor, Tensor]:
        """Attend to this rank's keys under context parallelism; vLLM merges the ranks by lse."""
        q_latent = torch.cat(q, -1) if isinstance(q, tuple) else q
        cache = self.cache_of(self.layer.kv_cache)
        assert attn_metadata.decode is not None
        plan, selection = attn_metadata.decode.plan, attn_metadata.selection
        return openmla.attend_latent(q_latent, cache, plan, selection=selection)
