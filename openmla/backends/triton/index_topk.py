"""index_topk, Triton: the K highest scores of each row, without sorting (see _topk.py)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from openmla.backends import Problem
from openmla.backends.triton._build import TARGETS, Build, assembly, signature_of
from openmla.backends.triton._topk import _index_topk_kernel
from openmla.backends.triton._topk_launch import (
    FP_FUSION,
    Config,
    config_of,
    constants_of,
    launch_topk,
)

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


def builds() -> Iterator[Build]:
    """Few rows, many rows and a large K, per target; no kernel specialises on K or S."""
    for capability in TARGETS:
        shapes = ((1, 2048), (1000, 2048), (1000, 4096))
        for config in dict.fromkeys(config_of(T, K, 100, capability) for T, K in shapes):
            yield topk_build(capability, config)


def topk_build(capability: int, config: Config) -> Build:
    constants = constants_of(config, aligned=True, fits=True, asm=assembly())
    types = {
        "logits": "*fp32",
        "candidates": "*i64",
        **dict.fromkeys(("row_starts", "row_lens", "topk_positions", "topk_lens"), "*i32"),
    }
    return Build(
        f"topk-fp32-{config.block}-{config.num_warps}", _index_topk_kernel,
        signature_of(_index_topk_kernel, constants, types), constants, config.num_warps, 1,
        capability, FP_FUSION, config.maxnreg,
    )  # fmt: skip
