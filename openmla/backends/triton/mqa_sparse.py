"""mqa_sparse, Triton: segments of any kind; rows are split into runs when tokens are few."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from openmla.backends import Problem
from openmla.backends.segments import Segment
from openmla.backends.triton._decoded import decoded
from openmla.backends.triton._launch import SPEC, run_latent
from openmla.backends.triton._runs import MERGE
from openmla.backends.triton._tiles import why_not_latent

LAUNCHES = 2  # the second merges runs; one more for every 65535 tokens
# Number of tokens from which mapping positions to slots costs a tenth of the attention (estimate).
MAPPED_TOKENS = 256


def why_not(problem: Problem) -> str | None:
    return why_not_latent(problem)


def efficiency(problem: Problem) -> float:
    return 0.42  # H200, bench/routes.py


def prefers_slots(problem: Problem) -> bool:
    """Whether slots, which save a load per row, are worth the launch that maps positions to them.
    Packed rows are decoded once for many tokens, which maps them anyway."""
    many = problem.tokens > MAPPED_TOKENS and not problem.run_length  # else bits depend on tokens
    return many and problem.format != "fp8_ds_mla"


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
    return run_latent(
        q_latent,
        query_start_loc,
        positions,
        decoded(q_latent, query_start_loc, segments, run_length),
        None if sink is None else sink.contiguous(),
        C=C,
        scale=scale,
        run_length=run_length,
        width=sum(segment.width for segment in segments),
        q_scale=q_scale,
    )


SPECS = (SPEC, MERGE)
