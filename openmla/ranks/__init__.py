"""Ranks that share caches and heads: layout, collectives, merging, and checks for equal plans."""

from openmla.ranks.layout import Shard
from openmla.ranks.merge import merge_over_ranks
from openmla.ranks.ranks import Ranks

__all__ = ["Ranks", "Shard", "merge_over_ranks"]
