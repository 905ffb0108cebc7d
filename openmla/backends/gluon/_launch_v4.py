"""Latent attention over V4's rows: 16 heads a program, or on SM90 64."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product

import torch
from torch import Tensor

from openmla.backends import Problem
from openmla.backends.gluon import _few_heads_v4 as few_heads_v4
from openmla.backends.gluon import _many_heads_v4 as many_heads_v4
from openmla.backends.gluon._launch import (
    NVIDIA,
    Call,
    Tile,
    launch,
    launch_parts,
    split_rows,
    tile_case,
)
from openmla.backends.gluon._shapes import fills, needs_nvidia, needs_sm90, slower_with_16_heads
from openmla.backends.kernels import Kernel
from openmla.backends.segments import Segment
from openmla.backends.triton._build import cdiv
from openmla.backends.triton._launch import LOG2E, inner_contiguous
from openmla.backends.triton._prepare import Piece
from openmla.backends.triton._spec import Case

KINDS = (
    ("window",), ("window", "positions"), ("window", "prefix"), ("slots",), ("slots", "slots"),
)  # fmt: skip
LISTED = {"prefix": 0, "window": 0, "positions": 1, "slots": 2}  # by the last segment


def few_cases(_: int) -> Iterator[Case]:
    for kind, BS in (("positions", 64), ("prefix", 2), ("slots", 64)):
        name = f"few-heads-window-{kind}-fp8_dsv4-H16"
        yield tile_case(name, 16, LISTED=LISTED[kind], BS_1=64, BS_2=BS, SPLIT=True, SINK=False)


def many_cases(_: int) -> Iterator[Case]:
    for (kind, BS), (H, fixed) in product(
        (("positions", 64), ("prefix", 2), ("slots", 64)), ((64, False), (128, True))
    ):
        constants = {"LISTED": LISTED[kind], "BS_1": 64, "BS_2": BS}
        name = f"many-heads-window-{kind}-fp8_dsv4-H{H}"
        yield tile_case(name, H, **constants, SINK=not fixed, FIXED=fixed)


FEW = Tile(few_heads_v4._few_heads_v4_kernel, 16, 64, {"BLOCK_N": 64}, few_cases, NVIDIA)
# Registers a thread of the odd and of the loading warp group has; the even group has what is left
# of 512. With others it spills.
MANY = Tile(
    many_heads_v4._many_heads_v4_kernel, 64, 128, {"ODD_REGISTERS": 192, "LOAD_REGISTERS": 104},
    many_cases, (90,),
)  # fmt: skip
# 64 heads at a time are faster once tiles of 16, of which two fit a multiprocessor, fill a fifth of
# the machine. H200, 128 + 512 rows, 64 heads: 13.7 and 14.1 us for 4 and 8 tokens, 16 at a time
# 10.9 and 15.3.
BUSY_FRACTION = 5


def why_not_few(problem: Problem) -> str | None:
    if problem.format != "fp8_dsv4":
        return f"reads fp8_dsv4, not {problem.format}"
    if needs_nvidia():
        return needs_nvidia()
    if problem.kinds not in KINDS:
        kinds = " and ".join(problem.kinds)
        return f"takes a window and what may follow it, or slots, this is {kinds}"
    if (problem.D, problem.C) != (512, 512):
        return f"needs rows of 512 values, this is {problem.D}"
    if problem.dtype != torch.bfloat16:
        return f"takes bf16 queries, this is {problem.dtype}"
    if "pages" not in problem.aligned:
        return "needs pages at multiples of 16 bytes"
    return None


def why_not_many(problem: Problem) -> str | None:
    if problem.format != "fp8_dsv4":
        return f"reads fp8_dsv4, not {problem.format}"
    return needs_sm90(problem) or why_not_few(problem)


def slower_many(problem: Problem) -> str | None:
    """Up to 16 heads only where one program per token just fills the machine: two thirds of it to
    all. (H200, 16 heads: 33.1 and 66.4 us for 128 and 256 tokens, 16 at a time 38.5 and 60.1.)"""
    T, units = problem.tokens, problem.multiprocessors
    if problem.H <= 16:
        one_wave = not problem.run_length and 2 * units <= 3 * T <= 3 * units
        return None if one_wave else "is for more than 16 heads"
    if fills(problem, BUSY_FRACTION):
        return None
    return f"fills the machine from more than {T} tokens on"


def run(
    q: Tensor,
    query_start_loc: Tensor,
    positions: Tensor,
    segments: Sequence[Segment],
    sink: Tensor | None,
    *,
    C: int,
    scale: float,
    run_length: int,
    tile: Tile,
) -> tuple[Tensor, Tensor]:
    query_start_loc = query_start_loc.contiguous()
    width = sum(segment.width for segment in segments)
    runs = None
    if tile is FEW:
        runs = split_rows(tile, q, sink, width=width, run_length=run_length)
    window, second = segments[0], segments[-1]
    row_ids = row_lens = query_start_loc
    if second.rows is not None and second.row_lens is not None:
        row_ids, row_lens = inner_contiguous(second.rows), inner_contiguous(second.row_lens)
    q_token, q_head, _ = q.stride()
    tensors: list[Tensor | Piece] = [q]
    listed = 0 if len(segments) == 1 else row_ids.shape[-1]
    sizes = [scale * LOG2E, q_token, q_head, row_ids.stride(0), listed]
    sizes += [cdiv(run_length, tile.block_n) * tile.block_n] if runs is None else runs[:2]
    for number, part in enumerate((window, second)):
        # slots have no table: lists and their lengths are in its place and that of positions
        given = part.rows if part.block_table is None else part.block_table
        assert given is not None
        table = inner_contiguous(given)
        columns, span = table.shape[1], part.span or 1
        if number == len(segments):  # a window alone is followed by a prefix without columns
            columns, span = 0, 1
        tensors += [Piece(part.cache, 0, torch.int32), table]
        sizes += [part.cache.stride(0) // 16, part.cache.shape[0]]  # in units of 16 bytes
        sizes += [columns, span, table.stride(0)]
    counts = positions if window.row_lens is None else window.row_lens
    tensors += [row_ids, row_lens, counts.contiguous(), query_start_loc]
    constants = (
        ("LISTED", LISTED[second.kind]), ("BS_1", window.cache.shape[1]),
        ("BS_2", second.cache.shape[1]),
    )  # fmt: skip
    call = Call(tensors, sizes, constants)
    B = query_start_loc.shape[0] - 1
    if runs is not None:
        return launch(tile, q, runs, sink, B, call)
    return launch_parts(tile, q, sink, B, call, width=width, run_length=run_length)


FEW_HEADS = Kernel(
    name="few heads V4",
    why_not=why_not_few,
    slower=slower_with_16_heads,
    efficiency=0.42,
    run=partial(run, tile=FEW),
    specs=(FEW,),
)
MANY_HEADS = Kernel(
    name="many heads V4",
    why_not=why_not_many,
    slower=slower_many,
    efficiency=0.75,
    run=partial(run, tile=MANY),
    specs=(MANY,),
)
