"""Multi-head latent attention (MLA) for inference, from plain PyTorch to Hopper kernels."""

from openmla import ops
from openmla.cache import (
    FORMATS,
    BlockPool,
    CacheFormat,
    CompressedPool,
    LayerCache,
    PagedCache,
    allocate_cache,
)
from openmla.config import PRESETS, CompressorConfig, IndexerConfig, MLAConfig, RopeConfig
from openmla.errors import (
    CacheFullError,
    ConfigError,
    OpenMLAError,
    ShapeError,
    UnsupportedError,
)
from openmla.integrations import attach, detach
from openmla.layers import MLAAttention, MLAAttentionV4, RopeTable, warmup
from openmla.plan import Batch, Plan, Workspace, make_plan, plan_buffers, slice_buffers

__version__ = "0.1.0"

__all__ = [
    "FORMATS",
    "PRESETS",
    "Batch",
    "BlockPool",
    "CacheFormat",
    "CacheFullError",
    "CompressedPool",
    "CompressorConfig",
    "ConfigError",
    "IndexerConfig",
    "LayerCache",
    "MLAAttention",
    "MLAAttentionV4",
    "MLAConfig",
    "OpenMLAError",
    "PagedCache",
    "Plan",
    "RopeConfig",
    "RopeTable",
    "ShapeError",
    "UnsupportedError",
    "Workspace",
    "allocate_cache",
    "attach",
    "detach",
    "make_plan",
    "ops",
    "plan_buffers",
    "slice_buffers",
    "warmup",
]
