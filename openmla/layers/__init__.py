"""Parameters: modules with the names checkpoints use."""

from openmla.layers.mla import MLAAttention

__all__ = ["MLAAttention"]
