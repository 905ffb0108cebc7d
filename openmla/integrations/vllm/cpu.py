"""vLLM's CPU platform, overridden if this backend is selected.

By itself it accepts only its own MLA backend, rejects sparse models, and disables chunked prefill
and prefix caching for MLA.
"""

from __future__ import annotations

from typing import Any

from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention.backends.registry import AttentionBackendEnum

BLOCK_SIZE = 64
V4 = "DeepseekV4ForCausalLM"  # vLLM writes its caches, in blocks of 256


class OpenMLACpuPlatform(CpuPlatform):
    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        if attn_selector_config.use_mla and selected_backend is AttentionBackendEnum.CUSTOM:
            return selected_backend.get_path()
        return super().get_attn_backend_cls(selected_backend, attn_selector_config, num_heads)

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
        asked = (
            scheduler.enable_chunked_prefill,
            scheduler.max_num_batched_tokens,
            cache.enable_prefix_caching,
            cache.block_size if cache.user_specified_block_size else BLOCK_SIZE,
        )
        super().check_and_update_config(vllm_config)
        model = vllm_config.model_config
        chosen = vllm_config.attention_config.backend is AttentionBackendEnum.CUSTOM
        if chosen and model is not None and model.use_mla:
            scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens = asked[:2]
            cache.enable_prefix_caching = asked[2]
            if V4 not in model.architectures:
                cache.block_size = asked[3]
