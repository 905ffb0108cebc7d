"""What the kernels of 16 and of 64 heads a program ask of a problem alike."""

from __future__ import annotations

from openmla.backends import Problem
from openmla.backends.triton._build import assembly, cdiv

# Up to a quarter of the machine, splits of rows have to fill the rest: small programs split finer.
IDLE_FRACTION = 4


def needs_nvidia() -> str | None:
    return None if assembly() else "needs NVIDIA's instructions"


def needs_sm90(problem: Problem) -> str | None:
    """Of 64 heads: WGMMA, and queries that are copied as they are, 16 bytes at a time."""
    if problem.capability != (9, 0):
        return "needs SM90"
    return None if "queries" in problem.aligned else "needs queries at multiples of 16 bytes"


def fills(problem: Problem, fraction: int) -> bool:
    """Whether tiles of 16 heads take more than 1/fraction of the multiprocessors. With fixed runs
    always: a token's bits may not depend on how many others there are."""
    tiles = cdiv(problem.H, 16) * problem.tokens
    return problem.run_length > 0 or tiles > problem.multiprocessors // fraction


def slower_with_16_heads(problem: Problem) -> str | None:
    if problem.H <= 32 or not fills(problem, IDLE_FRACTION):
        return None
    return "is for up to 32 heads, or few tokens"
