"""What the kernels of 16 and of 64 heads a program ask of a problem alike."""

from __future__ import annotations

from openmla.backends import Problem
from openmla.backends.triton._build import assembly, cdiv


def needs_nvidia() -> str | None:
    return None if assembly() else "needs NVIDIA's instructions"


def needs_sm90(problem: Problem) -> str | None:
    """Of 64 heads: warpgroup products, queries that are copied as they are, 16 bytes at a time."""
    if problem.capability != (9, 0):
        return "needs SM90"
    return None if "queries" in problem.aligned else "needs queries at multiples of 16 bytes"


def faster_with_16_heads(problem: Problem) -> bool:
    """Up to 32 heads, or so few tokens that head tiles fill the machine (if their number may
    tell)."""
    tiles = cdiv(problem.H, 16) * problem.tokens
    alone = not problem.run_length and tiles <= problem.multiprocessors // 4
    return problem.H <= 32 or alone
