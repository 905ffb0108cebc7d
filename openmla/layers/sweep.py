"""Steps to warm up: of every size at which kernels or their constants change.

Which kernel a step launches, and with which constants, follows from the specs of the backends. So
no threshold is listed here: a sweep runs steps of a few sizes, observes which kernels they ask for,
and halves the interval between two sizes that ask for different ones, until they are close.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from openmla.backends import forget_choices
from openmla.backends.replay import observed
from openmla.ranks import Ranks
from openmla.ranks.collectives import all_gather

CLOSE = 64  # sizes that differ by a 64th: no kernel serves fewer alone


class Sweep(NamedTuple):
    """Steps that differ in one size: the function that returns the step of a size, None if there is
    no such step, and the sizes to begin with, in rising order."""

    step: Callable[[int], Hashable]
    sizes: Sequence[int]


def sizes_up_to(most: int, least: int = 1) -> list[int]:
    """Return powers of 16 between the bounds, and the bounds."""
    powers = [16**i for i in range(max(most, 1).bit_length())]
    return sorted({least, most, *(n for n in powers if least < n < most)}) if most >= least else []


def run_sweeps(
    sweeps: Iterable[Sweep], run: Callable[[Any], object], device: torch.device, ranks: Ranks | None
) -> None:
    """Run the steps of all sweeps, each once, large ones first: the memory that they free is enough
    for the others. Ranks run the same steps: if two sizes differ on one rank, they differ on all.
    """
    asked: dict[Hashable, frozenset[Any]] = {}

    def kernels_of(step: Hashable) -> frozenset[Any]:
        if step not in asked:
            with observed() as seen:
                if step is not None:
                    run(step)
            asked[step] = frozenset(seen)
        return asked[step]

    def differ(low: Hashable, high: Hashable) -> bool:
        found = kernels_of(high) != kernels_of(low)
        if ranks is None:
            return found
        every = all_gather(torch.tensor([found], dtype=torch.int64).to(device), ranks.link)
        return bool(every.sum() > 0)

    forget_choices()  # a call that is replayed asks for no kernel
    for step, sizes in sweeps:
        gaps = [(size, size) for size in sizes[:1]] + list(pairwise(sizes))
        while gaps:
            low, high = gaps.pop()
            if differ(step(low), step(high)) and high - low > max(low // CLOSE, 1):
                middle = (low + high) // 2
                gaps += [(low, middle), (middle, high)]
    forget_choices()  # calls are counted until they are replayed
