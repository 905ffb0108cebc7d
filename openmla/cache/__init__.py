"""Bytes at rest: formats, paged tensors, and the pool that hands out blocks."""

from openmla.cache.blocks import BlockPool
from openmla.cache.format import FORMATS, CacheFormat
from openmla.cache.paged import LayerCache, PagedCache, allocate_cache

__all__ = ["FORMATS", "BlockPool", "CacheFormat", "LayerCache", "PagedCache", "allocate_cache"]
