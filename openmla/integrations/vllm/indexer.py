"""V3.2 and GLM-5: vLLM's indexer module, with select_step for its keys and its selection."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.custom_op import CustomOp, op_registry_oot
from vllm.model_executor.layers.sparse_attn_indexer import SparseAttnIndexer
from vllm.model_executor.models.deepseek_v2 import DeepseekV32IndexerCache, Indexer
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadataBuilder,
    MultipleOf,
)

import openmla
from openmla.cache.format import get_format
from openmla.integrations.vllm.backend import is_selected
from openmla.integrations.vllm.options import option

SELECT = "openmla_vllm::select"
# Index caches that openmla selects from, by name, to avoid importing V4's module for V3.2.
REPLACED = ("DeepseekV32IndexerCache", "DeepseekV4IndexerCache")


@torch.library.custom_op(SELECT, mutates_args=("chosen",))
def select(q: Tensor, k: Tensor, weights: Tensor, chosen: Tensor, layer_name: str) -> None:
    """Select a layer's keys into the step's metadata. `chosen`, vLLM's buffer of positions, is not
    written; declaring it as mutated keeps compilers from dropping or moving the call.

    vLLM runs these models with breakable CUDA graphs: attention is a break, run eagerly at every
    replay, and so is the selection, which reads the same metadata. Whether such graphs are on is
    known once vLLM has its config, so the wrapper is made at the call."""
    eager_break_during_capture(_select)(q, k, weights, layer_name)


def _select(q: Tensor, k: Tensor, weights: Tensor, layer_name: str) -> None:
    context = get_forward_context()
    if not isinstance(context.attn_metadata, dict):  # the profiling run
        return
    metadata, layer = context.attn_metadata[layer_name], context.no_compile_layers[layer_name]
    T = metadata.num_actual_tokens
    given = openmla.IndexInputs(q[:T], weights[:T], k[:T])
    cache = layer.impl.cache_of(layer.kv_cache)
    metadata.selection = openmla.select_step(given, cache, metadata.plan)


@select.register_fake
def _(q: Tensor, k: Tensor, weights: Tensor, chosen: Tensor, layer_name: str) -> None: ...


class OpenMLAIndexer(Indexer):
    """Replaces vLLM's indexer, which quantizes queries with a kernel that CPUs and SM80 do not
    have. openmla rounds them to its index format."""

    def take_over(self) -> None:
        """Set up an instance of vLLM's class whose class was changed to this one."""
        self.format = option(self.vllm_config, "index_format", "index_fp8")
        layout = get_format(self.format, "index")
        self.k_cache.__class__ = IndexCache
        self.k_cache.dtype = layout.dtype
        self.k_cache.head_dim = layout.width(self.head_dim)
        self.layer_name = self.prefix.removesuffix(".indexer") + ".attn"

    def index_cache(self) -> openmla.PagedCache:
        data = self.k_cache.kv_cache
        return openmla.PagedCache(data, self.format, torch.ones((), device=data.device))

    def forward(
        self, hidden_states: Tensor, qr: Tensor, positions: Tensor, rotary_emb: Any
    ) -> Tensor | None:
        R, rest = self.rope_dim, self.head_dim - self.rope_dim
        q = self.wq_b(qr)[0].view(-1, self.n_head, self.head_dim)
        k, weights = self.wk_weights_proj(hidden_states)[0].split([self.head_dim, self.n_head], -1)
        q_pe, q_nope = q.split([R, rest], -1)
        k_pe, k_nope = self.k_norm(k).split([R, rest], -1)
        q_pe, k_pe = rotary_emb(positions, q_pe, k_pe.unsqueeze(1))
        q = torch.cat([q_pe.reshape(-1, self.n_head, R), q_nope], -1)
        k = torch.cat([k_pe.reshape(-1, R), k_nope], -1)
        weights = weights.float() * (self.softmax_scale * self.n_head_scale)
        assert self.topk_indices_buffer is not None
        torch.ops.openmla_vllm.select(q, k, weights, self.topk_indices_buffer, self.layer_name)
        return self.topk_indices_buffer


class IndexCache(DeepseekV32IndexerCache):
    def get_attn_backend(self) -> type[AttentionBackend]:
        return IndexBackend


class IndexBackend(AttentionBackend):
    """Allocates pages for index keys; the layer's plan covers the rest."""

    @staticmethod
    def get_name() -> str:
        return "OPENMLA_INDEX"

    @staticmethod
    def get_impl_cls() -> Any:
        raise NotImplementedError

    @staticmethod
    def get_builder_cls() -> type:
        return IndexBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(16)]

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True  # the layer's plan selects keys, batch-invariantly


class IndexBuilder(AttentionMetadataBuilder[Any]):
    _cudagraph_support: ClassVar = AttentionCGSupport.UNIFORM_BATCH
    supports_draft_decode_metadata_update = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)

    def build(self, *args: Any, **given: Any) -> None:
        return None

    def update_draft_decode_metadata(self, metadata: None) -> None:
        return None


class IndexOp(SparseAttnIndexer):
    """vLLM's own op unless this backend is selected. Then nothing calls it, and its constructor,
    which requires DeepGEMM, does not run."""

    def __init__(self, k_cache: Any, *args: Any, **given: Any) -> None:
        replaced = type(k_cache).__name__ in REPLACED
        if is_selected(get_current_vllm_config()) and replaced:
            CustomOp.__init__(self)
        else:
            super().__init__(k_cache, *args, **given)


def register() -> None:
    if "SparseAttnIndexer" not in op_registry_oot:
        CustomOp.register_oot(name="SparseAttnIndexer")(IndexOp)
