"""mha_ragged, Triton: packed requests of any lengths, causal or not, no host reads."""

from __future__ import annotations

import torch
from torch import Tensor

from openmla.backends import Problem
from openmla.backends.triton._mha_launch import RAGGED, cut_alike, run_mha, why_not_mha

LAUNCHES = 1


def why_not(problem: Problem) -> str | None:
    return why_not_mha(problem)


def reads_apart(problem: Problem) -> bool:
    return cut_alike(problem.E - problem.R, problem.E, problem.V)


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_start_loc: Tensor,
    key_start_loc: Tensor,
    k_pe: Tensor | None,
    *,
    scale: float,
    causal: bool,
    max_query_len: int,
    max_key_len: int,
    scales: tuple[Tensor, Tensor, Tensor] | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    return run_mha(
        q, k, v, query_start_loc, key_start_loc, k_pe=k_pe, scale=scale, causal=causal,
        max_key_len=max_key_len, scales=scales, out_dtype=out_dtype,
    )  # fmt: skip


SPECS = (RAGGED,)
