"""Merges what persistent programs split: partial results of an item's parts into out and lse.

Computes  out = sum(exp(lse_x - lse) * part_x), lse = log(sum(exp(lse_x))) over the item's runs x;
          zeros and -inf for tokens past all requests
Grid      `programs` for each of T tokens, which share its tiles of heads and columns; if there are
          others, these look for the tokens of many runs and share the tiles of all of them.
          Fixed runs: (T, programs, cdiv(C, BLOCK_C))
Reads     part [slots, rows, C] and part_lse; spans [T, 3], see _parts.py; a sink, which the kernel
          that wrote the parts has left out
Writes    out [T, H, C] and lse [T, H] where an item lies in several parts, or in none
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from openmla.backends.triton._build import cdiv, interpreted, next_power_of_2
from openmla.backends.triton._prepare import Launch, Piece
from openmla.backends.triton._primitives import LN2, LOG2E, finite_max, sink_factor
from openmla.backends.triton._spec import Case, Fixed, KernelSpec, case

# A warp merges few runs of a token one after the other, in whole rows, with all loads in flight:
# runs, columns, heads, warps.
FEW_RUNS, FEW_TILE = 16, (4, 512, 4, 8)
# A tile of more runs has one head and some columns: runs, columns.
MANY_TILE = (64, 128)
# Fixed runs, in order: whatever the tile, sums have the same order. Columns, heads, warps.
FIXED_FEW_ROWS = (128, 1, 1)
FIXED_MANY_ROWS = (512, 1, 4)
MANY_FIXED_ROWS = 1024
# More would mostly see that there is nothing to merge: 1.8 us with 1024 programs, 2.5 with 4096.
# With much to merge as many are faster: 13.3 us instead of 16.5.
MOST_PROGRAMS = 2048
# Beside them, for whatever tokens have many runs where few are expected.
RARE_PROGRAMS = 256
LANES = tl.constexpr(128)
UNROLL = tl.constexpr(8)  # runs whose loads are in flight together


class Merge(NamedTuple):
    """What merging takes that is fixed between calls: the launch, query rows of a slot, and where
    things are in the scratch memory, part first; in bytes."""

    launch: Launch
    grid: tuple[int, ...]
    sizes: tuple[int, ...]
    rows: int
    part_lse: int
    spans: int
    size: int


class Outputs(NamedTuple):
    """Results, and partial ones."""

    out: Tensor
    lse: Tensor
    part: Tensor | Piece
    part_lse: Tensor | Piece
    spans: Piece


def prepare_merge(
    T: int, H: int, C: int, *, rows: int, items: int, programs: int, units: int, fixed: bool,
    overlapped: bool, sink: bool = False,
) -> Merge:  # fmt: skip
    """For `items` of up to `units` each on so many programs: a part cuts two items at most, where
    it begins and where it ends.

    `overlapped`: the kernel that writes the parts lets this one launch before it ends. It pays
    where a wave of programs finds little to merge; with many runs it was slower (H200, one request
    of 32768 keys, 16 heads: 22.0 us beside 17.8)."""
    slots = max(items * units, 1) if fixed else 2 * programs
    most_runs = units if fixed else min(programs // max(items, 1) + 2, units)  # of one item
    overlapped = overlapped and most_runs <= FEW_RUNS
    launch = (FIXED if fixed else PARTS).launch(
        T, H, C, fixed=fixed, sink=sink, overlapped=overlapped
    )
    grid: tuple[int, ...]
    sizes: tuple[int, ...] = ()
    if fixed:
        grid = fixed_grid(T, H, C, launch.fixed["HEADS"], launch.fixed["BLOCK_C"])
    else:
        longest = min(programs, units)
        grid, sizes = parts_grid(T, H, C, most_runs, longest, launch.fixed)
    part_lse = cdiv(slots * rows * C, 4) * 16  # all pieces start on 16 bytes
    spans = part_lse + cdiv(slots * rows, 4) * 16
    return Merge(launch, grid, sizes, rows, part_lse, spans, spans + 4 * 3 * T)


def make_outputs(q: Tensor, C: int, merge: Merge, dtype: torch.dtype | None = None) -> Outputs:
    """Of the queries' dtype, unless told another."""
    T, H, _ = q.shape
    scratch = q.new_empty((merge.size // 4,), dtype=torch.float32)
    return Outputs(
        # the interpreter truncates where it should round: let torch round
        q.new_empty((T, H, C), dtype=torch.float32 if interpreted() else dtype or q.dtype),
        q.new_empty((T, H), dtype=torch.float32),
        Piece(scratch, 0, torch.float32),
        Piece(scratch, merge.part_lse, torch.float32),
        Piece(scratch, merge.spans, torch.int32),
    )


def merge_parts(merge: Merge, outputs: Outputs, sink: Tensor | None = None) -> None:
    out, lse, part, part_lse, spans = outputs
    given = lse if sink is None else sink
    merge.launch(merge.grid, part, part_lse, spans, given, out, lse, merge.rows, *merge.sizes)


def fixed_grid(T: int, H: int, C: int, heads: int, columns: int) -> tuple[int, int, int]:
    tiles = cdiv(C, columns)
    most = max(MOST_PROGRAMS // max(T * tiles, 1), 1)
    return T, min(cdiv(H, heads), most), tiles


def parts_grid(
    T: int, H: int, C: int, most_runs: int, longest: int, constants: Mapping[str, Any]
) -> tuple[tuple[int], tuple[int, int]]:
    """The grid, the number of tokens and the programs of each; the rest of the grid, if any, is for
    tokens of many runs. Items have `most_runs` if they are alike, and never more than `longest`."""
    tiles = cdiv(H, constants["HEADS"]) * cdiv(C, constants["BLOCK_C"])
    many_tiles, others = H * cdiv(C, constants["MANY_C"]), 0
    if most_runs > FEW_RUNS:
        tiles = max(tiles, many_tiles)
    elif longest > FEW_RUNS:
        others = min(T * many_tiles, RARE_PROGRAMS)
    programs = min(tiles, max(MOST_PROGRAMS // max(T, 1), 1))
    return (T * programs + others,), (T, programs)


def fix(T: int, H: int, C: int, *, fixed: bool, sink: bool, overlapped: bool) -> Fixed:
    constants = {"H": H, "C": C, "SINK": sink, "OVERLAPPED": overlapped}
    if fixed:
        columns, heads, warps = FIXED_MANY_ROWS if T * H >= MANY_FIXED_ROWS else FIXED_FEW_ROWS
    else:
        runs, columns, heads, warps = FEW_TILE
        constants |= {"BLOCK_X": runs, "FEW": FEW_RUNS, "MANY_X": MANY_TILE[0]}
        constants["MANY_C"] = min(next_power_of_2(C), MANY_TILE[1])
    constants["BLOCK_C"] = min(next_power_of_2(C), columns)
    constants["HEADS"] = min(next_power_of_2(H), heads)
    return Fixed(constants, warps, 3, {"launch_pdl": True} if overlapped else {})


@triton.jit
def find_runs(spans, t):
    """A token's first part or run, how many there are, and which token of its item it is."""
    first = tl.load(spans + 3 * t)
    return first, tl.load(spans + 3 * t + 1) - first + 1, tl.load(spans + 3 * t + 2)


@triton.jit(do_not_specialize=["slot_rows", "T", "programs"])
def _merge_parts_kernel(
    part, part_lse, spans, sink, out, lse, slot_rows, T, programs,
    H: tl.constexpr, C: tl.constexpr, SINK: tl.constexpr, OVERLAPPED: tl.constexpr,
    BLOCK_X: tl.constexpr, BLOCK_C: tl.constexpr, HEADS: tl.constexpr, FEW: tl.constexpr,
    MANY_X: tl.constexpr, MANY_C: tl.constexpr,
):  # fmt: skip
    p = tl.program_id(0)
    MANY_TILES: tl.constexpr = H * ((C + MANY_C - 1) // MANY_C)
    if OVERLAPPED:
        gdc_wait()
    if p < T * programs:
        TILES: tl.constexpr = ((H + HEADS - 1) // HEADS) * ((C + BLOCK_C - 1) // BLOCK_C)
        t = p % T
        first, num, token = find_runs(spans, t)
        if (num != 1) & (num <= FEW):
            for tile in range(p // T, TILES, programs):
                merge_tile(
                    part, part_lse, sink, out, lse, slot_rows, t, first, num, token, tile, H, C,
                    SINK, BLOCK_X, BLOCK_C, HEADS,
                )  # fmt: skip
        elif (num > FEW) & (tl.num_programs(0) == T * programs):
            for tile in range(p // T, MANY_TILES, programs):
                merge_tile(
                    part, part_lse, sink, out, lse, slot_rows, t, first, num, token, tile, H, C,
                    SINK, MANY_X, MANY_C, 1,
                )  # fmt: skip
    else:
        p -= T * programs
        for start in range(0, T, LANES):
            tokens = start + tl.arange(0, LANES)
            firsts = tl.load(spans + 3 * tokens, mask=tokens < T, other=0)
            lasts = tl.load(spans + 3 * tokens + 1, mask=tokens < T, other=0)
            many = lasts - firsts >= FEW
            rank = tl.cumsum(many.to(tl.int32), 0)  # from 1 on
            num_tiles = tl.sum(many.to(tl.int32), 0) * MANY_TILES
            for i in range(p, num_tiles, tl.num_programs(0) - T * programs):
                t = tl.sum(tl.where(many & (rank == i // MANY_TILES + 1), tokens, 0), 0)
                first, num, token = find_runs(spans, t)
                merge_tile(
                    part, part_lse, sink, out, lse, slot_rows, t, first, num, token,
                    i % MANY_TILES, H, C, SINK, MANY_X, MANY_C, 1,
                )  # fmt: skip


@triton.jit
def merge_tile(
    part, part_lse, sink, out, lse, slot_rows, t, first, num, token, tile, H: tl.constexpr,
    C: tl.constexpr, SINK: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_C: tl.constexpr,
    HEADS: tl.constexpr,
):  # fmt: skip
    """HEADS heads and BLOCK_C columns of a token; runs BLOCK_X at a time."""
    TILES: tl.constexpr = (C + BLOCK_C - 1) // BLOCK_C
    heads = tile // TILES * HEADS + tl.arange(0, HEADS)
    c = tile % TILES * BLOCK_C + tl.arange(0, BLOCK_C)
    mask_h = heads < H
    running_max = tl.full([HEADS], float("-inf"), tl.float32)
    running_sum = tl.zeros([HEADS], tl.float32)
    acc = tl.zeros([HEADS, BLOCK_C], tl.float32)
    rows = (token * H + heads).to(tl.int64)
    for start in range(0, num, BLOCK_X):
        if HEADS > 1:
            running_max, running_sum, acc = add_each(
                part, part_lse, rows, heads, c, slot_rows, first, start, num, running_max,
                running_sum, acc, H, C, BLOCK_X,
            )  # fmt: skip
        else:
            running_max, running_sum, acc = add_all(
                part, part_lse, rows, mask_h, c, slot_rows, first, start, num, running_max,
                running_sum, acc, C, BLOCK_X,
            )  # fmt: skip
    store_merged(
        out, lse, sink, acc, running_max, running_sum, t, heads, tile % TILES, mask_h, c, H, C, SINK
    )


@triton.jit
def slot_of(first, x):
    """The first part ends with the item, the others begin with it."""
    return tl.where(x == 0, 2 * first + 1, 2 * (first + x)).to(tl.int64)


@triton.jit
def add_each(
    part, part_lse, rows, heads, c, slot_rows, first, start, num, running_max, running_sum, acc,
    H: tl.constexpr, C: tl.constexpr, BLOCK_X: tl.constexpr,
):  # fmt: skip
    """BLOCK_X runs, one after the other, of which all loads are in flight together."""
    lses = ()
    values = ()
    new_max = running_max
    for i in tl.static_range(BLOCK_X):
        x = start + i
        row = slot_of(first, x) * slot_rows + rows
        mask = heads < tl.where(x < num, H, 0)
        run_lse = tl.load(part_lse + row, mask=mask, other=float("-inf"))
        at = part + (row * C)[:, None] + c[None, :]
        run_values = tl.load(at, mask=mask[:, None] & (c < C)[None, :], other=0.0)
        lses += (run_lse,)  # type: ignore[assignment]
        values += (run_values,)  # type: ignore[assignment]
        new_max = tl.maximum(new_max, run_lse)
    safe_max = finite_max(new_max)
    rescale = tl.exp2((running_max - safe_max) * LOG2E)
    acc = acc * rescale[:, None]
    running_sum = running_sum * rescale
    for i in tl.static_range(BLOCK_X):
        weight = tl.exp2((lses[i] - safe_max) * LOG2E)
        acc += values[i] * weight[:, None]
        running_sum += weight
    return new_max, running_sum, acc


@triton.jit
def add_all(
    part, part_lse, rows, mask_h, c, slot_rows, first, start, num, running_max, running_sum, acc,
    C: tl.constexpr, BLOCK_X: tl.constexpr,
):  # fmt: skip
    """BLOCK_X runs in one tile."""
    x = start + tl.arange(0, BLOCK_X)
    row = (slot_of(first, x) * slot_rows)[None, :] + rows[:, None]
    mask = mask_h[:, None] & (x < num)[None, :]
    run_lse = tl.load(part_lse + row, mask=mask, other=float("-inf"))
    values = tl.load(
        part + row[:, :, None] * C + c[None, None, :],
        mask=mask[:, :, None] & (c < C)[None, None, :],
        other=0.0,
    )
    new_max = tl.maximum(running_max, tl.max(run_lse, 1))
    safe_max = finite_max(new_max)
    weights = tl.exp2((run_lse - safe_max[:, None]) * LOG2E)
    rescale = tl.exp2((running_max - safe_max) * LOG2E)
    acc = acc * rescale[:, None] + tl.sum(values * weights[:, :, None], 1)
    running_sum = running_sum * rescale + tl.sum(weights, 1)
    return new_max, running_sum, acc


@triton.jit
def store_merged(
    out, lse, sink, acc, running_max, running_sum, t, heads, tile, mask_h, c, H: tl.constexpr,
    C: tl.constexpr, SINK: tl.constexpr,
):  # fmt: skip
    any_valid = running_sum != 0  # NaN stays NaN
    merged_lse = tl.where(any_valid, running_max + tl.log2(running_sum) * LN2, float("-inf"))
    normalizer = tl.where(any_valid, 1.0 / running_sum, 0.0)
    if SINK:
        logit = tl.load(sink + heads, mask=mask_h, other=0.0).to(tl.float32)
        normalizer *= sink_factor(logit, merged_lse, any_valid)
    line = t.to(tl.int64) * H + heads
    at = out + line[:, None] * C + c[None, :]
    values = (acc * normalizer[:, None]).to(out.dtype.element_ty)
    tl.store(at, values, mask=mask_h[:, None] & (c < C)[None, :])
    tl.store(lse + line, merged_lse, mask=heads < tl.where(tile == 0, H, 0))


@triton.jit(do_not_specialize=["slot_rows"])
def _merge_fixed_kernel(
    part, part_lse, spans, sink, out, lse, slot_rows,
    H: tl.constexpr, C: tl.constexpr, SINK: tl.constexpr, OVERLAPPED: tl.constexpr,
    BLOCK_C: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Of fixed runs: one after the other for every value, under the largest lse of all of them."""
    t, tile = tl.program_id(0), tl.program_id(2)
    if OVERLAPPED:
        gdc_wait()
    first, num, token = find_runs(spans, t)
    if num == 1:
        return
    c = tile * BLOCK_C + tl.arange(0, BLOCK_C)
    for block in range(tl.program_id(1), (H + HEADS - 1) // HEADS, tl.num_programs(1)):
        heads = block * HEADS + tl.arange(0, HEADS)
        mask_h = heads < H
        row = first.to(tl.int64) * slot_rows + token * H + heads
        running_max = tl.full([HEADS], float("-inf"), tl.float32)
        for start in range(0, num, 32):
            x = start + tl.arange(0, 32)
            at = part_lse + row[:, None] + x.to(tl.int64)[None, :] * slot_rows
            mask = mask_h[:, None] & (x < num)[None, :]
            run_lse = tl.load(at, mask=mask, other=float("-inf"))
            running_max = tl.maximum(running_max, tl.max(run_lse, 1))
        safe_max = finite_max(running_max)
        acc = tl.zeros([HEADS, BLOCK_C], tl.float32)
        running_sum = tl.zeros([HEADS], tl.float32)
        for start in range(0, num, UNROLL):
            for x in tl.static_range(UNROLL):
                mask = heads < tl.where(start + x < num, H, 0)
                run_lse = tl.load(part_lse + row, mask=mask, other=float("-inf"))
                values = tl.load(
                    part + row[:, None] * C + c[None, :], mask=mask[:, None] & (c < C)[None, :],
                    other=0.0,
                )  # fmt: skip
                weight = tl.exp2((run_lse - safe_max) * LOG2E)
                acc = tl.fma(values, weight[:, None].broadcast_to(HEADS, BLOCK_C), acc)
                running_sum += weight
                row += slot_rows
        store_merged(
            out, lse, sink, acc, running_max, running_sum, t, heads, tile, mask_h, c, H, C, SINK
        )


def merge_case(name: str, T: int, *, fixed: bool) -> Case:
    return case(name, T, 128, 512, fixed=fixed, sink=False, overlapped=False)


spec = partial(
    KernelSpec,
    fix=fix,
    types={"*bf16": "out", "*i32": "spans", "*fp32": "part part_lse lse sink"},
    fp_fusion=True,
)
PARTS = spec(_merge_parts_kernel, cases=lambda _: [merge_case("merge-parts", 64, fixed=False)])
FIXED = spec(
    _merge_fixed_kernel,
    cases=lambda _: [merge_case(f"merge-parts-T{T}-fixed", T, fixed=True) for T in (1, 64)],
)
