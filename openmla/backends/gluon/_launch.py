"""Launching these kernels: what a program owns, how rows are split into runs, builds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from torch import Tensor

from openmla.backends.triton._build import GFX942, TARGETS, Build, cdiv
from openmla.backends.triton._launch import TOKENS, out_dtype
from openmla.backends.triton._prepare import Launch, Piece, prepare
from openmla.backends.triton._runs import Runs, make_targets, merge_runs, runs_of
from openmla.hardware import multiprocessors

NVIDIA = tuple(target for target in TARGETS if target != GFX942)
NUM_WARPS = 4  # of the default warp group, where there are several
FP_FUSION = True


@dataclass(frozen=True, eq=False)
class Tile:
    """A kernel, what one program of it owns and what it is compiled with."""

    kernel: Any
    block_h: int
    block_n: int  # rows of a step
    constants: Mapping[str, Any]
    targets: tuple[int, ...]


class Call(NamedTuple):
    """What a kernel takes beside what all do, in its order."""

    tensors: Sequence[Tensor | Piece]
    sizes: Sequence[float]
    constants: tuple[tuple[str, Any], ...]


@lru_cache(maxsize=4096)
def launch_of(
    tile: Tile, H: int, split: bool, sink: bool, constants: tuple[tuple[str, Any], ...]
) -> Launch:
    own = {"H": H, "SPLIT": split, "SINK": sink and not split}
    return prepare(
        tile.kernel, {**dict(constants), **own, **tile.constants}, num_warps=NUM_WARPS,
        enable_fp_fusion=FP_FUSION,
    )  # fmt: skip


def split_rows(tile: Tile, q: Tensor, sink: Tensor | None, *, width: int, run_length: int) -> Runs:
    """Runs of whole steps, for `width` rows at most."""
    T, H, _ = q.shape
    return runs_of(
        T, H, 512, tile.block_h, tile.block_n, width, run_length, sink is not None,
        multiprocessors(q.device),
    )  # fmt: skip


def launch(
    tile: Tile, q: Tensor, runs: Runs, sink: Tensor | None, B: int, call: Call
) -> tuple[Tensor, Tensor]:
    """Launch over all tokens of B requests and merge runs."""
    T, H, _ = q.shape
    sink = None if sink is None else sink.contiguous()
    targets = make_targets(q, 512, runs, out_dtype(q))
    if T == 0:
        return targets.out, targets.lse
    prepared = launch_of(tile, H, runs.split, sink is not None, call.constants)
    for first_token in range(0, T, TOKENS):
        prepared(
            (cdiv(H, tile.block_h), min(T - first_token, TOKENS), runs.X),
            *call.tensors,
            targets.lse if sink is None else sink,
            targets.part,
            targets.part_lse,
            B,
            first_token,
            *call.sizes,
        )
    merge_runs(runs, targets, sink)
    return targets.out, targets.lse


def tile_builds(
    tile: Tile, name: str, constants: Mapping[str, Any], targets: Sequence[int] = ()
) -> Iterator[Build]:
    """Of a kernel for all its targets, or some; kernels call the same things the same."""
    constants = {**constants, **tile.constants}
    types = {
        **dict.fromkeys(("q_scale", "floats", "sink", "lse"), "*fp32"),
        **dict.fromkeys(("words", "words_1", "words_2", "row_ids", "row_lens"), "*i32"),
        **dict.fromkeys(("query_start_loc", "table", "table_1", "table_2"), "*i32"),
        "q": "*fp8e4nv" if constants.get("Q_SCALES") else "*bf16",
        "out": "*fp32" if constants["SPLIT"] else "*bf16",
        "positions": "*i64",
        "qk_scale": "fp32",
    }
    signature = {
        argument: "constexpr" if argument in constants else types.get(argument, "i32")
        for argument in tile.kernel.arg_names
    }
    for target in targets or tile.targets:
        yield Build(name, tile.kernel, signature, constants, NUM_WARPS, 1, target, FP_FUSION)
