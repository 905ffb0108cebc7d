"""One layer's step: strings ops together; owns no parameters and decides nothing."""

from openmla.attention.select import select_step
from openmla.attention.step import attend_step
from openmla.attention.types import Absorbed, IndexInputs, Projected, Selection

__all__ = ["Absorbed", "IndexInputs", "Projected", "Selection", "attend_step", "select_step"]
