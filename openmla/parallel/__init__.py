"""Context parallelism: a cache sharded by position over ranks, partial attentions merged."""

from openmla.parallel.layout import Shard

__all__ = ["Shard"]
