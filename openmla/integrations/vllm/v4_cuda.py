"""DeepSeek V4 on CUDA: vLLM's model without DeepGEMM, CuTe DSL or a compiled op.

vLLM's FlashMLA layer is built on every GPU, because it stores rows as "fp8_dsv4". What openmla
replaces besides attention and selection (v4.py) depends on what is installed:

    pooling        vLLM's Triton kernel, unless CuTe DSL is installed, on SM90 or newer
    window rows    rope and cache_write, if vLLM's compiled op is missing
    wo_a in fp8    weights dequantized once, unless DeepGEMM is installed
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from vllm.models.deepseek_v4.common.ops import fused_compress_quant_cache as pooling
from vllm.models.deepseek_v4.nvidia import model as nvidia
from vllm.models.deepseek_v4.nvidia.flashmla import DeepseekV4FlashMLAAttention
from vllm.platforms import current_platform
from vllm.utils.deep_gemm import is_deep_gemm_supported

from openmla.errors import ConfigError
from openmla.integrations.vllm import indexer
from openmla.ops import cache_write, rope

FORMAT = "fp8_dsv4"
LEAST = (8, 9)  # vLLM's Triton kernels of V4 convert to e4m3, which Triton supports from here on
INSERT = "fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert"


def check(vllm_config: Any) -> None:
    """Raise for what cannot run, before the model is built."""
    found = capability()
    if found < LEAST:
        raise ConfigError(
            f"openmla: DeepSeek V4 in vLLM needs SM89 or newer, got SM{found[0]}{found[1]}: vLLM's "
            "Triton kernels for it convert to fp8."
        )
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise ConfigError(
                f"openmla: {name} must be 1 for DeepSeek V4, got {getattr(parallel, name)}."
            )


def capability() -> tuple[int, ...]:
    return tuple(current_platform.get_device_capability() or (0, 0))


def uses_cute_dsl() -> bool:
    """vLLM's CuTe DSL kernels import both packages, and vLLM serves V4 from SM90 on."""
    return capability() >= (9, 0) and all(map(find_spec, ("cutlass", "quack")))


@contextmanager
def building(vllm_config: Any) -> Iterator[None]:
    """Context in which vLLM builds its model: FlashMLA layers, and no constructor that needs
    DeepGEMM or CuTe DSL. Without CuTe DSL vLLM's kernels compile on their first call."""
    indexer.register()
    # From SM100 on vLLM would store an index key's scale in a form that index_fp8 does not have.
    pooling.mqa_logits_use_mx_scales = lambda: False
    kernels, select = vllm_config.kernel_config, nvidia._select_dsv4_attn_cls
    warm_up = kernels.enable_jit_warmup
    kernels.enable_jit_warmup = warm_up and uses_cute_dsl()
    nvidia._select_dsv4_attn_cls = lambda vllm_config: DeepseekV4FlashMLAAttention
    try:
        yield
    finally:
        nvidia._select_dsv4_attn_cls = select
        kernels.enable_jit_warmup = warm_up


def take_over(layer: Any) -> None:
    """Replace the parts that one layer cannot run with what is installed."""
    if layer.indexer is not None and layer.indexer.use_fp4_kv:
        raise ConfigError(
            "openmla: indexer keys of DeepSeek V4 must be fp8, got MXFP4. Remove indexer_kv_dtype."
        )
    if layer.compressor is not None and not uses_cute_dsl():
        if not hasattr(layer.compressor, "_compress_norm_rope_store"):
            raise ConfigError(
                "openmla: vLLM 0.32 cannot pool the keys of DeepSeek V4 without CuTe DSL. Install "
                "nvidia-cutlass-dsl and quack-kernels, or vLLM 0.33."
            )
        layer.compressor._compress_norm_rope_store = partial(pool, layer.compressor)
    if not hasattr(torch.ops._C, INSERT):
        layer._fused_qnorm_rope_kv_insert = partial(insert, layer)
    layer._o_proj = partial(project, layer)


def pool(
    compressor: Any,
    step: Any,
    states: Tensor,
    state_width: int,
    positions: Tensor,
    rotary_emb: Any,
    steps: dict[str, Any],
    pdl_kwargs: dict[str, Any],
) -> None:
    """Pool a compressor's states into entries, with the kernel that vLLM uses without CUDA."""
    target = compressor.k_cache_prefix
    pooling.compress_norm_rope_store_triton(
        state_cache=states,
        num_actual=len(step.slot_mapping),
        token_to_req_indices=step.token_to_req_indices,
        positions=positions,
        slot_mapping=step.slot_mapping,
        block_table=step.block_table,
        block_size=step.block_size,
        state_width=state_width,
        cos_sin_cache=rotary_emb.cos_sin_cache,
        kv_cache=compressor._static_forward_context[target].kv_cache,
        k_cache_metadata=steps[target],
        pdl_kwargs=pdl_kwargs,
        head_dim=compressor.head_dim,
        rope_head_dim=compressor.rope_head_dim,
        compress_ratio=compressor.compress_ratio,
        overlap=compressor.overlap,
        use_fp4_cache=False,
        rms_norm_weight=compressor.norm.weight,
        rms_norm_eps=compressor.rms_norm_eps,
        quant_block=compressor._quant_block,
        token_stride=compressor._token_stride,
        scale_dim=compressor._scale_dim,
    )


def insert(layer: Any, q: Tensor, kv: Tensor, positions: Tensor, steps: Any) -> Tensor:
    """Normalize and rotate queries, and write this step's rows into the window. Heads are not
    padded, since v4.attend takes this rank's heads only."""
    if not isinstance(steps, dict):  # the profiling run
        return q
    window, R = layer.swa_cache_layer, layer.rope_head_dim
    step, table = steps[window.prefix], layer.rotary_emb.cos_sin_cache
    q = nn.functional.rms_norm(q.float(), (layer.head_dim,), eps=layer.eps).to(q.dtype)
    kv = kv.clone()
    rope(q[..., -R:], positions, table, pairing="pairs")
    rope(kv[:, None, -R:], positions, table, pairing="pairs")
    cache_write(
        window.kv_cache, kv[:, :-R], kv[:, -R:], step.slot_mapping, step.kv_scale, format=FORMAT
    )
    return q


class Dequantized(nn.Module):
    """A wo_a with a 16-bit weight [rows, columns], which vLLM multiplies with torch.bmm."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)


def project(layer: Any, o: Tensor, positions: Tensor) -> Tensor:
    """Run a layer's first _o_proj, in the profiling run, and then restore vLLM's own. Whatever
    layout a quantized wo_a has after loading, multiplying the identity by it gives its weight."""
    del layer._o_proj
    wo_a = layer.wo_a
    if not is_deep_gemm_supported() and wo_a.weight.dtype != o.dtype:
        columns = o.shape[1] * o.shape[2] // layer.n_local_groups
        identity = torch.eye(columns, dtype=o.dtype, device=o.device)
        layer.wo_a = Dequantized(wo_a(identity).t().contiguous())
    projected: Tensor = layer._o_proj(o, positions)
    return projected
