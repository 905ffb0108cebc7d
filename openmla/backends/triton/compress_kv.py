"""compress_kv, Triton: one launch pools tokens into entries and keeps what later ones need.

Computes  entries: tokens pooled by a softmax per channel, normalised, rotated, encoded; then the
          state rows of the step's last V tokens (specification: ops/compress_kv.py)
Grid      (B + cdiv(T, ratio),): the first B programs own a request's state, and the one or two
          entries that begin before the step; each of the others owns an entry whose tokens are all
          of this step, found by the one row of them that is a multiple of ratio
Reads     state [NS, V, SW], kv and score [T, CD], bias [ratio, CD], norm_weight [D], table [Q, R],
          positions [T], query_start_loc [B+1], block_table [B, M], state_slots [B], kv_scale []
Writes    cache [N, BS, W], state
Limits    see why_not()

No two programs touch the same state, and the one that does reads all it needs before it writes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from openmla.backends import Problem
from openmla.backends.triton import cache_write
from openmla.backends.triton._build import (
    DO_NOT_SPECIALIZE_ON_ALIGNMENT,
    TARGETS,
    TYPES,
    Build,
    cdiv,
    interpreted,
    next_power_of_2,
)
from openmla.backends.triton._latent import FP8, PLAIN, request_of
from openmla.backends.triton._launch import inner_contiguous
from openmla.backends.triton.cache_write import INPUTS, round_to, store_values, widen
from openmla.backends.triton.index_write import _hadamard
from openmla.cache.format import get_format, state_rows

LAUNCHES = 1
FP_FUSION = False  # an entry's bytes do not depend on what else was compiled
ELEMENTS = 4096  # of a tile of tokens
TOKENS = 8  # of a tile, at most
LOWEST = tl.constexpr(-1.0e38)  # below every score; -inf less itself would be NaN


@triton.jit
def _exp(x):
    """exp of numbers up to 0, rounded almost as if once: the hardware's is off by two units, and
    what a state adds up token by token may not cost precision."""
    shifted = x * 1.4426950408889634 + 12582912.0  # rounds to a whole number, the last bits
    n = shifted - 12582912.0
    f = (x - n * 0.693359375) + n * 2.12194440e-4  # ln 2 in two parts, the first one's exact
    p = 1.9875691500e-4
    p = p * f + 1.3981999507e-3
    p = p * f + 8.3334519073e-3
    p = p * f + 4.1665795894e-2
    p = p * f + 1.6666665459e-1
    p = p * f + 5.0000001201e-1
    power = (shifted.to(tl.uint32, bitcast=True) << 23) + 0x3F800000
    scaled = ((p * f * f + f) + 1.0) * power.to(tl.float32, bitcast=True)
    return tl.where(x < -87.0, 0.0, scaled)


@triton.jit
def _add(total, rest, more):
    """A sum, and what its roundings have cost so far."""
    summed = total + more
    taken = summed - total
    return summed, rest + ((total - (summed - taken)) + (more - taken))


@triton.jit
def _fold(largest, total, total_rest, weighted, weighted_rest, values, z, live):
    """Rows [n, BLOCK_D], as far as they are live, added to a softmax under way."""
    top = tl.maximum(largest, tl.max(tl.where(live, z, LOWEST), 0))
    shrink = _exp(largest - top)
    weights = tl.where(live, _exp(z - top[None, :]), 0.0)
    total, total_rest = _add(total * shrink, total_rest * shrink, tl.sum(weights, 0))
    weighted, weighted_rest = _add(
        weighted * shrink, weighted_rest * shrink, tl.sum(weights * values, 0)
    )
    return top, total, total_rest, weighted, weighted_rest


@triton.jit
def _load_fold(at, there, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """A softmax under way as the state has it, or one that has seen nothing."""
    d = tl.arange(0, BLOCK_D)
    mask = d < tl.where(there, D, 0)  # 3.9's interpreter takes no mask made of a scalar condition
    largest = tl.load(at + d, mask=mask, other=LOWEST)
    total = tl.load(at + D + d, mask=mask, other=0.0)
    weighted = tl.load(at + 2 * D + d, mask=mask, other=0.0)
    nothing = tl.zeros([BLOCK_D], tl.float32)
    return largest, total, nothing, weighted, nothing


@triton.jit
def _load_tokens(
    kv, score, bias, p, columns, live, kv_stride, score_stride, bias_stride, RATIO: tl.constexpr
):  # fmt: skip
    """Columns of this step's tokens at positions p [n], values and biased scores."""
    values = widen(tl.load(kv + (p * kv_stride)[:, None] + columns, mask=live, other=0.0))
    z = widen(tl.load(score + (p * score_stride)[:, None] + columns, mask=live, other=0.0))
    row = bias + (p % RATIO * bias_stride)[:, None]
    return values, z + widen(tl.load(row + columns, mask=live, other=0.0))


@triton.jit
def _fold_tokens(
    largest, total, total_rest, weighted, weighted_rest, kv, score, bias, first, count, kv_stride,
    score_stride, bias_stride, D: tl.constexpr, RATIO: tl.constexpr, BLOCK_J: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """`count` of this step's tokens, from position `first` on, added."""
    d = tl.arange(0, BLOCK_D)[None, :]
    for low in range(0, count, BLOCK_J):
        j = low + tl.arange(0, BLOCK_J)
        live = (j < count)[:, None] & (d < D)
        values, z = _load_tokens(
            kv, score, bias, first + j, d, live, kv_stride, score_stride, bias_stride, RATIO
        )
        largest, total, total_rest, weighted, weighted_rest = _fold(
            largest, total, total_rest, weighted, weighted_rest, values, z, (j < count)[:, None]
        )
    return largest, total, total_rest, weighted, weighted_rest


@triton.jit
def _pool_overlapping(
    kv, score, bias, state, window, start, kv_stride, score_stride, bias_stride, state_row,
    D: tl.constexpr, V: tl.constexpr, RATIO: tl.constexpr, BLOCK_J: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The tokens of a window and of the one before it; those of earlier steps are in the state."""
    d = tl.arange(0, BLOCK_D)[None, :]
    largest = tl.full([BLOCK_D], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_D], tl.float32)
    total_rest, weighted, weighted_rest = total, total, total
    for low in range(0, 2 * RATIO, BLOCK_J):
        j = low + tl.arange(0, BLOCK_J)
        p = (window - 1) * RATIO + j
        there = ((j < 2 * RATIO) & (p >= 0))[:, None]
        columns = (j // RATIO * D)[:, None] + d
        live = there & (d < D)
        new = (p >= start)[:, None]
        kept = state + (p % V * state_row)[:, None]
        if kv.dtype == state.dtype:  # one load from wherever a token is
            at = tl.where(new, kv + (p * kv_stride)[:, None], kept)
            values = tl.load(at + columns, mask=live, other=0.0)
            at = tl.where(new, score + (p * score_stride)[:, None], kept + 2 * D)
            z = tl.load(at + columns, mask=live, other=0.0)
            at = bias + (p % RATIO * bias_stride)[:, None]
            biases = widen(tl.load(at + columns, mask=live & new, other=0.0))
            z = tl.where(new, z + biases, z)
        else:
            values, z = _load_tokens(
                kv, score, bias, p, columns, live & new, kv_stride, score_stride, bias_stride, RATIO
            )
            values = tl.where(new, values, tl.load(kept + columns, mask=live & ~new, other=0.0))
            z = tl.where(new, z, tl.load(kept + 2 * D + columns, mask=live & ~new, other=0.0))
        largest, total, total_rest, weighted, weighted_rest = _fold(
            largest, total, total_rest, weighted, weighted_rest, values, z, there
        )
    return tl.div_rn(weighted + weighted_rest, total + total_rest)


@triton.jit
def _store_entry(
    cache, kv_scale, norm_weight, table, blocks, v, entry, eps, page, row_stride, table_stride,
    N, M, D: tl.constexpr, R: tl.constexpr, RATIO: tl.constexpr, HADAMARD: tl.constexpr,
    LOG2: tl.constexpr, BLOCK_D: tl.constexpr,
    BS: tl.constexpr, KIND: tl.constexpr, MAIN: tl.constexpr, ROPE: tl.constexpr,
    GROUP: tl.constexpr, SCALES: tl.constexpr, EXACT: tl.constexpr, ALIGNED: tl.constexpr,
    ASM: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """v [BLOCK_D] normalised, rotated, encoded and put where the request's blocks say."""
    d = tl.arange(0, BLOCK_D)
    column = entry // BS
    block = tl.load(blocks + column, mask=column < M, other=-1).to(tl.int64)
    weight = widen(tl.load(norm_weight + d, mask=d < D, other=0.0))
    if R > 0:  # asked for before anything is waited for
        r = d - (D - R)
        turned = (r >= 0) & (r < R)
        angles = table + entry * RATIO * table_stride + r // 2
        cos = tl.load(angles, mask=turned, other=0.0)
        sin = tl.load(angles + R // 2, mask=turned, other=0.0)
    square = tl.div_rn(tl.sum(v * v, 0), D * 1.0)
    v = v * tl.div_rn(1.0, tl.sqrt_rn(square + eps)) * weight
    if R > 0:
        second = r % 2 == 1
        partner = tl.where(turned, tl.where(second, d - 1, d + 1), d)
        other = tl.gather(v, partner, 0)
        # in the table's precision where that is more
        along = v.to(cos.dtype) * cos
        across = other.to(cos.dtype) * sin
        v = tl.where(turned, tl.where(second, along + across, along - across), v).to(tl.float32)
    if HADAMARD:
        v = _hadamard(v, LOG2)
    if (block >= 0) & (block < N):
        rope = tl.gather(v, tl.minimum(MAIN + tl.arange(0, BLOCK_R), BLOCK_D - 1), 0)
        if BLOCK_G * BLOCK_C > BLOCK_D:
            row = tl.gather(v, tl.minimum(tl.arange(0, BLOCK_G * BLOCK_C), BLOCK_D - 1), 0)
            values = tl.reshape(row, [BLOCK_G, BLOCK_C])
        else:
            values = tl.reshape(v, [BLOCK_G, BLOCK_C])
        if KIND != PLAIN and KIND != FP8:  # packed formats take bf16
            values = round_to(values, tl.bfloat16, ASM)
        store_values(
            cache, values, rope, block * BS + entry % BS, kv_scale, page, row_stride, BS, KIND,
            MAIN, ROPE, GROUP, SCALES, EXACT, ALIGNED, ASM, BLOCK_G, BLOCK_C, BLOCK_R,
        )  # fmt: skip


@triton.jit
def _keep_tokens(
    state, kv, score, bias, first, end, kv_stride, score_stride, bias_stride, state_row,
    D: tl.constexpr, V: tl.constexpr, RATIO: tl.constexpr, BLOCK_J: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """State rows of the tokens first .. end-1 themselves."""
    d = tl.arange(0, BLOCK_D)[None, :]
    tl.debug_barrier()  # entries have been made of what is overwritten now
    for low in range(0, (end - first).to(tl.int32), BLOCK_J):
        p = first + low + tl.arange(0, BLOCK_J)
        live = (p < end)[:, None] & (d < D)
        at = state + (p % V * state_row)[:, None]
        for half in tl.static_range(2):
            columns = half * D + d
            values, z = _load_tokens(
                kv, score, bias, p, columns, live, kv_stride, score_stride, bias_stride, RATIO
            )
            tl.store(at + columns, values, mask=live)
            tl.store(at + 2 * D + columns, z, mask=live)


@triton.jit
def _keep_folds(
    state, kv, score, bias, start, first, end, kv_stride, score_stride, bias_stride, state_row,
    D: tl.constexpr, V: tl.constexpr, RATIO: tl.constexpr, BLOCK_J: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """State rows of the tokens first .. end-1: their windows up to each of them."""
    window = first // RATIO * RATIO
    begin = tl.maximum(window, start)
    before = state + (start + V - 1) % V * state_row
    fold = _load_fold(before, window < start, D, BLOCK_D)
    largest, total, total_rest, weighted, weighted_rest = _fold_tokens(
        fold[0], fold[1], fold[2], fold[3], fold[4], kv, score, bias, begin,
        (first - begin).to(tl.int32), kv_stride, score_stride, bias_stride, D, RATIO, BLOCK_J,
        BLOCK_D,
    )  # fmt: skip
    tl.debug_barrier()  # what is overwritten now has been read
    d = tl.arange(0, BLOCK_D)
    for k in range(0, (end - first).to(tl.int32)):
        p = first + k
        fresh = p % RATIO == 0
        largest, total, total_rest, weighted, weighted_rest = _fold_tokens(
            tl.where(fresh, LOWEST, largest), tl.where(fresh, 0.0, total),
            tl.where(fresh, 0.0, total_rest), tl.where(fresh, 0.0, weighted),
            tl.where(fresh, 0.0, weighted_rest), kv, score, bias, p, 1, kv_stride, score_stride,
            bias_stride, D, RATIO, 1, BLOCK_D,
        )  # fmt: skip
        at = state + p % V * state_row
        tl.store(at + d, largest, mask=d < D)
        tl.store(at + D + d, total + total_rest, mask=d < D)
        tl.store(at + 2 * D + d, weighted + weighted_rest, mask=d < D)


@triton.jit(
    do_not_specialize=["B", "N", "NS", "M", "block_stride"],
    do_not_specialize_on_alignment=DO_NOT_SPECIALIZE_ON_ALIGNMENT,
)
def _compress_kv_kernel(
    cache, kv_scale, state, kv, score, bias, norm_weight, table, positions, query_start_loc,
    block_table, state_slots, eps, page, row_stride, state_slot, state_row, kv_stride,
    score_stride, bias_stride, table_stride, position_stride, block_stride, B, N, NS, M,
    D: tl.constexpr, V: tl.constexpr, R: tl.constexpr, RATIO: tl.constexpr, OVERLAP: tl.constexpr,
    HADAMARD: tl.constexpr, LOG2: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_D: tl.constexpr,
    BS: tl.constexpr, KIND: tl.constexpr, MAIN: tl.constexpr, ROPE: tl.constexpr,
    GROUP: tl.constexpr, SCALES: tl.constexpr, EXACT: tl.constexpr, ALIGNED: tl.constexpr,
    ASM: tl.constexpr, UPCAST: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    if not UPCAST:  # inside a compiled graph it may arrive as fp64; interpreted, as a Python number
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
        start = tl.load(positions + first_row.to(tl.int64) * position_stride)
        end = start + (end_row - first_row)
        # rows by position from here on
        shift = first_row - start
        kv += shift * kv_stride
        score += shift * score_stride
        state += slot.to(tl.int64) * state_slot
        blocks = block_table + b.to(tl.int64) * block_stride
        # the first entry that needs nothing of the state
        free = (start + RATIO - 1) // RATIO
        if OVERLAP:
            free = tl.where(start > 0, free + 1, free)
        window = start // RATIO
        last = tl.minimum(free, end // RATIO)
        if program >= B:
            window = (t - shift) // RATIO
            last = tl.where(window >= free, tl.minimum(window + 1, end // RATIO), window)
        for i in range(0, (last - window).to(tl.int32)):
            entry = window + i
            if OVERLAP:
                v = _pool_overlapping(
                    kv, score, bias, state, entry, start, kv_stride, score_stride, bias_stride,
                    state_row, D, V, RATIO, BLOCK_J, BLOCK_D,
                )  # fmt: skip
            else:
                begin = tl.maximum(entry * RATIO, start)
                count = (entry + 1) * RATIO - begin
                before = state + (start + V - 1) % V * state_row
                fold = _load_fold(before, entry * RATIO < start, D, BLOCK_D)
                _, total, total_rest, weighted, weighted_rest = _fold_tokens(
                    fold[0], fold[1], fold[2], fold[3], fold[4], kv, score, bias, begin,
                    count.to(tl.int32), kv_stride, score_stride, bias_stride, D, RATIO, BLOCK_J,
                    BLOCK_D,
                )  # fmt: skip
                v = tl.div_rn(weighted + weighted_rest, total + total_rest)
            _store_entry(
                cache, kv_scale, norm_weight, table, blocks, v, entry, eps, page, row_stride,
                table_stride, N, M, D, R, RATIO, HADAMARD, LOG2, BLOCK_D, BS, KIND, MAIN, ROPE,
                GROUP, SCALES, EXACT, ALIGNED, ASM, BLOCK_G, BLOCK_C, BLOCK_R,
            )  # fmt: skip
        if program < B:
            first = tl.maximum(end - V, start)
            if OVERLAP:
                _keep_tokens(
                    state, kv, score, bias, first, end, kv_stride, score_stride, bias_stride,
                    state_row, D, V, RATIO, BLOCK_J, BLOCK_D,
                )  # fmt: skip
            else:
                _keep_folds(
                    state, kv, score, bias, start, first, end, kv_stride, score_stride,
                    bias_stride, state_row, D, V, RATIO, BLOCK_J, BLOCK_D,
                )  # fmt: skip


def why_not(problem: Problem) -> str | None:
    if problem.dtype not in INPUTS:
        return f"takes 16- and 32-bit tokens, these are {problem.dtype}"
    if problem.D > ELEMENTS:
        return f"holds entries of up to {ELEMENTS} values, these are {problem.D}"
    return None


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
    *,
    format: str,
    ratio: int,
    overlap: bool,
    eps: float,
    hadamard: bool,
) -> None:
    T, B, D = kv.shape[0], state_slots.shape[0], norm_weight.shape[0]
    if T * B * D == 0:
        return
    aligned = cache_write.is_aligned(cache, cache_write.layout_of(format, D, cut=D))
    constants = constants_of(
        format, D, table.shape[1], cache.shape[1], state.shape[1], ratio, overlap, hadamard,
        aligned=aligned,
    )  # fmt: skip
    block_table = inner_contiguous(block_table)
    _compress_kv_kernel[(B + cdiv(T, ratio),)](
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
        **constants,
        num_warps=num_warps_of(constants),
        num_stages=1,
        enable_fp_fusion=FP_FUSION,
    )


def constants_of(
    format: str, D: int, R: int, BS: int, V: int, ratio: int, overlap: bool, hadamard: bool, *,
    aligned: bool,
) -> dict[str, Any]:  # fmt: skip
    stored = cache_write.constants_of(
        cache_write.layout_of(format, D, cut=D), D, BS, aligned=aligned
    )
    del stored["C"]
    block_d = next_power_of_2(D)
    pooled = next_power_of_2(2 * ratio if overlap else ratio)
    return {
        **stored,
        "BLOCK_G": max(stored["BLOCK_G"], block_d // stored["BLOCK_C"]),
        "D": D,
        "V": V,
        "R": R,
        "RATIO": ratio,
        "OVERLAP": overlap,
        "HADAMARD": hadamard,
        "LOG2": D.bit_length() - 1,
        "UPCAST": interpreted(),
        "BLOCK_J": max(min(pooled, TOKENS, ELEMENTS // block_d), 1),
        "BLOCK_D": block_d,
    }


def num_warps_of(constants: dict[str, Any]) -> int:
    """Four channels per thread, 16 bytes of float32: its tokens are its own."""
    return min(max(constants["BLOCK_D"] // 128, 1), 8)


def builds() -> Iterator[Build]:
    """V4's three compressors as the model stores their entries, and in bf16."""
    for capability in TARGETS:
        for format in ("fp8_dsv4", "bf16"):
            yield compress_build(capability, format, 512, ratio=4, overlap=True)
            yield compress_build(capability, format, 512, ratio=128, overlap=False)
        for format in ("index_fp8", "index_bf16"):
            yield compress_build(capability, format, 128, ratio=4, overlap=True)
        yield compress_build(capability, "index_fp8", 128, ratio=4, overlap=True, hadamard=True)


def compress_build(
    capability: int, format: str, D: int, *, ratio: int, overlap: bool, hadamard: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Build:  # fmt: skip
    V = state_rows(ratio, overlap=overlap)
    BS = 64 if overlap else 2
    constants = constants_of(format, D, 64, BS, V, ratio, overlap, hadamard, aligned=True)
    types = {
        "cache": TYPES.get(get_format(format).dtype, "u8"),
        **dict.fromkeys(("kv", "score"), TYPES[dtype]),
        **dict.fromkeys(("kv_scale", "state", "bias", "norm_weight", "table"), "fp32"),
        "positions": "i64",
        **dict.fromkeys(("query_start_loc", "block_table", "state_slots"), "i32"),
    }
    signature = {
        name: "constexpr"
        if name in constants
        else "*" + types[name]
        if name in types
        else "fp32"
        if name == "eps"
        else "i32"
        for name in _compress_kv_kernel.arg_names
    }
    name = f"compress-{format}-D{D}-ratio{ratio}{'-hadamard' * hadamard}"
    return Build(
        name, _compress_kv_kernel, signature, constants, num_warps_of(constants), 1, capability,
        FP_FUSION,
    )  # fmt: skip
