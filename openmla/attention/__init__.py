"""One layer's step: strings ops together; owns no parameters and decides nothing."""

from openmla.attention.step import attend_step
from openmla.attention.types import Absorbed, Projected

__all__ = ["Absorbed", "Projected", "attend_step"]
