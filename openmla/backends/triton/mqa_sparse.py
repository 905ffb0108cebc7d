"""mqa_sparse, Triton: segments of any kind, rows cut into runs where tokens are few."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from openmla.backends import Problem
from openmla.backends.triton._build import Build
from openmla.backends.triton._decoded import decoded
from openmla.backends.triton._latent_builds import (
    few_heads_builds,
    few_heads_v4_builds,
    latent_builds,
    many_heads_v3_builds,
    many_heads_v4_builds,
)
from openmla.backends.triton._launch import Rows, few_heads_pay, has_many_heads, run_latent
from openmla.backends.triton._launch_v3 import fits_few_heads, fits_many_heads, run_v3
from openmla.backends.triton._launch_v4 import fits_v4, many_heads_pay, run_v4
from openmla.backends.triton._tiles import why_not_latent

LAUNCHES = 2  # the second merges runs; one more for every 65535 tokens


def why_not(problem: Problem) -> str | None:
    return why_not_latent(problem)


def run(
    q_latent: Tensor,
    query_start_loc: Tensor,
    positions: Tensor,
    segments: Sequence[Any],
    sink: Tensor | None,
    *,
    C: int,
    scale: float,
    run_length: int,
) -> tuple[Tensor, Tensor]:
    rows = [Rows(*segment) for segment in segments]
    sink = None if sink is None else sink.contiguous()
    if (
        len(rows) == 1
        and fits_few_heads(q_latent, rows[0], C, run_length)
        and not fits_many_heads(q_latent, rows[0], C, run_length)
    ):
        return run_v3(
            q_latent,
            query_start_loc,
            rows[0],
            sink,
            scale=scale,
            run_length=run_length,
            many=False,
        )
    width = sum(segment.width for segment in segments)
    v4 = fits_v4(q_latent, rows, C)
    many = v4 and has_many_heads(q_latent) and many_heads_pay(q_latent, run_length)
    if many or (v4 and few_heads_pay(q_latent, run_length)):
        return run_v4(
            q_latent,
            query_start_loc,
            positions,
            rows,
            sink,
            scale=scale,
            width=width,
            run_length=run_length,
            many=many,
        )
    rows = decoded(q_latent, query_start_loc, rows, run_length)
    if len(rows) == 1 and fits_many_heads(q_latent, rows[0], C, run_length):
        return run_v3(
            q_latent,
            query_start_loc,
            rows[0],
            sink,
            scale=scale,
            run_length=run_length,
            many=True,
        )
    return run_latent(
        q_latent,
        query_start_loc,
        positions,
        rows,
        sink=sink,
        C=C,
        scale=scale,
        run_length=run_length,
        width=width,
    )


def builds() -> Iterator[Build]:
    yield from latent_builds("slots", "positions", "window positions", "window prefix")
    yield from few_heads_builds()
    yield from few_heads_v4_builds()
    yield from many_heads_v3_builds()
    yield from many_heads_v4_builds()
