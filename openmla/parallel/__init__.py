"""Context parallelism: a cache sharded by position over ranks, partial attentions merged."""

from openmla.parallel.layout import Shard
from openmla.parallel.merge import merge_over_ranks

__all__ = ["Shard", "merge_over_ranks"]
