"""Rows of a token split into runs: how many, where partial results go, how they are merged."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from openmla.backends.triton import _latent as kernels
from openmla.backends.triton._build import cdiv, interpreted, next_power_of_2
from openmla.backends.triton._prepare import Launch, Piece
from openmla.backends.triton._spec import Fixed, KernelSpec, case
from openmla.backends.triton._tiles import FEW_HEADS

# Tiles of merge_runs: runs and columns of one program, narrow columns where there are few programs.
MERGED_RUNS = 16
MERGED_COLUMNS = 512
MERGED_COLUMNS_NARROW = 128


class Runs(NamedTuple):
    """What is fixed between calls of the same sizes: rows are split into X runs, of `length` rows
    each if that is fixed; if they are `split`, how partial results are merged, and where part_lse
    begins and ends in the scratch memory, behind part; in bytes."""

    X: int
    length: int
    split: bool
    merge: Launch
    grid: tuple[int, int]
    part_lse: int
    size: int


class Targets(NamedTuple):
    """Results, and what kernels write: partial results if rows are split, else the same."""

    out: Tensor
    lse: Tensor
    part: Tensor | Piece
    part_lse: Tensor | Piece


@lru_cache(maxsize=4096)
def runs_of(
    T: int, H: int, C: int, block_h: int, block_n: int, width: int, run_length: int, sink: bool,
    units: int,
) -> Runs:  # fmt: skip
    """Runs of whole blocks for `width` rows at most: every run_length, else as many as fill so many
    multiprocessors."""
    length = cdiv(run_length, block_n) * block_n
    X = num_runs(cdiv(H, block_h) * T, cdiv(width, block_n), units, block_h)
    if length:
        X = max(cdiv(width, length), 1)
    # with fixed runs the merge applies the sink, however many runs there are: same bits
    split = X > 1 or (length > 0 and sink)
    merge = MERGE.launch(T, X, H, C, sink=sink, fixed=length > 0)
    grid = (T * H, cdiv(C, merge.fixed["BLOCK_C"]))
    part_lse = cdiv(T * X * H * C, 4) * 16  # both pieces start on 16 bytes
    return Runs(X, length, split, merge, grid, part_lse, part_lse + 4 * T * X * H)


def make_targets(q: Tensor, C: int, runs: Runs, dtype: torch.dtype | None = None) -> Targets:
    """part is [T, X, H, C], part_lse [T, X, H]; out of the queries' dtype unless told another."""
    T, H, _ = q.shape
    # the interpreter truncates where it should round: let torch round
    out = q.new_empty((T, H, C), dtype=torch.float32 if interpreted() else dtype or q.dtype)
    lse = q.new_empty((T, H), dtype=torch.float32)
    if not runs.split:
        return Targets(out, lse, out, lse)
    scratch = q.new_empty((runs.size // 4,), dtype=torch.float32)
    part_lse = Piece(scratch, runs.part_lse, torch.float32)
    return Targets(out, lse, Piece(scratch, 0, torch.float32), part_lse)


def merge_runs(runs: Runs, targets: Targets, sink: Tensor | None) -> None:
    """Partial results into out and lse; the sink counts once, here. With fixed runs the order of
    the sum is fixed too: neither empty runs at the end nor the number of tokens, by way of wider
    tiles, may change a bit."""
    if runs.split:
        out, lse, part, part_lse = targets
        runs.merge(runs.grid, part, part_lse, lse if sink is None else sink, out, lse, runs.X)


def fix(T: int, X: int, H: int, C: int, *, sink: bool, fixed: bool) -> Fixed:
    # few rows have many runs and few programs: narrower columns make more of them
    narrow = fixed or X > 16 or (X > 8 and T * H < 256)
    constants = {
        "H": H,
        "C": C,
        "SINK": sink,
        "BLOCK_X": MERGED_RUNS if fixed else min(next_power_of_2(X), MERGED_RUNS),
        "BLOCK_C": min(next_power_of_2(C), MERGED_COLUMNS_NARROW if narrow else MERGED_COLUMNS),
    }
    return Fixed(constants, num_warps=4, num_stages=3)


MERGE = KernelSpec(
    kernels._merge_runs_kernel,
    fix,
    types={"*bf16": "out", "*fp32": "part part_lse sink lse"},
    cases=lambda _: [  # runs that the planner fixed, and runs that fill the machine
        case("merge-runs-H128-fixed", 64, 8, 128, 512, sink=False, fixed=True),
        case("merge-runs-H16-free", 64, 8, 16, 512, sink=True, fixed=False),
    ],
    fp_fusion=True,
)


def num_runs(programs: int, blocks: int, units: int, block_h: int) -> int:
    """Runs a token's rows are split into: one wave, all of equal length. Occupancy is two programs
    of 16 heads per multiprocessor, one of more heads. Runs of one block only pay where each has a
    multiprocessor to itself: otherwise two blocks save a partial result to write and merge."""
    units = max(units, 1)
    wanted = (2 if block_h <= FEW_HEADS else 1) * units // max(programs, 1)
    blocks_per_run = cdiv(blocks, max(wanted, 1))
    if blocks_per_run == 1 and programs * blocks > units:
        blocks_per_run = 2
    return max(cdiv(blocks, max(blocks_per_run, 1)), 1)
