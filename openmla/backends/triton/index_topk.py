"""index_topk, Triton: the K highest scores of each row, without sorting (see _topk.py)."""

from __future__ import annotations

import torch
from torch import Tensor

from openmla.backends import Problem
from openmla.backends.triton._topk_launch import SPEC, launch_topk

INPUTS = (torch.float32, torch.bfloat16, torch.float16)
LAUNCHES = 1


def why_not(problem: Problem) -> str | None:
    if problem.dtype not in INPUTS:
        return f"takes 16- and 32-bit scores, this is {problem.dtype}"
    return None


def run(
    logits: Tensor, row_starts: Tensor, row_lens: Tensor, *, K: int, sorted: bool
) -> tuple[Tensor, Tensor]:
    T = logits.shape[0]
    positions = logits.new_empty((T, K), dtype=torch.int32)
    lens = row_lens.new_empty(T)
    launch_topk(logits, row_starts, row_lens, positions, lens)
    return positions, lens


SPECS = (SPEC,)
