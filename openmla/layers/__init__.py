"""Attention layers, with the parameter names of checkpoints, and warmup()."""

from openmla.layers.mla import MLAAttention
from openmla.layers.mla_v4 import MLAAttentionV4
from openmla.layers.rope import RopeTable
from openmla.layers.warm import warmup
from openmla.layers.weights import absorb

__all__ = ["MLAAttention", "MLAAttentionV4", "RopeTable", "absorb", "warmup"]
