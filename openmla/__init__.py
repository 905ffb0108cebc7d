"""Multi-head latent attention for inference: every MLA model, every machine."""

from openmla import ops
from openmla.cache import FORMATS, BlockPool, CacheFormat, LayerCache, PagedCache, allocate_cache
from openmla.config import PRESETS, CompressorConfig, IndexerConfig, MLAConfig, RopeConfig
from openmla.errors import (
    CacheFullError,
    ConfigError,
    OpenMLAError,
    ShapeError,
    UnsupportedError,
)

__version__ = "0.1.0"

__all__ = [
    "FORMATS",
    "PRESETS",
    "BlockPool",
    "CacheFormat",
    "CacheFullError",
    "CompressorConfig",
    "ConfigError",
    "IndexerConfig",
    "LayerCache",
    "MLAConfig",
    "OpenMLAError",
    "PagedCache",
    "RopeConfig",
    "ShapeError",
    "UnsupportedError",
    "allocate_cache",
    "ops",
]
