"""Memory that a step takes besides the KV cache, so that vLLM can size the cache around it.

In its profiling run vLLM's layer allocates `_chunked_prefill_workspace_size` rows of expanded keys
and values and attends to nothing. openmla sets that number so that this allocation is as large as
the most that one of its steps takes in a layer.
"""

from __future__ import annotations

from typing import Any

import vllm.envs as envs

from openmla.integrations.vllm.builder import config_of
from openmla.plan import default_workspace_tokens
from openmla.plan.workspace import step_bytes


def profiled_rows(layer: Any, vllm_config: Any) -> int:
    """Rows of [H, P + V] that take as much memory as a step of this layer."""
    ranks = vllm_config.parallel_config.decode_context_parallel_size  # vLLM gathers their queries
    config = config_of(layer, layer.num_heads * ranks, vllm_config)
    scheduler = vllm_config.scheduler_config
    itemsize = vllm_config.model_config.dtype.itemsize
    context = default_workspace_tokens(
        config,
        max_requests=scheduler.max_num_seqs,
        block_size=vllm_config.cache_config.block_size or 16,
    )
    held = step_bytes(
        config,
        max_tokens=scheduler.max_num_batched_tokens,
        context_rows=context,
        itemsize=itemsize,
        absorbed=bool(envs.VLLM_BATCH_INVARIANT) or ranks > 1,
    )
    row = layer.num_heads * (layer.qk_nope_head_dim + layer.v_head_dim) * itemsize
    return -(-held // row)
