"""Parameters: modules with the names checkpoints use."""

from openmla.layers.mla import MLAAttention
from openmla.layers.mla_v4 import MLAAttentionV4

__all__ = ["MLAAttention", "MLAAttentionV4"]
