"""compress_kv, Triton: one launch pools tokens into entries and keeps what later ones need.

Computes  entries: tokens pooled by a softmax per channel (_pool.py), normalized, rotated, encoded;
          then the state rows of the step's last V tokens (specification: ops/compress_kv.py)
Grid      (B + cdiv(T, ratio),): the first B programs own a request's state and the one or two
          entries that begin before the step; each of the others owns an entry whose tokens are all
          of this step, found by its one row that is a multiple of ratio
Reads     state [NS, V, SW], kv and score [T, CD], bias [ratio, CD], norm_weight [D], table [Q, R],
          positions [T], query_start_loc [B+1], block_table [B, M], state_slots [B], kv_scale []
Writes    cache [N, BS, W], state
Limits    see why_not()

No two programs touch the same state, and its owner reads all it needs before it writes.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from openmla.backends import Problem
from openmla.backends.kernels import Variant
from openmla.backends.triton._build import (
    DO_NOT_SPECIALIZE_ON_ALIGNMENT,
    cdiv,
    interpreted,
    next_power_of_2,
)
from openmla.backends.triton._cache_rows import (
    INPUTS,
    Layout,
    Target,
    Writing,
    is_aligned,
    layout_of,
    row_constants,
    stored_type,
    write_values,
)
from openmla.backends.triton._launch import inner_contiguous
from openmla.backends.triton._pool import (
    Tokens,
    Window,
    accumulate_tokens,
    keep_partials,
    keep_tokens,
    load_partial,
    pool,
    pool_overlapping,
)
from openmla.backends.triton._primitives import (
    FP8,
    PLAIN,
    hadamard_transform,
    request_of,
    rotate_in_row,
    round_to,
    widen,
)
from openmla.backends.triton._spec import Case, Fixed, KernelSpec, case
from openmla.cache.format import get_format, state_rows

LAUNCHES = 1
ELEMENTS = 4096  # of a tile of tokens
TOKENS = 8  # of a tile, at most


class Blocks(NamedTuple):
    """A request's row of the block table, M blocks, and how many the cache has."""

    table: Any
    M: Any
    N: Any


class Finish(NamedTuple):
    """What a pooled entry is normalized and rotated with."""

    norm_weight: Any
    eps: Any
    table: Any
    table_stride: Any


class Rotation(NamedTuple):
    """Constants: the last R columns are rotated; with HADAMARD all 2**LOG2 are transformed."""

    R: Any
    HADAMARD: Any
    LOG2: Any


@triton.jit
def store_entry(
    v, entry, finish, blocks, target, ROTATION: tl.constexpr, WINDOW: tl.constexpr,
    LAYOUT: tl.constexpr, WRITING: tl.constexpr,
):  # fmt: skip
    """Normalize, rotate and encode v [BLOCK_D], store it as the request's entry."""
    D: tl.constexpr = WINDOW.D
    BLOCK_D: tl.constexpr = WINDOW.BLOCK_D
    R: tl.constexpr = ROTATION.R
    BS: tl.constexpr = WRITING.BS
    BLOCK_G: tl.constexpr = WRITING.BLOCK_G
    BLOCK_C: tl.constexpr = WRITING.BLOCK_C
    d = tl.arange(0, BLOCK_D)
    column = entry // BS
    block = tl.load(blocks.table + column, mask=column < blocks.M, other=-1).to(tl.int64)
    weight = widen(tl.load(finish.norm_weight + d, mask=d < D, other=0.0))
    if R > 0:  # loads first: they overlap with the reduction
        r = d - (D - R)
        rotated = (r >= 0) & (r < R)
        angles = finish.table + entry * WINDOW.RATIO * finish.table_stride + r // 2
        cos = tl.load(angles, mask=rotated, other=0.0)
        sin = tl.load(angles + R // 2, mask=rotated, other=0.0)
    square = tl.div_rn(tl.sum(v * v, 0), D * 1.0)
    v = v * tl.div_rn(1.0, tl.sqrt_rn(square + finish.eps)) * weight
    if R > 0:
        is_second = r % 2 == 1
        partner = tl.where(rotated, tl.where(is_second, d - 1, d + 1), d)
        other = tl.gather(v, partner, 0)
        v = rotate_in_row(v, other, cos, sin, is_second, rotated)
    if ROTATION.HADAMARD:
        v = hadamard_transform(v, ROTATION.LOG2)
    if (block >= 0) & (block < blocks.N):
        r_at = LAYOUT.MAIN + tl.arange(0, WRITING.BLOCK_R)
        rope = tl.gather(v, tl.minimum(r_at, BLOCK_D - 1), 0)
        if BLOCK_G * BLOCK_C > BLOCK_D:
            row = tl.gather(v, tl.minimum(tl.arange(0, BLOCK_G * BLOCK_C), BLOCK_D - 1), 0)
            values = tl.reshape(row, [BLOCK_G, BLOCK_C])
        else:
            values = tl.reshape(v, [BLOCK_G, BLOCK_C])
        if LAYOUT.FORMAT != PLAIN and LAYOUT.FORMAT != FP8:  # packed formats take bf16
            values = round_to(values, tl.bfloat16, WRITING.ASM)
        write_values(target, values, rope, block * BS + entry % BS, LAYOUT, WRITING)


@triton.jit(
    do_not_specialize=["B", "N", "NS", "M", "block_stride"],
    do_not_specialize_on_alignment=DO_NOT_SPECIALIZE_ON_ALIGNMENT,
)
def _compress_kv_kernel(
    cache, kv_scale, state, kv, score, bias, norm_weight, table, positions, query_start_loc,
    block_table, state_slots, clamped, eps, page, row_stride, state_slot, state_row, kv_stride,
    score_stride, bias_stride, table_stride, position_stride, block_stride, B, N, NS, M,
    D: tl.constexpr, V: tl.constexpr, R: tl.constexpr, RATIO: tl.constexpr, OVERLAP: tl.constexpr,
    HADAMARD: tl.constexpr, ALONE: tl.constexpr, LOG2: tl.constexpr, BLOCK_J: tl.constexpr,
    BLOCK_D: tl.constexpr, BS: tl.constexpr, FORMAT: tl.constexpr, MAIN: tl.constexpr,
    ROPE: tl.constexpr,
    GROUP: tl.constexpr, SCALES: tl.constexpr, EXACT: tl.constexpr, ALIGNED: tl.constexpr,
    ASM: tl.constexpr, COUNTED: tl.constexpr, UPCAST: tl.constexpr, BLOCK_G: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    WINDOW: tl.constexpr = Window(D, V, RATIO, ALONE, BLOCK_J, BLOCK_D)
    ROTATION: tl.constexpr = Rotation(R, HADAMARD, LOG2)
    LAYOUT: tl.constexpr = Layout(FORMAT, MAIN, ROPE, GROUP, SCALES, EXACT)
    WRITING: tl.constexpr = Writing(BS, ALIGNED, ASM, False, COUNTED, BLOCK_G, BLOCK_C, BLOCK_R)
    program = tl.program_id(0)
    if not UPCAST:  # fp64 from a compiled graph; in the interpreter a Python float
        eps = eps.to(tl.float32)
    b = program
    t = (program - B) * RATIO
    if program >= B:
        b = request_of(t, query_start_loc, B)
    slot = -1
    first_row = 0
    end_row = 0
    if b < B:
        slot = tl.load(state_slots + b)
        first_row = tl.load(query_start_loc + b)
        end_row = tl.load(query_start_loc + b + 1)
    if (slot >= 0) & (slot < NS) & (first_row < end_row):
        start = tl.load(positions + tl.cast(first_row, tl.int64) * position_stride)
        end = start + (end_row - first_row)
        # from here on rows are addressed by position
        shift = first_row - start
        kv += shift * kv_stride
        score += shift * score_stride
        state += tl.cast(slot, tl.int64) * state_slot
        tokens = Tokens(kv, score, bias, kv_stride, score_stride, bias_stride)
        blocks = Blocks(block_table + b.to(tl.int64) * block_stride, M, N)
        finish = Finish(norm_weight, eps, table, table_stride)
        target = Target(cache, page, row_stride, kv_scale, kv_scale, clamped)
        # the first entry that needs nothing of the state
        first_new = (start + RATIO - 1) // RATIO
        if OVERLAP:
            first_new = tl.where(start > 0, first_new + 1, first_new)
        window = start // RATIO
        last = tl.minimum(first_new, end // RATIO)
        if program >= B:
            window = (t - shift) // RATIO
            last = tl.where(window >= first_new, tl.minimum(window + 1, end // RATIO), window)
        for i in range(0, (last - window).to(tl.int32)):
            entry = window + i
            if OVERLAP:
                v = pool_overlapping(tokens, state, state_row, entry, start, WINDOW)
            else:
                begin = tl.maximum(entry * RATIO, start)
                count = (entry + 1) * RATIO - begin
                before = state + (start + V - 1) % V * state_row
                partial = load_partial(before, entry * RATIO < start, D, BLOCK_D)
                partial = accumulate_tokens(
                    partial, tokens, begin, count.to(tl.int32), BLOCK_J, WINDOW
                )
                v = pool(partial)
            store_entry(v, entry, finish, blocks, target, ROTATION, WINDOW, LAYOUT, WRITING)
        if program < B:
            first = tl.maximum(end - V, start)
            if OVERLAP:
                keep_tokens(tokens, state, state_row, first, end, WINDOW)
            else:
                keep_partials(tokens, state, state_row, start, first, end, WINDOW)


def why_not(problem: Problem) -> str | None:
    if problem.dtype not in INPUTS:
        return f"takes 16- and 32-bit tokens, these are {problem.dtype}"
    if problem.D > ELEMENTS:
        return f"holds entries of up to {ELEMENTS} values, these are {problem.D}"
    return None


def kernel_for(problem: Problem) -> Variant:
    return Variant(run=partial(run, alone=problem.batch_invariant))


def kernel_of(problem: Problem) -> str:
    return "token by token" if problem.batch_invariant else ""


def run(
    cache: Tensor,
    kv_scale: Tensor,
    state: Tensor,
    kv: Tensor,
    score: Tensor,
    bias: Tensor,
    norm_weight: Tensor,
    table: Tensor,
    positions: Tensor,
    query_start_loc: Tensor,
    block_table: Tensor,
    state_slots: Tensor,
    clamped: Tensor | None,
    *,
    format: str,
    ratio: int,
    overlap: bool,
    eps: float,
    hadamard: bool,
    alone: bool = False,
) -> None:
    T, B, D = kv.shape[0], state_slots.shape[0], norm_weight.shape[0]
    if T * B * D == 0:
        return
    aligned = is_aligned(cache, layout_of(format, D, cut=D))
    launch = SPEC.launch(
        format, D, table.shape[1], cache.shape[1], state.shape[1], ratio, overlap, hadamard,
        aligned=aligned, counted=clamped is not None, alone=alone and not overlap,
    )  # fmt: skip
    block_table = inner_contiguous(block_table)
    launch(
        (B + cdiv(T, ratio),),
        cache.view(torch.uint8) if format == "fp8" else cache,
        kv_scale,
        state,
        kv,
        score,
        bias,
        norm_weight,
        table,
        positions,
        query_start_loc.contiguous(),
        block_table,
        state_slots.contiguous(),
        kv_scale if clamped is None else clamped,
        eps,
        cache.stride(0),
        cache.stride(1),
        state.stride(0),
        state.stride(1),
        kv.stride(0),
        score.stride(0),
        bias.stride(0),
        table.stride(0),
        positions.stride(0),
        block_table.stride(0),
        B,
        cache.shape[0],
        state.shape[0],
        block_table.shape[1],
    )


def fix(
    format: str, D: int, R: int, BS: int, V: int, ratio: int, overlap: bool, hadamard: bool, *,
    aligned: bool, counted: bool, alone: bool,
) -> Fixed:  # fmt: skip
    stored = row_constants(layout_of(format, D, cut=D), D, BS, aligned=aligned)
    del stored["C"]
    block_d = next_power_of_2(D)
    window = next_power_of_2(2 * ratio if overlap else ratio)
    constants = {
        **stored,
        "BLOCK_G": max(stored["BLOCK_G"], block_d // stored["BLOCK_C"]),
        "D": D,
        "V": V,
        "R": R,
        "RATIO": ratio,
        "OVERLAP": overlap,
        "HADAMARD": hadamard,
        "ALONE": alone,
        "LOG2": D.bit_length() - 1,
        "COUNTED": counted,
        "UPCAST": interpreted(),
        "BLOCK_J": max(min(window, TOKENS, ELEMENTS // block_d), 1),
        "BLOCK_D": block_d,
    }
    # Four channels per thread, 16 bytes of float32: no thread needs another's.
    return Fixed(constants, num_warps=min(max(block_d // 128, 1), 8))


def cases(_: int) -> Iterator[Case]:
    """V4's three compressors, entries in the model's formats and in bf16."""
    for format, D, ratio, kind in (
        ("fp8_dsv4", 512, 4, ""), ("fp8_dsv4", 512, 128, ""), ("bf16", 512, 4, ""),
        ("bf16", 512, 128, ""), ("fp8_dsv4", 512, 128, "-alone"), ("index_fp8", 128, 4, ""),
        ("index_bf16", 128, 4, ""), ("index_fp8", 128, 4, "-hadamard"),
    ):  # fmt: skip
        overlap = ratio == 4
        yield case(
            f"compress-{format}-D{D}-ratio{ratio}{kind}", format, D, 64, 64 if overlap else 2,
            state_rows(ratio, overlap=overlap), ratio, overlap, kind == "-hadamard", aligned=True,
            counted=get_format(format).scaled, alone=kind == "-alone",
            types={"cache": stored_type(format)},
        )  # fmt: skip


SPEC = KernelSpec(
    _compress_kv_kernel,
    fix,
    types={
        "*fp32": "kv score kv_scale state bias norm_weight table",
        "*i64": "positions clamped",
        "*i32": "query_start_loc block_table state_slots",
        "fp32": "eps",
    },
    cases=cases,
    fp_fusion=False,  # an entry's bytes must not depend on how the compiler contracts
)
SPECS = (SPEC,)
