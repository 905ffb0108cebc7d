"""Launching these kernels: what a program owns, how rows are split into runs, builds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from openmla.backends.triton._build import GFX942, TARGETS, Build, cdiv
from openmla.backends.triton._launch import TOKENS, merge_runs, num_runs

NVIDIA = tuple(target for target in TARGETS if target != GFX942)
NUM_WARPS = 4  # of the default warp group, where there are several
FP_FUSION = True


class Tile(NamedTuple):
    """A kernel, what one program of it owns and what it is compiled with."""

    kernel: Any
    block_h: int
    block_n: int  # rows of a step
    constants: Mapping[str, Any]
    targets: tuple[int, ...]


class Runs(NamedTuple):
    """How rows are split: into X runs, of `length` rows each if that is fixed. Kernels write part
    and part_lse: partial results if split, else out and lse themselves."""

    X: int
    length: int
    split: bool
    out: Tensor
    lse: Tensor
    part: Tensor
    part_lse: Tensor


def split_rows(tile: Tile, q: Tensor, sink: Tensor | None, *, width: int, run_length: int) -> Runs:
    """Runs of whole steps, for `width` rows at most."""
    T, H, _ = q.shape
    part = out = q.new_empty((T, H, 512))
    part_lse = lse = q.new_empty((T, H), dtype=torch.float32)
    length = cdiv(run_length, tile.block_n) * tile.block_n
    X = num_runs(cdiv(H, tile.block_h) * T, cdiv(width, tile.block_n), q.device, tile.block_h)
    if length:
        X = max(cdiv(width, length), 1)
    # with fixed runs the merge applies the sink, however many runs there are: same bits
    split = X > 1 or (length > 0 and sink is not None)
    if split:
        part = q.new_empty((T, X, H, 512), dtype=torch.float32)
        part_lse = q.new_empty((T, X, H), dtype=torch.float32)
    return Runs(X, length, split, out, lse, part, part_lse)


def launch(
    tile: Tile,
    runs: Runs,
    sink: Tensor | None,
    B: int,
    tensors: Sequence[Tensor],
    sizes: Sequence[float],
    constants: Mapping[str, Any],
) -> tuple[Tensor, Tensor]:
    """Launch over all tokens of B requests and merge runs. `tensors`, `sizes` and `constants` are
    what a kernel takes beside what all do, in its order."""
    T, H, _ = runs.out.shape
    for first_token in range(0, T, TOKENS):
        tile.kernel[(cdiv(H, tile.block_h), min(T - first_token, TOKENS), runs.X)](
            *tensors,
            runs.lse if sink is None else sink,
            runs.part,
            runs.part_lse,
            B,
            first_token,
            *sizes,
            **constants,
            H=H,
            SPLIT=runs.split,
            SINK=sink is not None and not runs.split,
            **tile.constants,
            num_warps=NUM_WARPS,
            enable_fp_fusion=FP_FUSION,
        )
    if runs.split:
        fixed = runs.length > 0
        merge_runs(runs.part, runs.part_lse, sink, runs.out, runs.lse, fixed=fixed)
    return runs.out, runs.lse


def tile_builds(tile: Tile, name: str, constants: Mapping[str, Any]) -> Iterator[Build]:
    """Of a kernel for all its targets; kernels call the same things the same."""
    constants = {**constants, **tile.constants}
    types = {
        **dict.fromkeys(("floats", "sink", "lse"), "*fp32"),
        **dict.fromkeys(("words", "words_1", "words_2", "row_ids", "row_lens"), "*i32"),
        **dict.fromkeys(("query_start_loc", "table", "table_1", "table_2"), "*i32"),
        "q": "*bf16",
        "out": "*fp32" if constants["SPLIT"] else "*bf16",
        "positions": "*i64",
        "qk_scale": "fp32",
    }
    signature = {
        argument: "constexpr" if argument in constants else types.get(argument, "i32")
        for argument in tile.kernel.arg_names
    }
    for target in tile.targets:
        yield Build(name, tile.kernel, signature, constants, NUM_WARPS, 1, target, FP_FUSION)
