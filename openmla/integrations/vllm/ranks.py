"""Decode context parallelism for sparse models: a step over the keys that this rank holds.

vLLM gathers the queries of all ranks and merges their outputs by lse. Its own indexer merges the
ranks' candidates with CuTe DSL only, so select_over_ranks makes the selection: each rank offers its
best keys, all ranks pick the same ones, and each attends to those it holds. Prefill tokens take the
same path as decode tokens, because vLLM passes whatever counts as decode to forward_mqa.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vllm.distributed.parallel_state import get_dcp_group

import openmla
from openmla.parallel import Ranks
from openmla.plan.across import token_batch


def dcp_ranks(vllm_config: Any) -> Ranks:
    """vLLM's group. Ranks do not compare their steps: vLLM's scheduler gives all the same one."""
    interleave = vllm_config.parallel_config.cp_kv_cache_interleave_size
    return Ranks(get_dcp_group().device_group, interleave=interleave, heads="own", check=False)


def plan_over_dcp(
    m: Any,
    cache: openmla.LayerCache,
    config: openmla.MLAConfig,
    ranks: Ranks,
    planner: openmla.DecodePlanner,
    options: dict[str, Any],
) -> openmla.Plan:
    """`m` is vLLM's CommonAttentionMetadata: lengths of whole requests, and this rank's slots."""
    assert config.indexer is not None and cache.latent is not None
    B, T = m.num_reqs, m.num_actual_tokens
    topk, slots = config.indexer.topk, m.slot_mapping[:T]
    if m.max_query_len == 1 and B == T:
        plan = planner.plan(
            block_table=m.block_table_tensor,
            seq_lens=m.dcp_local_seq_lens,
            query_start_loc=m.query_start_loc,
            slot_mapping=m.slot_mapping,
            num_requests=B,
            num_tokens=T,
        )
        offered = min(topk, m.block_table_tensor.shape[1] * cache.latent.block_size)
    else:
        query_lens = m.query_start_loc_cpu[: B + 1].diff().tolist()
        seq_lens = m.seq_lens_cpu_upper_bound[:B].tolist()
        busy = [b for b, n in enumerate(query_lens) if n]
        whole = openmla.Batch(query_lens, seq_lens, m.block_table_tensor[:B], causal=False)
        own = token_batch(whole, busy, ranks.shard)
        plan = openmla.make_plan(own, config, cache, form="chosen", **options)
        longest = max((seq_lens[b] for b in busy), default=0)
        offered = min(topk, ranks.shard.most_local(longest))
    n = plan.num_tokens  # excludes the tokens that pad the step
    assert plan.select is not None
    here = {"offered": offered, "shard": ranks.shard, "block_size": cache.latent.block_size}
    return replace(
        plan, ranks=ranks, num_tokens=T, padding=T - n, slot_mapping=slots,
        select=replace(plan.select, **here),
    )  # fmt: skip
