"""mha_ragged, Triton: packed requests of any lengths, causal or not, no host reads."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from openmla.backends import Problem
from openmla.backends.triton._build import Build
from openmla.backends.triton._mha_launch import mha_builds, run_mha, why_not_mha

LAUNCHES = 1


def why_not(problem: Problem) -> str | None:
    return why_not_mha(problem)


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_start_loc: Tensor,
    key_start_loc: Tensor,
    *,
    scale: float,
    causal: bool,
    max_query_len: int,
    max_key_len: int,
) -> tuple[Tensor, Tensor]:
    return run_mha(
        q, k, v, query_start_loc, key_start_loc, scale=scale, causal=causal, max_key_len=max_key_len
    )


def builds() -> Iterator[Build]:
    yield from mha_builds(bits=False)
