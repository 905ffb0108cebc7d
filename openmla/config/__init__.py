"""Configs of a model's attention: dimensions, RoPE, indexer, compressor, presets."""

from openmla.config.presets import PRESETS
from openmla.config.schema import (
    INDEXED_RATIO,
    CompressorConfig,
    IndexerConfig,
    MLAConfig,
    RopeConfig,
    check_layer_number,
)

__all__ = [
    "INDEXED_RATIO",
    "PRESETS",
    "CompressorConfig",
    "IndexerConfig",
    "MLAConfig",
    "RopeConfig",
    "check_layer_number",
]
