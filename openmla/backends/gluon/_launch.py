"""Launching kernels over listed rows: how rows are split into runs, or cut into parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from openmla.backends.triton import _launch as portable
from openmla.backends.triton import _merge_parts as merge
from openmla.backends.triton._build import GFX942, TARGETS, cdiv
from openmla.backends.triton._launch import out_dtype
from openmla.backends.triton._parts import cut_evenly
from openmla.backends.triton._prepare import Piece
from openmla.backends.triton._runs import Runs, make_targets, merge_runs, runs_of
from openmla.backends.triton._spec import Case, Fixed, KernelSpec, case
from openmla.hardware import multiprocessors

NVIDIA = tuple(target for target in TARGETS if target != GFX942)
NUM_WARPS = 4  # of the default warp group, where there are several


class Tile(KernelSpec):
    """A kernel over listed rows: block_h heads of a program, block_n rows of a step, and constants
    that are the same in all calls. Kernels call the same things the same."""

    def __init__(
        self, kernel: Any, block_h: int, block_n: int, constants: Mapping[str, Any],
        cases: Callable[[int], Iterable[Case]], targets: tuple[int, ...],
    ) -> None:  # fmt: skip
        self.block_h, self.block_n, self.constants = block_h, block_n, constants
        types = {
            "*fp32": "q_scale floats sink lse part part_lse",
            "*i32": "words words_1 words_2 row_ids row_lens query_start_loc table table_1 table_2 "
            "spans",
            "*i64": "positions",
            "fp32": "qk_scale",
        }
        super().__init__(
            kernel, self.fixed, types=types, cases=cases, targets=targets, fp_fusion=True
        )

    def fixed(self, H: int, constants: tuple[tuple[str, Any], ...]) -> Fixed:
        return Fixed({**dict(constants), "H": H, **self.constants}, NUM_WARPS)


def tile_case(name: str, H: int, **constants: Any) -> Case:
    queries = "*fp8e4nv" if constants.get("Q_SCALES") else "*bf16"
    types = {"q": queries, "out": "*fp32" if constants.get("SPLIT") else "*bf16"}
    return case(name, H, tuple(constants.items()), types=types)


class Call(NamedTuple):
    """What a kernel takes beside what all do, in its order."""

    tensors: Sequence[Tensor | Piece]
    sizes: Sequence[float]
    constants: tuple[tuple[str, Any], ...]


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
    own = (("SPLIT", runs.split), ("SINK", sink is not None and not runs.split))
    prepared = tile.launch(H, (*call.constants, *own))
    for first_token in range(0, T, portable.TOKENS):
        prepared(
            (cdiv(H, tile.block_h), min(T - first_token, portable.TOKENS), runs.X),
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


class Parts(NamedTuple):
    """How tokens are cut for the many-heads kernels: tiles of heads, `units` of rows of a token,
    programs of a tile, whether a token lies in several parts, which are merged then. With fixed
    runs, which are the units, their merge instead."""

    tiles: int
    units: int
    programs: int
    cut: bool
    merge: merge.Merge
    runs: Runs | None


@lru_cache(maxsize=4096)
def parts_of(
    tile: Tile, T: int, H: int, width: int, run_length: int, units: int, *, sink: bool
) -> Parts:
    """For so many multiprocessors and `width` rows of a token at most."""
    tiles = cdiv(H, tile.block_h)
    programs, steps = max(units // tiles, 1), max(cdiv(width, tile.block_n), 1)
    launches, cut, runs = cdiv(T, portable.TOKENS), False, None
    if run_length:
        runs = runs_of(T, H, 512, tile.block_h, tile.block_n, width, run_length, sink, units)
        programs, runs = T, runs if runs.split else None
    else:
        for num in {min(T, portable.TOKENS), T - (launches - 1) * portable.TOKENS}:
            even, slices, _ = cut_evenly.fn(num, programs, steps, steps)
            cut |= not even or slices > 1
    merged = merge.prepare_merge(
        T, H, 512, rows=tiles * tile.block_h, items=T, programs=launches * programs if cut else 0,
        units=steps, fixed=False, overlapped=True, sink=sink,
    )  # fmt: skip
    return Parts(tiles, runs.X if runs else steps, programs, cut, merged, runs)


def launch_parts(
    tile: Tile, q: Tensor, sink: Tensor | None, B: int, call: Call, *, width: int, run_length: int
) -> tuple[Tensor, Tensor]:
    """Launch over all tokens of B requests, each part of them or run by a program, and merge."""
    T, H, _ = q.shape
    sink = None if sink is None else sink.contiguous()
    parts = parts_of(
        tile, T, H, width, run_length, multiprocessors(q.device), sink=sink is not None
    )
    runs, targets = parts.runs, None
    if runs is None:
        outputs = merge.make_outputs(q, 512, parts.merge, out_dtype(q))
    else:  # no spans are written
        targets = make_targets(q, 512, runs, out_dtype(q))
        outputs = merge.Outputs(*targets, spans=Piece(targets.lse, 0, torch.int32))
    if T == 0:
        return outputs.out, outputs.lse
    own = (("SINK", sink is not None), ("FIXED", runs is not None))
    prepared = tile.launch(H, (*call.constants, *own))
    for number, first_token in enumerate(range(0, T, portable.TOKENS)):
        num = min(T - first_token, portable.TOKENS)
        prepared(
            (parts.tiles, num if run_length else parts.programs, 1 if runs is None else runs.X),
            *call.tensors,
            outputs.lse if sink is None else sink,
            *outputs,
            B,
            first_token,
            num,
            parts.merge.rows if runs is None else H,
            parts.units,
            number * parts.programs,
            *call.sizes,
        )
    if runs is not None and targets is not None:
        merge_runs(runs, targets, sink)
    elif parts.cut:
        merge.merge_parts(parts.merge, outputs, sink)
    return outputs.out, outputs.lse
