"""Kernel: one of several kernels of a backend for an op, and how one is selected.

A backend with one kernel for an op is a file with why_not(), run(), SPECS and LAUNCHES. One with
several lists them, best first; adding a kernel is one file that makes a Kernel and one line there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from openmla.backends import Problem


@dataclass(frozen=True)
class Kernel:
    """A row of a backend's own table."""

    name: str
    why_not: Callable[[Problem], str | None]  # the reason it cannot run a problem
    slower: Callable[[Problem], str | None]  # the measured reason why another one is faster
    efficiency: float  # fraction of peak matmul throughput on long inputs
    run: Callable[..., Any]
    specs: tuple[Any, ...] = ()  # a KernelSpec for each compiled kernel that `run` launches


class Variant(NamedTuple):
    """One of two variants in a file; the problem decides which one runs (kernel_for())."""

    run: Callable[..., Any]


def why_none(kernels: Sequence[Kernel], problem: Problem) -> str | None:
    """Return the reason why no kernel can run a problem; None if one can."""
    reasons = {kernel.name: kernel.why_not(problem) for kernel in kernels}
    if None in reasons.values():
        return None
    # prefer the reasons of kernels for this cache format
    near = {name: reason for name, reason in reasons.items() if not str(reason).startswith("reads")}
    return "; ".join(f"{name} {reason}" for name, reason in (near or reasons).items())


def choose(kernels: Sequence[Kernel], problem: Problem) -> Kernel:
    """Return the first kernel that can run it and is not slower, else the first that can."""
    able = [kernel for kernel in kernels if kernel.why_not(problem) is None]
    return next((kernel for kernel in able if kernel.slower(problem) is None), able[0])
