"""Context parallelism: the cache is sharded by position across ranks.

Call make_plan(ranks=...), and run the plan with attend_step() and select_step(). The functions
whose names end in _over_ranks, except merge_over_ranks, are older names and work for one release.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from openmla.attention import (
    AbsorbedWeights,
    CompressedInputs,
    Projected,
    RawProjections,
    Selection,
    attend_step,
    select_step,
)
from openmla.attention.compressed import attend_segments
from openmla.cache import LayerCache, allocate_cache
from openmla.config import INDEXED_RATIO, MLAConfig
from openmla.errors import ConfigError, check_kind
from openmla.plan import Batch, Plan, make_plan
from openmla.plan.captured import rank_buffers
from openmla.ranks import Ranks, Shard, merge_over_ranks

RankPlan = Plan
select_over_ranks = select_step


def plan_over_ranks(
    batch: Batch, config: MLAConfig, cache: LayerCache, ranks: Ranks, **options: Any
) -> Plan:
    """Call make_plan(batch, config, cache, ranks=ranks, ...) instead; works for one release."""
    check_kind("plan", "ranks", ranks, Ranks)
    return make_plan(batch, config, cache, ranks=ranks, **options)


def attend_over_ranks(
    projected: Projected | CompressedInputs,
    absorbed: AbsorbedWeights | None,
    cache: LayerCache,
    plan: Plan,
    *,
    selection: Selection | None = None,
    sink: Tensor | None = None,  # [H] f32
    raw: RawProjections | None = None,
    write: bool = True,
) -> Any:
    """Call attend_step() or attend_compressed() instead; works for one release."""
    check_kind("step", "plan", plan, Plan)
    kind = Projected if plan.config.compressor is None else CompressedInputs
    check_kind("step", "projected", projected, kind)
    if not isinstance(projected, CompressedInputs):
        given: dict[str, Any] = {"selection": selection, "sink": sink, "raw": raw, "write": write}
        return attend_step(projected, absorbed, cache, plan, **given)  # type: ignore[arg-type]
    for name, other in (("absorbed", absorbed), ("selection", selection), ("raw", raw)):
        if other is not None:
            raise ConfigError(f"step: {name} must be None with CompressedInputs.")
    return attend_segments(projected, cache, plan, sink=sink, write=write)[0]


def rank_cache(
    config: MLAConfig,
    ranks: Ranks,
    *,
    num_blocks: int,
    block_size: int,
    layer: int = 0,
    **options: Any,
) -> LayerCache:
    """Allocate this rank's share of a layer's cache.

    Args:
        config: the model's dimensions.
        ranks: the ranks that share the cache.
        num_blocks: blocks of the cache.
        block_size: tokens of a block on each rank. DeepSeek V4's layers without an indexer are not
            sharded: their blocks have block_size * W tokens on every rank.
        layer: number of the layer.
        options: other arguments of allocate_cache().
    """
    check_kind("parallel", "config", config, MLAConfig)
    check_kind("parallel", "ranks", ranks, Ranks)
    compressor = config.compressor
    if compressor is not None and compressor.ratio(layer) != INDEXED_RATIO:
        block_size *= ranks.shard.size
    sizes: dict[str, Any] = {"num_blocks": num_blocks, "block_size": block_size, "layer": layer}
    return allocate_cache(config, **sizes, **options)


__all__ = [
    "RankPlan",
    "Ranks",
    "Shard",
    "attend_over_ranks",
    "merge_over_ranks",
    "plan_over_ranks",
    "rank_buffers",
    "rank_cache",
    "select_over_ranks",
]
