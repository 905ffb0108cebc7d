"""Context parallelism: a cache sharded by position over ranks, partial attentions merged."""

from openmla.parallel.captured import rank_buffers
from openmla.parallel.compressed import rank_cache
from openmla.parallel.layout import Shard
from openmla.parallel.merge import merge_over_ranks
from openmla.parallel.plan import plan_over_ranks
from openmla.parallel.ranks import Ranks
from openmla.parallel.select import select_over_ranks
from openmla.parallel.step import attend_over_ranks
from openmla.parallel.types import RankPlan

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
