"""Multi-head latent attention (MLA) for inference, from plain PyTorch to Hopper kernels."""

from openmla import ops
from openmla.attention import (
    AbsorbedWeights,
    CompressedInputs,
    IndexInputs,
    PoolInputs,
    Projected,
    RawProjections,
    Selection,
    apply_sink,
    attend_compressed,
    attend_latent,
    attend_partial,
    attend_step,
    make_selection,
    select_step,
)
from openmla.backends.registered import register_backend, unregister_backend
from openmla.cache import (
    FORMATS,
    BlockPool,
    CacheFormat,
    CompressedPool,
    LayerCache,
    LayerScales,
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
from openmla.integrations import Scales, attach, calibrate, detach, expect_scales
from openmla.layers import MLAAttention, MLAAttentionV4, RopeTable, absorb, warmup
from openmla.outputs import OUTPUT_FORMATS, QuantizedOutput, decode_output, make_output
from openmla.plan import Batch, Plan, Workspace, make_plan, plan_buffers, slice_buffers

__version__ = "0.1.0"

__all__ = [
    "FORMATS",
    "OUTPUT_FORMATS",
    "PRESETS",
    "AbsorbedWeights",
    "Batch",
    "BlockPool",
    "CacheFormat",
    "CacheFullError",
    "CompressedInputs",
    "CompressedPool",
    "CompressorConfig",
    "ConfigError",
    "IndexInputs",
    "IndexerConfig",
    "LayerCache",
    "LayerScales",
    "MLAAttention",
    "MLAAttentionV4",
    "MLAConfig",
    "OpenMLAError",
    "PagedCache",
    "Plan",
    "PoolInputs",
    "Projected",
    "QuantizedOutput",
    "RawProjections",
    "RopeConfig",
    "RopeTable",
    "Scales",
    "Selection",
    "ShapeError",
    "UnsupportedError",
    "Workspace",
    "absorb",
    "allocate_cache",
    "apply_sink",
    "attach",
    "attend_compressed",
    "attend_latent",
    "attend_partial",
    "attend_step",
    "calibrate",
    "decode_output",
    "detach",
    "expect_scales",
    "make_output",
    "make_plan",
    "make_selection",
    "ops",
    "plan_buffers",
    "register_backend",
    "select_step",
    "slice_buffers",
    "unregister_backend",
    "warmup",
]
