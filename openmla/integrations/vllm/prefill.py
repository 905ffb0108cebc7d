"""The prefill backend that vLLM's layer requires next to the attention backend.

openmla's metadata sends prefill to forward_mha, so this class attends to nothing. Without it vLLM
picks one of its own, finds none for float32, and quantizes outputs in a second pass.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8StaticTensorSym
from vllm.v1.attention.backends.mla.prefill.base import MLAPrefillBackend
from vllm.v1.attention.backends.mla.prefill.registry import (
    MLAPrefillBackendEnum,
    register_mla_prefill_backend,
)

PATH = f"{__name__}.OpenMLAPrefill"


class OpenMLAPrefill(MLAPrefillBackend):
    supported_dtypes: ClassVar = [torch.float32, torch.bfloat16, torch.float16]

    @staticmethod
    def get_name() -> str:
        return "OPENMLA"

    def supports_quant_output(self, quant_key: Any) -> bool:
        """forward_mha then gets fp8 rows and their scale as its output."""
        return bool(quant_key == kFp8StaticTensorSym)

    def run_prefill_new_tokens(self, *args: Any, **given: Any) -> Any:
        raise NotImplementedError("openmla attends in OpenMLAImpl.forward_mha.")

    run_prefill_context_chunk = run_prefill_new_tokens


def select(vllm_config: Any) -> None:
    """Have vLLM's layers use it, unless the user selected another one."""
    attention = vllm_config.attention_config
    if attention.mla_prefill_backend is None:
        register_mla_prefill_backend(MLAPrefillBackendEnum.CUSTOM, PATH)
        attention.mla_prefill_backend = MLAPrefillBackendEnum.CUSTOM
