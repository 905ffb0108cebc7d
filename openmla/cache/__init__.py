"""KV caches: formats, paged tensors, and the pools that assign blocks."""

from openmla.cache.blocks import BlockPool, as_integer
from openmla.cache.compressed import CompressedPool
from openmla.cache.format import FORMATS, CacheFormat
from openmla.cache.geometry import Geometry, cache_bytes
from openmla.cache.group import PoolGroup, ring_blocks
from openmla.cache.paged import (
    LayerCache,
    PagedCache,
    allocate_cache,
    check_formats,
    latent_formats,
    shown_bytes,
)
from openmla.cache.scales import LayerScales

__all__ = [
    "FORMATS",
    "BlockPool",
    "CacheFormat",
    "CompressedPool",
    "Geometry",
    "LayerCache",
    "LayerScales",
    "PagedCache",
    "PoolGroup",
    "allocate_cache",
    "as_integer",
    "cache_bytes",
    "check_formats",
    "latent_formats",
    "ring_blocks",
    "shown_bytes",
]
