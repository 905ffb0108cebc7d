"""The attention backend class for vLLM, and the metadata of one step."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from vllm.model_executor.layers.attention.mla_attention import MLACommonBackend, MLACommonMetadata
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.registry import AttentionBackendEnum

import openmla


def is_selected(vllm_config: Any) -> bool:
    """Whether the user selected this backend."""
    return vllm_config.attention_config.backend is AttentionBackendEnum.CUSTOM


class OpenMLABackend(MLACommonBackend):
    """Serves dense and sparse models: vLLM has a single name for third-party backends."""

    supported_dtypes: ClassVar = [torch.float32, torch.bfloat16, torch.float16]
    supported_kv_cache_dtypes: ClassVar = [
        "auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_ds_mla",
    ]  # fmt: skip

    @staticmethod
    def get_name() -> str:
        return "OPENMLA"

    @staticmethod
    def get_impl_cls() -> type:
        from openmla.integrations.vllm.layer import OpenMLAImpl

        return OpenMLAImpl

    @staticmethod
    def get_builder_cls() -> type:
        from openmla.integrations.vllm.builder import OpenMLABuilder

        return OpenMLABuilder

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return []  # any size

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(16)]

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        return False  # steps that are not uniform are planned from the host's query lengths

    @classmethod
    def validate_configuration(cls, *args: Any, **given: Any) -> list[str]:
        given.pop("use_sparse", None)  # both kinds are supported
        return super().validate_configuration(*args, use_sparse=False, **given)


# The fields of `prefill` that vLLM's layer reads: sparse models may use forward_mha, and no context
# is chunked.
EVERY_TOKEN = SimpleNamespace(use_dense_mha=True, chunked_context=None, max_query_len=0)


@dataclass
class OpenMLAMetadata(MLACommonMetadata):
    """The metadata of one step. It counts every token as prefill, so that vLLM passes a layer's
    whole step to forward_mha and attend_step runs it as planned. With decode context parallelism,
    tokens that count as decode go to forward_mqa: all tokens of a sparse model, and those of a
    dense model that vLLM counts as decode. `decode` has their plan."""

    plan: openmla.Plan | None = None
    quantized_plan: openmla.Plan | None = None  # the same step with fp8 output
    selection: openmla.Selection | None = None  # made by the last indexer that ran
    common: Any = None  # the CommonAttentionMetadata this was built from
    prefill: Any = field(default_factory=lambda: EVERY_TOKEN)
    prefill_max_seq_len: int = 0
    topk_tokens: int = 0
