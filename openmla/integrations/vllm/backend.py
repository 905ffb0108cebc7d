"""What vLLM asks of a backend before a step, and what a step hands to its layers."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from vllm.model_executor.layers.attention.mla_attention import MLACommonBackend, MLACommonMetadata
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.registry import AttentionBackendEnum

import openmla


def is_chosen(vllm_config: Any) -> bool:
    """Whether the user asked for this backend."""
    return vllm_config.attention_config.backend is AttentionBackendEnum.CUSTOM


class OpenMLABackend(MLACommonBackend):
    """Dense and sparse alike: vLLM has one name for backends of others."""

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
        return []  # any

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(16)]

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        return False  # query lengths are planned with on the host

    @classmethod
    def validate_configuration(cls, *args: Any, **given: Any) -> list[str]:
        sparse = given.pop("use_sparse", False)
        reasons = super().validate_configuration(*args, use_sparse=False, **given)
        if sparse and given.get("use_dcp"):
            reasons.append("decode context parallelism of sparse models not supported")
        return reasons


@dataclass
class OpenMLAMetadata(MLACommonMetadata):
    """A step. Its tokens count as prefill, all of them: vLLM then hands a layer's whole step to
    forward_mha, and attend_step does what the plan says. Under decode context parallelism it is
    vLLM's own metadata, and `decode` has the plan."""

    plan: openmla.Plan | None = None
    selection: openmla.Selection | None = None  # the last indexer's
    # vLLM's layer looks: sparse models may go to forward_mha, and it quantises outputs itself
    prefill: Any = field(
        default_factory=lambda: SimpleNamespace(
            use_dense_mha=True, chunked_context=(), max_query_len=0
        )
    )
    prefill_max_seq_len: int = 0
    topk_tokens: int = 0
