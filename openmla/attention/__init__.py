"""One layer's step: strings ops together; owns no parameters and decides nothing."""

from openmla.attention.compressed import attend_compressed
from openmla.attention.select import select_step
from openmla.attention.step import attend_step, check_inputs
from openmla.attention.types import (
    AbsorbedWeights,
    IndexInputs,
    PoolInputs,
    Projected,
    RawProjections,
    Selection,
)

__all__ = [
    "AbsorbedWeights",
    "IndexInputs",
    "PoolInputs",
    "Projected",
    "RawProjections",
    "Selection",
    "attend_compressed",
    "attend_step",
    "check_inputs",
    "select_step",
]
