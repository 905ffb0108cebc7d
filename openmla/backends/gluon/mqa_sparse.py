"""mqa_sparse, Gluon: kernels for rows of V3 and V4, of few heads and of many; best first."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial

from torch import Tensor

from openmla.backends import Problem
from openmla.backends.gluon import _launch_v3 as v3
from openmla.backends.gluon import _launch_v4 as v4
from openmla.backends.kernels import Kernel, choose, why_none
from openmla.backends.segments import Segment, problem_of
from openmla.backends.triton import mqa_sparse as portable

KERNELS = (v3.MANY_HEADS, v3.FEW_HEADS, v4.MANY_HEADS, v4.FEW_HEADS)
_choose = lru_cache(maxsize=1024)(partial(choose, KERNELS))
LAUNCHES = 2  # the second merges runs; one more for every 65535 tokens


def why_not(problem: Problem) -> str | None:
    return why_none(KERNELS, problem)


def slower(problem: Problem) -> str | None:
    return _choose(problem).slower(problem)


def kernel_for(problem: Problem) -> Kernel:
    return _choose(problem)


def kernel_of(problem: Problem) -> str:
    return _choose(problem).name


def efficiency(problem: Problem) -> float:
    return _choose(problem).efficiency


def prefers_slots(problem: Problem) -> bool:
    return portable.prefers_slots(problem)


def run(
    q_latent: Tensor,
    query_start_loc: Tensor,
    positions: Tensor,
    segments: Sequence[Segment],
    sink: Tensor | None,
    *,
    C: int,
    scale: float,
    run_length: int,
    q_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    problem = problem_of(q_latent, segments, C=C, run_length=run_length)
    eight_bits = {} if q_scale is None else {"q_scale": q_scale}
    out: tuple[Tensor, Tensor] = _choose(problem).run(
        q_latent, query_start_loc, positions, segments, sink, C=C, scale=scale,
        run_length=run_length, **eight_bits,
    )  # fmt: skip
    return out


SPECS = tuple(spec for kernel in KERNELS for spec in kernel.specs)
