"""mha_masked, Triton: reads only key tiles that a query of the tile selects, masked by bits."""

from __future__ import annotations

import torch
from torch import Tensor

from openmla.backends import Problem
from openmla.backends.triton._mha_launch import LIST_TILES, MASKED, run_mha, why_not_mha

LAUNCHES = 2  # the first lists the key tiles


def efficiency(problem: Problem) -> float:
    return 0.42  # H200, bench/routes.py


def why_not(problem: Problem) -> str | None:
    return why_not_mha(problem)


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_start_loc: Tensor,
    key_start_loc: Tensor,
    mask: Tensor,
    *,
    scale: float,
    max_query_len: int,
    max_key_len: int,
    scales: tuple[Tensor, Tensor, Tensor] | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    return run_mha(
        q, k, v, query_start_loc, key_start_loc, mask, scale=scale, max_key_len=max_key_len,
        scales=scales, out_dtype=out_dtype,
    )  # fmt: skip


SPECS = (MASKED, LIST_TILES)
