"""A layer: vLLM's weights and cache tensors as they are, to attend_step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.attention.mla_attention import MLACommonImpl

import openmla
from openmla.integrations.vllm.backend import OpenMLAMetadata

FORMATS = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8",
}  # fmt: skip


class OpenMLAImpl(MLACommonImpl[OpenMLAMetadata]):
    """The class above serves prefill under decode context parallelism, which gathers the context of
    all ranks."""

    can_return_lse_for_decode = True
    supports_dcp = True
    supports_pcp = False
    masked_mha_available = False  # of vLLM; the plan masks
    supports_quant_query_input = False

    def __init__(self, *args: Any, topk_indices_buffer: Tensor | None = None, **given: Any) -> None:
        for name in ("alibi_slopes", "sliding_window", "logits_soft_cap"):
            if given.get(name) is not None:
                raise NotImplementedError(f"openmla: MLA has no {name}.")
        given.pop("index_group_builder", None)
        super().__init__(*args, **given)
        self.supports_quant_query_input = False
        self.is_sparse = topk_indices_buffer is not None  # given to layers that choose
        self.layer: Any = None
        self._weights: openmla.AbsorbedWeights | None = None
        self._cache: tuple[Tensor | None, openmla.LayerCache | None] = (None, None)

    def bind(self, layer: Any, builder: Any) -> None:
        """By the builder: forward_mha is not given its layer."""
        self.layer, self.builder = layer, builder

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        self._weights = None

    @property
    def weights(self) -> openmla.AbsorbedWeights:
        """vLLM's W_UK_T [H, P, C] and W_UV [H, C, V]: views of one weight, quantised ones copied by
        vLLM."""
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
        """vLLM's tensor [N, BS, W], pages as far apart as vLLM put them."""
        known, cache = self._cache
        if known is not kv_cache or cache is None:
            data, scale = kv_cache, self.layer._k_scale
            if self.kv_cache_dtype in ("fp8", "fp8_e4m3"):
                data = data.view(torch.float8_e4m3fn)
            packed = self.kv_cache_dtype == "fp8_ds_mla"
            latent = openmla.PagedCache(
                data,
                "fp8_ds_mla" if packed else FORMATS[data.dtype],
                scale.to(data.device, torch.float32).reshape(()),
            )
            index = None
            if self.layer.indexer is not None:
                index = self.layer.indexer.index_cache()
            cache = openmla.LayerCache(latent=latent, index=index)
            self._cache = (kv_cache, cache)
        return cache

    def record_logical_topk_ready(self) -> None:
        """Called of sparse layers."""

    def do_kv_cache_update(self, *args: Any, **given: Any) -> None:
        """attend_step writes, but for context parallelism."""
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
        assert attn_metadata.plan is not None
        openmla.attend_step(
            openmla.Projected(q[..., :P], q[..., P:], kv_c_normed, k_pe.squeeze(1)),
            self.weights,
            self.cache_of(self.layer.kv_cache),
            attn_metadata.plan,
            selection=attn_metadata.selection,
            out=output.view(-1, self.num_heads, self.v_head_dim),
        )

    def forward_mqa(
        self,
        q: Tensor | tuple[Tensor, Tensor],
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: OpenMLAMetadata,
        layer: Any,
    ) -> tuple[Tensor, Tensor]:
        """Context parallelism: this rank's part of the keys; vLLM merges by the lse."""
        assert attn_metadata.decode is not None
        q_latent = torch.cat(q, -1) if isinstance(q, tuple) else q
        cache = self.cache_of(self.layer.kv_cache)
        return openmla.attend_latent(q_latent, cache, attn_metadata.decode.plan)
