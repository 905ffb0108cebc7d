"""Stand-ins for what openmla.integrations.vllm imports of vLLM 0.32, by the same names and fields.

The real engine runs in `make test-vllm`. These let the plugin's own code run in seconds, and on a
GPU machine that has no vLLM.
"""

from __future__ import annotations

import enum
import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor, distributed, nn

M = TypeVar("M")
OVERRIDES: dict[Any, str] = {}
CONFIG: list[Any] = [None]  # vLLM's current one
CONTEXT: list[Any] = [None]  # of the forward pass
WARNINGS: list[str] = []
INFOS: list[str] = []
MODELS: dict[str, str] = {}
OOT: dict[str, type] = {}
PREFILL_OVERRIDES: dict[Any, str] = {}
BREAKS: list[str] = []
FP8_OUTPUT = "fp8, one scale"
ENVS = SimpleNamespace(VLLM_BATCH_INVARIANT=False, VLLM_USE_BREAKABLE_CUDAGRAPH=False)


class AttentionBackendEnum(enum.Enum):
    CPU_MLA = "vllm.CPUMLABackend"
    CUSTOM = None

    def is_overridden(self) -> bool:
        return self in OVERRIDES

    def get_path(self) -> str:
        return OVERRIDES.get(self, self.value)


class AttentionCGSupport(enum.Enum):
    UNIFORM_BATCH = 2
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    NEVER = 0


class MultipleOf(int): ...


class AttentionBackend:
    @classmethod
    def validate_configuration(cls, *, use_sparse: bool, **given: Any) -> list[str]:
        return ["sparse not supported"] if use_sparse else []


class AttentionMetadataBuilder(Generic[M]):
    reorder_batch_threshold: int | None = None
    supports_draft_decode_metadata_update = False

    def __init__(self, kv_cache_spec: Any, layer_names: Any, vllm_config: Any, device: Any) -> None:
        self.kv_cache_spec, self.layer_names = kv_cache_spec, layer_names
        self.vllm_config, self.device = vllm_config, device

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
        return self.build(0, common_attn_metadata)  # type: ignore[attr-defined]


@dataclass
class MLACommonMetadata:
    num_reqs: int
    max_query_len: int
    max_seq_len: int
    num_actual_tokens: int
    query_start_loc: Tensor
    slot_mapping: Tensor
    num_decodes: int
    num_decode_tokens: int
    num_prefills: int
    causal: bool = True
    head_dim: int | None = None
    prefill: Any = None
    decode: Any = None


class MLACommonMetadataBuilder(AttentionMetadataBuilder[M]):
    """As it is with decode context parallelism, for steps that only decode."""

    reorder_batch_threshold = 1

    def __init__(self, spec: Any, names: Any, config: Any, device: Any, metadata_cls: Any) -> None:
        super().__init__(spec, names, config, device)
        self.metadata_cls = metadata_cls

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
        """No query may be longer than what counts as decode, also where that was never set."""
        m, longest = common_attn_metadata, self.reorder_batch_threshold
        assert m.num_reqs <= m.num_actual_tokens * longest
        assert m.max_query_len <= longest
        return self.build(0, m)

    def build(self, common_prefix_len: int, m: Any, fast_build: bool = False) -> Any:
        decode = self._build_decode(  # type: ignore[attr-defined]
            block_table_tensor=m.block_table_tensor,
            seq_lens_device=m.dcp_local_seq_lens,
            max_seq_len=m.max_seq_len,
            query_start_loc_cpu=m.query_start_loc_cpu,
            query_start_loc_device=m.query_start_loc,
            num_decode_tokens=m.num_actual_tokens,
            max_query_len=1,
            dcp_tot_seq_lens_device=m.seq_lens,
        )
        return self.metadata_cls(
            m.num_reqs, 1, m.max_seq_len, m.num_actual_tokens, m.query_start_loc, m.slot_mapping,
            m.num_reqs, m.num_actual_tokens, 0, decode=decode,
        )  # fmt: skip


class MLACommonImpl(Generic[M]):
    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int, alibi_slopes: Any,
        sliding_window: Any, kv_cache_dtype: str, logits_soft_cap: Any, attn_type: str,
        kv_sharing_target_layer_name: Any, **mla: Any,
    ) -> None:  # fmt: skip
        self.num_heads, self.scale, self.kv_cache_dtype = num_heads, scale, kv_cache_dtype
        self.qk_nope_head_dim, self.v_head_dim = mla["qk_nope_head_dim"], mla["v_head_dim"]
        self.dcp_world_size = CONFIG[0].parallel_config.decode_context_parallel_size
        self.supports_quant_query_input = True

    def forward_mha(self, *args: Any) -> None:
        self.handed_up = "forward_mha"

    def do_kv_cache_update(self, *args: Any) -> None:
        self.handed_up = "do_kv_cache_update"


class MLACommonBackend(AttentionBackend): ...


class MLAPrefillBackendEnum(enum.Enum):
    FLASH_ATTN = "vllm.FlashAttnPrefillBackend"
    CUSTOM = None

    def get_path(self) -> str:
        return PREFILL_OVERRIDES.get(self, self.value)


class MLAPrefillBackend:
    def supports_quant_output(self, quant_key: Any) -> bool:
        return False


def eager_break_during_capture(function: Any) -> Any:
    """A break leaves the graph that is being captured: here it is told of every call."""

    def wrapped(*args: Any, **given: Any) -> Any:
        BREAKS.append(function.__name__)
        return function(*args, **given)

    return wrapped if ENVS.VLLM_USE_BREAKABLE_CUDAGRAPH else function


class CpuPlatform:
    @classmethod
    def get_attn_backend_cls(cls, selected: Any, asked: Any, num_heads: int | None = None) -> str:
        return "vllm.CPUMLABackend"

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        vllm_config.cache_config.block_size = 16
        vllm_config.cache_config.enable_prefix_caching = False
        vllm_config.scheduler_config.enable_chunked_prefill = False
        vllm_config.scheduler_config.max_num_batched_tokens = 1 << 16


class CustomOp(nn.Module):
    @classmethod
    def register_oot(cls, name: str) -> Any:
        return lambda made: OOT.setdefault(name, made)


class SparseAttnIndexer(CustomOp):
    def __init__(self, k_cache: Any, *args: Any, **given: Any) -> None:
        super().__init__()
        self.made_by_vllm = True


class DeepseekV32IndexerCache(nn.Module):
    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.head_dim, self.dtype, self.kv_cache = head_dim + 4, torch.uint8, torch.empty(0)


class Linear(nn.Linear):
    def forward(self, x: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return super().forward(x), None


class Indexer(nn.Module):
    """Its attributes; forward is ours to replace."""

    def __init__(
        self, vllm_config: Any, hidden: int, rank: int, heads: int, width: int, rope_dim: int,
        buffer: Tensor, prefix: str, dtype: torch.dtype,
    ) -> None:  # fmt: skip
        super().__init__()
        self.vllm_config, self.prefix, self.topk_indices_buffer = vllm_config, prefix, buffer
        self.n_head, self.head_dim, self.rope_dim = heads, width, rope_dim
        self.wq_b = Linear(rank, heads * width, bias=False, dtype=dtype)
        self.wk_weights_proj = Linear(hidden, width + heads, bias=False, dtype=dtype)
        self.k_norm = nn.LayerNorm(width, eps=1e-6, dtype=dtype)
        self.softmax_scale, self.n_head_scale = width**-0.5, heads**-0.5
        self.k_cache = DeepseekV32IndexerCache(width)
        self.indexer_op = OOT.get("SparseAttnIndexer", SparseAttnIndexer)(self.k_cache)


class OwnModel(nn.Module):
    """vLLM's own for CUDA."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        self.vllm_config = vllm_config


class CommonModel(nn.Module):
    """vLLM's for every platform."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        buffer = torch.zeros(64, 32, dtype=torch.int32)
        self.indexer = Indexer(
            vllm_config, 48, 24, 4, 128, 16, buffer, "model.layers.0.indexer", torch.float32
        )


@dataclass
class CommonAttentionMetadata:
    """vLLM's, as far as it is looked at."""

    query_start_loc: Tensor
    query_start_loc_cpu: Tensor
    seq_lens: Tensor
    seq_lens_cpu_upper_bound: Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: Tensor
    slot_mapping: Tensor
    dcp_local_seq_lens: Tensor | None = None


@dataclass
class Layer:
    """vLLM's MLAAttention, as far as it is looked at."""

    num_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    scale: float
    W_UK_T: Tensor
    W_UV: Tensor
    kv_cache: Tensor
    impl: Any = None
    layer_name: str = "0"
    indexer: Any = None
    use_sparse: bool = False
    _chunked_prefill_workspace_size: int | None = None
    _k_scale: Tensor = field(default_factory=lambda: torch.tensor(1.0))
    _q_scale: Tensor = field(default_factory=lambda: torch.tensor(1.0))
    dims: ClassVar = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")

    def forward_impl(
        self, q: Tensor, k_c_normed: Tensor, k_pe: Tensor, kv_cache: Tensor, attn_metadata: Any,
        output: Tensor, output_scale: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """All tokens of the step by forward_mha; before there are steps, zeros."""
        if attn_metadata is None:
            return output.fill_(0)
        n = attn_metadata.num_actual_tokens
        self.impl.forward_mha(
            q[:n], k_c_normed[:n], k_pe[:n], kv_cache, attn_metadata, self._k_scale, output[:n],
            output_scale,
        )  # fmt: skip
        return output


def config(
    *, chosen: bool = True, ranks: int = 1, drafts: int = 0, dtype: torch.dtype = torch.float32,
    requests: int = 8, **more: Any,
) -> Any:  # fmt: skip
    """A VllmConfig."""
    backend = AttentionBackendEnum.CUSTOM if chosen else None
    text = SimpleNamespace(index_n_heads=4, index_head_dim=128, index_topk=32)
    model = SimpleNamespace(hf_text_config=text, dtype=dtype, use_mla=True, architectures=["V3"])
    model.max_model_len = 128
    return SimpleNamespace(
        attention_config=SimpleNamespace(backend=backend, mla_prefill_backend=None),
        additional_config=more.pop("additional_config", {}),
        use_v2_model_runner=more.pop("runner_v2", True),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=ranks,
            cp_kv_cache_interleave_size=more.pop("interleave", 1),
        ),
        speculative_config=SimpleNamespace(
            num_speculative_tokens=drafts,
            method=more.pop("method", "mtp"),
            attention_backend=more.pop("draft_backend", None),
            uses_draft_kv_cache=lambda: True,
        )
        if drafts
        else None,
        model_config=model,
        scheduler_config=SimpleNamespace(
            max_num_seqs=requests, enable_chunked_prefill=True, max_num_batched_tokens=128
        ),
        cache_config=SimpleNamespace(
            block_size=32,
            user_specified_block_size=False,
            enable_prefix_caching=True,
            cache_dtype=more.pop("cache_dtype", "auto"),
        ),
        kernel_config=SimpleNamespace(enable_jit_warmup=more.pop("warm", False)),
        compilation_config=SimpleNamespace(
            static_forward_context={}, cudagraph_capture_sizes=[1, 2, 4], splitting_ops=["vllm::x"]
        ),
    )


def modules(version: str) -> dict[str, dict[str, Any]]:
    """What the plugin imports, by module."""
    registry = SimpleNamespace(register_model=MODELS.__setitem__)
    logger = SimpleNamespace(
        warning=WARNINGS.append,
        warning_once=WARNINGS.append,
        info=lambda *text: INFOS.append(text[0]),
        info_once=INFOS.append,
    )
    return {
        "vllm": {"__version__": version, "ModelRegistry": registry},
        "vllm.logger": {"init_logger": lambda name: logger},
        "vllm.config": {"get_current_vllm_config": lambda: CONFIG[0]},
        "vllm.distributed.parallel_state": {
            "get_dcp_group": lambda: SimpleNamespace(device_group=distributed.group.WORLD)
        },
        "vllm.forward_context": {"get_forward_context": lambda: CONTEXT[0]},
        "vllm.envs": vars(ENVS),
        "vllm.compilation.breakable_cudagraph": {
            "eager_break_during_capture": eager_break_during_capture,
            "is_breakable_cudagraph_enabled": lambda: ENVS.VLLM_USE_BREAKABLE_CUDAGRAPH,
        },
        "vllm.platforms": {"current_platform": SimpleNamespace(is_cpu=lambda: False)},
        "vllm.v1.attention.backends.mla.prefill.base": {"MLAPrefillBackend": MLAPrefillBackend},
        "vllm.v1.attention.backends.mla.prefill.registry": {
            "MLAPrefillBackendEnum": MLAPrefillBackendEnum,
            "register_mla_prefill_backend": PREFILL_OVERRIDES.__setitem__,
        },
        "vllm.model_executor.layers.quantization.utils.quant_utils": {
            "kFp8StaticTensorSym": FP8_OUTPUT
        },
        "vllm.platforms.cpu": {"CpuPlatform": CpuPlatform},
        "vllm.v1.attention.backends.registry": {
            "AttentionBackendEnum": AttentionBackendEnum,
            "register_backend": OVERRIDES.__setitem__,
        },
        "vllm.v1.attention.backend": {
            "AttentionBackend": AttentionBackend,
            "AttentionCGSupport": AttentionCGSupport,
            "AttentionMetadataBuilder": AttentionMetadataBuilder,
            "MultipleOf": MultipleOf,
        },
        "vllm.model_executor.layers.attention.mla_attention": {
            "MLACommonBackend": MLACommonBackend,
            "MLACommonImpl": MLACommonImpl,
            "MLACommonMetadata": MLACommonMetadata,
            "MLACommonMetadataBuilder": MLACommonMetadataBuilder,
        },
        "vllm.model_executor.custom_op": {"CustomOp": CustomOp, "op_registry_oot": OOT},
        "vllm.model_executor.layers.sparse_attn_indexer": {"SparseAttnIndexer": SparseAttnIndexer},
        "vllm.models.deepseek_v32": {
            "DeepseekV32ForCausalLM": OwnModel,
            "GlmMoeDsaForCausalLM": OwnModel,
            "DeepseekV32MTP": OwnModel,
        },
        "vllm.model_executor.models.deepseek_v2": {
            "DeepseekV32IndexerCache": DeepseekV32IndexerCache,
            "Indexer": Indexer,
            "DeepseekV3ForCausalLM": CommonModel,
            "GlmMoeDsaForCausalLM": CommonModel,
        },
        "vllm.model_executor.models.deepseek_mtp": {"DeepSeekMTP": CommonModel},
    }


def install(monkeypatch: Any, version: str = "0.32.0") -> None:
    """As modules, for as long as a test runs; the plugin is imported anew."""
    for name in [name for name in sys.modules if name.startswith("openmla.integrations.vllm.")]:
        monkeypatch.delitem(sys.modules, name)
    for store in (OVERRIDES, PREFILL_OVERRIDES, MODELS, OOT, WARNINGS, INFOS, BREAKS):
        store.clear()
    for name, attributes in modules(version).items():
        module: Any = ModuleType(name)
        for attribute, value in attributes.items():
            setattr(module, attribute, value)
        monkeypatch.setitem(sys.modules, name, module)
