"""FlashAttention 3's MLA decode, from vLLM's libraries, as vLLM's FLASH_ATTN_MLA calls it.

The rope columns are its keys, the latent columns its values and, with q_v, the other part of its
keys. vLLM prepares the schedule once per step, so a timed call does not include it. The number of
splits and max_seqlen_k depend on the mode: full CUDA graphs are captured with an upper bound of
both; without them the kernel chooses by the step's longest request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from bench.decode_batch import C, D, DecodeBatch

INTERFACE = "vllm.vllm_flash_attn.flash_attn_interface"
SCALE = D**-0.5
GRAPH_SPLITS = 32  # vLLM's flash_attn_max_num_splits_for_cuda_graph
GRAPH_TOKENS = 512  # vLLM's largest captured batch size
Decode = Callable[[Tensor], tuple[Tensor, Tensor]]  # cache -> out [T, H, C], lse [T, H]


@cache
def why_absent() -> str | None:
    """Why FA3 is not available for comparison."""
    try:
        interface = import_module(INTERFACE)
    except Exception as error:  # vLLM's own imports may fail in any way
        return f"{INTERFACE} cannot be imported ({type(error).__name__}: {error})"
    if not interface.FA3_AVAILABLE:
        return f"_vllm_fa3_C cannot be loaded ({interface.FA3_UNAVAILABLE_REASON})"
    if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9:
        return "needs SM90, this is SM{}{}".format(*torch.cuda.get_device_capability())
    return None


def decoders(batch: DecodeBatch) -> Iterator[tuple[str, Decode]]:
    """FA3 calls by name: with the arguments of full CUDA graphs, and with those of eager mode."""
    yield "fa3", decoder(batch, graphs=True)
    yield "fa3 eager", decoder(batch, graphs=False)


def decoder(batch: DecodeBatch, *, graphs: bool) -> Decode:
    fa3 = import_module(INTERFACE)
    num_splits = GRAPH_SPLITS if graphs else 0
    longest = max(batch.lens)
    schedule = fa3.get_scheduler_metadata(
        batch_size=len(batch.lens), max_seqlen_q=batch.new, max_seqlen_k=longest,
        num_heads_q=batch.q.shape[1], num_heads_kv=1, headdim=D - C, cache_seqlens=batch.seq_lens,
        qkv_dtype=batch.q.dtype, headdim_v=C, page_size=batch.layers[0].shape[1],
        cu_seqlens_q=batch.start_loc, causal=True, num_splits=num_splits,
    )  # fmt: skip
    if graphs:
        schedule = persistent(schedule)
    q_nope, q_pe = batch.halves
    arguments: dict[str, Any] = {
        "q": q_pe, "q_v": q_nope, "max_seqlen_q": batch.new, "cu_seqlens_q": batch.start_loc,
        "max_seqlen_k": batch.max_model_len if graphs else longest, "seqused_k": batch.seq_lens,
        "block_table": batch.table, "softmax_scale": SCALE, "causal": True, "fa_version": 3,
        "scheduler_metadata": schedule, "num_splits": num_splits, "cp_world_size": 1, "cp_rank": 0,
        "cp_tot_seqused_k": None,
        "return_softmax_lse": True,  # always computed; vLLM requests it with context parallelism
    }  # fmt: skip

    def decode(rows: Tensor) -> tuple[Tensor, Tensor]:
        k, v = rows[..., C:].unsqueeze(-2), rows[..., :C].unsqueeze(-2)  # one head
        out, lse = fa3.flash_attn_varlen_func(k=k, v=v, **arguments)
        return out, lse.transpose(0, 1)

    return decode


def persistent(schedule: Tensor) -> Tensor:
    """The schedule at the start of the buffer that captured graphs read, followed by zeros."""
    buffer = torch.zeros(1 + 4 * GRAPH_TOKENS, dtype=torch.int32, device=schedule.device)
    buffer[: len(schedule)] = schedule
    return buffer[: len(schedule)]
