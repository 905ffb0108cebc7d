"""mqa_paged, Triton: a token's rows through the block table, split into runs by the plan."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from openmla.backends import Problem
from openmla.backends.segments import Segment
from openmla.backends.triton._build import Build
from openmla.backends.triton._latent_builds import latent_builds, merge_builds
from openmla.backends.triton._launch import run_latent
from openmla.backends.triton._tiles import why_not_latent

LAUNCHES = 2  # the second merges runs; one more for every 65535 tokens


def why_not(problem: Problem) -> str | None:
    return why_not_latent(problem)


def run(
    q_latent: Tensor,
    cache: Tensor,
    kv_scale: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    split_starts: Tensor,
    *,
    format: str,
    C: int,
    scale: float,
    causal: bool,
    max_query_len: int,
) -> tuple[Tensor, Tensor]:
    return run_latent(
        q_latent,
        query_start_loc,
        None,
        [Segment(cache, kv_scale, format, "paged", block_table=block_table)],
        seq_lens=seq_lens,
        split_starts=split_starts,
        causal=causal,
        C=C,
        scale=scale,
    )


def builds() -> Iterator[Build]:
    yield from latent_builds("paged")
    yield from merge_builds()
