"""One layer's step: calls the ops of its plan. Owns no parameters and makes no decisions."""

from openmla.attention.checks import check_inputs
from openmla.attention.chosen import carry_selection, make_selection
from openmla.attention.compressed import attend_compressed
from openmla.attention.latent import attend_latent
from openmla.attention.partial import attend_partial
from openmla.attention.select import select_step
from openmla.attention.sink import apply_sink
from openmla.attention.step import attend_step
from openmla.attention.types import (
    AbsorbedWeights,
    CompressedInputs,
    IndexInputs,
    PoolInputs,
    Projected,
    RawProjections,
    Selection,
)

__all__ = [
    "AbsorbedWeights",
    "CompressedInputs",
    "IndexInputs",
    "PoolInputs",
    "Projected",
    "RawProjections",
    "Selection",
    "apply_sink",
    "attend_compressed",
    "attend_latent",
    "attend_partial",
    "attend_step",
    "carry_selection",
    "check_inputs",
    "make_selection",
    "select_step",
]
