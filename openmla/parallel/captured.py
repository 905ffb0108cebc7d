"""Steps over ranks for captured graphs: over buffers of fixed size, which every step fills anew."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from openmla.cache import LayerCache
from openmla.config import MLAConfig
from openmla.errors import ConfigError, check_kind
from openmla.parallel.batches import token_batch
from openmla.parallel.compressed import compressed_buffers
from openmla.parallel.ranks import Ranks, with_all_heads
from openmla.parallel.types import RankPart, RankPlan
from openmla.plan import Batch, make_plan, plan_buffers
from openmla.plan.captured import check_buffers, fill
from openmla.plan.rows import rope_offsets


def plan_captured(
    batch: Batch,
    config: MLAConfig,
    cache: LayerCache,
    ranks: Ranks,
    form: str,
    into: dict[str, Tensor],
    asked: dict[str, Any],
) -> RankPlan:
    """All tokens in one part, over buffers: those of a model with an indexer all choose."""
    latent, slots = cache.latent, batch.slot_mapping
    assert latent is not None and slots is not None
    if form == "expanded":
        raise ConfigError("parallel: form must be auto or absorbed with into=, got 'expanded'.")
    check_buffers("parallel", "into", into)
    most = into["slot_mapping"].shape[0]
    if batch.num_tokens > most:
        raise ConfigError(
            f"parallel: tokens must be at most {most} to replay, got {batch.num_tokens}."
        )
    everyone = list(range(len(batch.query_lens)))
    own, wide = token_batch(batch, everyone, ranks.shard), with_all_heads(config, ranks)
    plan = make_plan(own, wide, cache, into=into, **asked | {"workspace_tokens": None})
    values = {"slot_mapping": ranks.shard.local_slots(slots, latent.block_size)}
    if "rope_offsets" in into:
        offsets = rope_offsets(batch, config)
        values["rope_offsets"] = torch.zeros(0, dtype=torch.int64) if offsets is None else offsets
    fill(into, values)
    rows = slice(0, plan.num_tokens)
    step = replace(plan, config=config, causal=True)
    if config.indexer is None:
        return RankPlan(config, ranks, plan.num_tokens, step, absorbed=RankPart(rows, plan))
    keys = into["block_table"].shape[1] * latent.block_size
    offered = min(config.indexer.topk, keys)
    part = RankPart(rows, plan)
    return RankPlan(config, ranks, plan.num_tokens, step, chosen=part, candidates=offered)


def rank_buffers(
    config: MLAConfig,
    cache: LayerCache,
    ranks: Ranks,
    *,
    max_tokens: int,
    max_blocks: int,
    max_requests: int | None = None,
) -> dict[str, Tensor]:
    """plan_buffers() for plan_over_ranks(into=): a table has a column for each block_size * W
    positions. Every token counts as a request there; only V4 takes max_requests of several, by
    default of one token each."""
    check_kind("parallel", "ranks", ranks, Ranks)
    check_kind("parallel", "config", config, MLAConfig)
    check_kind("parallel", "cache", cache, LayerCache)
    sizes: dict[str, Any] = {"max_tokens": max_tokens, "max_blocks": max_blocks}
    sizes["max_requests"] = max_tokens
    if config.compressor is None:
        return plan_buffers(with_all_heads(config, ranks), cache, **sizes)
    if max_requests is not None:
        sizes["max_requests"] = max_requests
    return compressed_buffers(config, cache, ranks, **sizes)
