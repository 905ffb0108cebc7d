"""Kernel: one of several that a backend has for an op, and which of them runs a problem.

A backend with one kernel for an op is a file with why_not(), run(), builds() and LAUNCHES. One with
several lists them, best first; adding a kernel is one file that makes a Kernel and one line there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from openmla.backends import Problem


@dataclass(frozen=True)
class Kernel:
    """A row of a backend's own table."""

    name: str
    why_not: Callable[[Problem], str | None]  # why it cannot run a problem
    slower: Callable[[Problem], str | None]  # why another is faster where both can, as measured
    efficiency: float  # fraction of peak matmul throughput on long inputs
    run: Callable[..., Any]
    builds: Callable[[], Iterator[Any]]


class Variant(NamedTuple):
    """One of two ways in which a file runs an op, where the problem decides which: kernel_for()."""

    run: Callable[..., Any]


def why_none(kernels: Sequence[Kernel], problem: Problem) -> str | None:
    """Why no kernel can run a problem; None if one can."""
    reasons = {kernel.name: kernel.why_not(problem) for kernel in kernels}
    if None in reasons.values():
        return None
    # a kernel of another cache format says nothing where one of this format says why
    near = {name: reason for name, reason in reasons.items() if not str(reason).startswith("reads")}
    return "; ".join(f"{name} {reason}" for name, reason in (near or reasons).items())


def choose(kernels: Sequence[Kernel], problem: Problem) -> Kernel:
    """The first that can and is not slower than another, else the first that can."""
    able = [kernel for kernel in kernels if kernel.why_not(problem) is None]
    return next((kernel for kernel in able if kernel.slower(problem) is None), able[0])
