"""Latent attention over listed rows of 512 + 64, or of 512: 16 heads a program, on SM90 also 64."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from openmla.backends import Problem
from openmla.backends.gluon import _few_heads_v3 as few_heads_v3
from openmla.backends.gluon import _many_heads_v3 as many_heads_v3
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
from openmla.backends.triton._decoded import decoded
from openmla.backends.triton._launch import LOG2E, inner_contiguous, scales_of
from openmla.backends.triton._prepare import Piece
from openmla.backends.triton._spec import Case
from openmla.backends.triton._tiles import E4M3, EIGHT_BITS_ON, why_not_eight_bits


def few_cases(capability: int) -> Iterator[Case]:
    for kind, BS in (("slots", 0), ("positions", 64)):
        for scales in (0, 2) if capability in EIGHT_BITS_ON else (0,):
            name = f"few-heads-{kind}-fp8_ds_mla{'-e4m3' if scales else ''}-H16"
            yield tile_case(name, 16, Q_SCALES=scales, ROW=164, BS=BS, SPLIT=True, SINK=False)


def many_cases(format: str, *rows: tuple[int, int, int, bool]) -> Iterator[Case]:
    """Calls to compile: columns D, words of a row, scales of e4m3 queries, slots or positions."""
    for D, words, scales, both in rows:
        queries = f"-e4m3-{scales}" if scales else ""
        for kind, BS, fixed in (("slots", 0, False), ("positions", 64, True))[: 1 + both]:
            constants = dict(constants_of(64, words, BS, D, scales))
            name = f"many-heads-{kind}-{format}-{D}{queries}-H128"
            yield tile_case(name, 128, **constants, SINK=not fixed, FIXED=fixed)


FEW = {
    "fp8_ds_mla": Tile(few_heads_v3._few_heads_kernel, 16, 64, {"BLOCK_N": 64}, few_cases, NVIDIA)
}
# Registers a thread of the odd and of the loading warp group has; the even group has what is left
# of 512. With others they spill; copying takes fewer to load than decoding.
MANY = {
    "bf16": Tile(
        many_heads_v3._many_heads_v3_kernel, 64, 128,
        {"PACKED": False, "ODD_REGISTERS": 232, "LOAD_REGISTERS": 40},
        lambda _: many_cases(  # rows of e4m3 queries were decoded
            "bf16", (576, 288, 0, True), (512, 256, 0, True), (576, 288, 2, False)
        ),
        (90,),
    ),
    "fp8_ds_mla": Tile(
        many_heads_v3._many_heads_v3_kernel, 64, 128,
        {"PACKED": True, "ODD_REGISTERS": 200, "LOAD_REGISTERS": 104},
        lambda _: many_cases(
            "fp8_ds_mla", (576, 164, 0, True), (576, 164, 1, False), (576, 164, 2, True)
        ),
        (90,),
    ),
}  # fmt: skip
# 64 heads at a time are faster over packed rows once tiles of 16 fill a twelfth of the machine.
# H200, 2048 rows, 64 heads: 13.6, 15.0 and 14.6 us for 1, 2 and 4 tokens, 16 at a time 10.8, 12.8
# and 16.7.
BUSY_FRACTION = 12


def why_not_listed(problem: Problem) -> str | None:
    """Why neither kernel takes a problem."""
    if needs_nvidia():
        return needs_nvidia()
    if len(problem.kinds) != 1 or problem.kinds[0] not in ("slots", "positions"):
        return f"takes one segment of listed rows, this is {' and '.join(problem.kinds)}"
    widths = (576, 512) if problem.format == "bf16" else (576,)
    if problem.D not in widths or problem.C != 512:
        return f"needs rows of 512 + 64, this is {problem.C} + {problem.D - problem.C}"
    if problem.dtype not in (torch.bfloat16, E4M3):
        return f"takes bf16 and e4m3 queries, this is {problem.dtype}"
    if problem.dtype == E4M3 and why_not_eight_bits(problem):
        return why_not_eight_bits(problem)
    if "rows" not in problem.aligned:
        return "needs rows at multiples of 16 bytes, no padding between pages, fewer than 2**33"
    return None


def why_not_few(problem: Problem) -> str | None:
    if problem.format not in FEW:
        return f"reads fp8_ds_mla, not {problem.format}"
    return why_not_listed(problem)


def why_not_many(problem: Problem) -> str | None:
    if problem.format not in MANY:
        return f"reads bf16 and fp8_ds_mla, not {problem.format}"
    return needs_sm90(problem) or why_not_listed(problem)


def slower_many(problem: Problem) -> str | None:
    if problem.H <= 16:
        return "is for more than 16 heads"
    if problem.format == "bf16" or fills(problem, BUSY_FRACTION):
        return None
    return f"fills the machine from more than {problem.tokens} tokens on"


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
    tiles: Mapping[str, Tile],
    q_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    query_start_loc = query_start_loc.contiguous()
    if "bf16" in tiles:
        segments = decoded(q, query_start_loc, segments, run_length)
    (part,) = segments
    assert part.rows is not None and part.row_lens is not None
    tile, K, B = tiles[part.format], part.rows.shape[1], query_start_loc.shape[0] - 1
    N, BS, _ = part.cache.shape
    words = Piece(part.cache, 0, torch.int32)
    few = tile.block_h == 16
    floats = [words._replace(dtype=torch.float32)] if few else []  # else bitcast
    row_ids, table = inner_contiguous(part.rows), part.block_table
    if part.kind == "slots" or table is None:
        N, BS, table = N * BS, 0, query_start_loc
    table = inner_contiguous(table)
    q_token, q_head, _ = q.stride()
    scales = scales_of(q_scale)
    q_scale = part.kv_scale if q_scale is None else q_scale.contiguous()
    call = Call(
        [q, q_scale, words, *floats, row_ids, inner_contiguous(part.row_lens), query_start_loc,
         table],
        [N, scale * LOG2E, q_token, q_head, row_ids.stride(0), table.stride(0), K, table.shape[-1]],
        constants_of(
            tile.block_h, part.cache.stride(1) * part.cache.itemsize // 4, BS, q.shape[2], scales
        ),
    )  # fmt: skip
    if few:
        runs = split_rows(tile, q, sink, width=K, run_length=run_length)
        return launch(tile, q, runs, sink, B, call._replace(sizes=[*call.sizes, *runs[:2]]))
    length = cdiv(run_length, tile.block_n) * tile.block_n
    call = call._replace(sizes=[*call.sizes, length])
    return launch_parts(tile, q, sink, B, call, width=K, run_length=run_length)


def constants_of(
    block_h: int, row: int, BS: int, D: int, scales: int
) -> tuple[tuple[str, Any], ...]:  # fmt: skip
    """`row` is the words from one row to the next, `scales` how many e4m3 queries have."""
    rope = () if block_h == 16 else (("ROPE", D > 512),)
    return (("Q_SCALES", scales), ("ROW", row), ("BS", BS), *rope)


FEW_HEADS = Kernel(
    name="few heads",
    why_not=why_not_few,
    slower=slower_with_16_heads,
    efficiency=0.42,
    run=partial(run, tiles=FEW),
    specs=tuple(FEW.values()),
)
MANY_HEADS = Kernel(
    name="many heads",
    why_not=why_not_many,
    slower=slower_many,
    efficiency=0.75,  # H200, bench/routes.py
    run=partial(run, tiles=MANY),
    specs=tuple(MANY.values()),
)
