"""index_topk, Triton: the K highest scores of each row, without sorting.

Computes  the K highest of logits[t, row_starts[t]:][:row_lens[t]], of equals the leftmost, NaN as
          -inf (specification: ops/index_topk.py; numbers: backends/reference/index_topk.py)
Grid      (min(T, 4 * multiprocessors),): one program owns a row at a time, the last ones first: they
          are the longest of a prompt.
Reads     logits [T, S], row_starts [T], row_lens [T]
Writes    topk_positions [T, K], rising whether asked to or not, topk_lens [T],
          candidates [programs, 2, BLOCK], positions and scores, scratch
Limits    see why_not()

A sample of a row gives a score that about `target` others reach, more than K and fewer than BLOCK.
One pass keeps the positions of those that do, in order. Of them, which fit in registers, the K-th
is found by halving the range of its bits and counting. Where the sample misled, another score is
tried; where equals are too many to keep, the K-th score is known by then and the row is read again.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import isqrt
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from openmla.backends import Problem
from openmla.backends.triton._build import TARGETS, TYPES, Build, interpreted
from openmla.backends.triton.cache_write import widen
from openmla.hardware import multiprocessors

INPUTS = (torch.float32, torch.bfloat16, torch.float16)
BLOCK = 8192  # scores of a tile, and the most candidates; counts of a tile must fit 16 bits
SAMPLE = 4096
NUM_WARPS = 16
POINTERS = ("row_starts", "row_lens", "topk_positions", "topk_lens", "candidates")

LANES = tl.constexpr(128)  # columns of a tile: one warp's, so that only rows cross warps
RUN = tl.constexpr(8)  # neighbours sampled together, one sector of memory
LOWEST = tl.constexpr(-2139095041)  # ordered_key(-inf)
HIGHEST = tl.constexpr(2139095040)  # ordered_key(+inf)
NOTHING = tl.constexpr(-2147483648)  # below every key
NAN_BITS = tl.constexpr(0x7FC00000)
GUESSES = tl.constexpr(4)  # scores taken from the sample; then the range is halved


@triton.jit
def as_scores(values, mask):
    """float32, NaN as -inf; outside the mask NaN, which is neither above nor equal to any."""
    scores = widen(values)
    scores = tl.where(scores == scores, scores, float("-inf"))
    return tl.where(mask, scores, float("nan"))


@triton.jit
def load_scores(row, offs, mask):
    return as_scores(tl.load(row + offs, mask=mask, other=0.0), mask)


@triton.jit
def ordered_key(scores):
    """int32 that rise with the scores, the zeros alike; NaN below all."""
    bits = tl.where(scores == 0.0, 0.0, scores).to(tl.int32, bitcast=True)
    return tl.where(scores == scores, bits ^ ((bits >> 31) & 0x7FFFFFFF), NOTHING)


@triton.jit
def score_of(key):
    """The score of an ordered key; -1, which no score has, is a zero too."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def middle(lo, hi):
    """Half way, rounded down; the sum may not fit."""
    return (lo & hi) + ((lo ^ hi) >> 1)


@triton.jit
def cut_key(keys, lo, wanted, slack):
    """A key that `wanted` keys reach, or up to `slack` more; with more equals, the key itself.
    At least `wanted` keys reach lo."""
    lo = tl.cast(lo, tl.int32)
    hi = tl.max(keys) + 1
    reached = 2147483647
    while (hi > lo + 1) & (reached > wanted + slack):
        key = middle(lo, hi)
        count = tl.sum((keys >= key).to(tl.int32))
        if count >= wanted:
            lo = key
            reached = count
        else:
            hi = key
    return lo


@triton.jit
def prefix_sums(counts):
    """The sum of what stands before each element of a tile, row by row, and of all."""
    i = tl.arange(0, counts.shape[0])
    sums = tl.sum(counts, 1)
    earlier = tl.sum(tl.where(i[None, :] < i[:, None], sums[None, :], 0), 1)
    return earlier[:, None] + tl.cumsum(counts, 1) - counts, tl.sum(sums, 0)


@triton.jit
def store_chosen(out, at, positions, scores, chosen, KEEP: tl.constexpr, ASM: tl.constexpr):
    """Scattered stores in the layout of the scan: tl.store would move the tile to another first."""
    if not ASM:
        tl.store(out + at, positions, mask=chosen)
        if KEEP > 0:
            tl.store(out + (at + KEEP), scores.to(tl.int32, bitcast=True), mask=chosen)
    elif KEEP > 0:
        tl.static_assert(KEEP == 8192)
        tl.inline_asm_elementwise(
            """{
            .reg .pred chosen;
            setp.ne.s32 chosen, $4, 0;
            @chosen st.global.b32 [$1], $2;
            @chosen st.global.b32 [$1+32768], $3;
            mov.b32 $0, 0;
            }""",
            "=r,l,r,f,r",
            [(out + at).to(tl.int64), positions, scores, chosen.to(tl.int32)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        tl.inline_asm_elementwise(
            """{
            .reg .pred chosen;
            setp.ne.s32 chosen, $3, 0;
            @chosen st.global.b32 [$1], $2;
            mov.b32 $0, 0;
            }""",
            "=r,l,r,r",
            [(out + at).to(tl.int64), positions, chosen.to(tl.int32)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def emit(
    out, size, positions, scores, cut, room, above, equal, KEEP: tl.constexpr, ASM: tl.constexpr
):  # fmt: skip
    """Put down the positions of scores above `cut` and of the first `room` equals, in order, behind
    the `above` and `equal` ones of earlier tiles; returns how many there are now."""
    counts = tl.where(scores > cut, 1, tl.where(scores == cut, 65536, 0))
    before, total = prefix_sums(counts)
    earlier_equal = equal + (before >> 16)
    at = above + (before & 65535) + tl.minimum(earlier_equal, room)
    chosen = (scores > cut) | ((scores == cut) & (earlier_equal < room))
    store_chosen(out, at, positions, scores, chosen & (at < size), KEEP, ASM)
    return above + (total & 65535), equal + (total >> 16)


@triton.jit
def emit_row(
    out, size, row, skew, n, cut, room, KEEP: tl.constexpr, ASM: tl.constexpr,
    ALIGN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The same over a whole row, which begins `skew` elements behind an aligned address."""
    offs = tl.arange(0, BLOCK // LANES)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    end = tl.cdiv(skew + n, ALIGN) * ALIGN
    above = 0
    equal = 0
    coming = tl.load(row + offs, mask=offs < end, other=0.0)
    for first in range(0, end, BLOCK):
        positions = first + offs - skew
        scores = as_scores(coming, (positions >= 0) & (positions < n))
        later = first + BLOCK + offs  # on its way while this tile is counted
        coming = tl.load(row + later, mask=later < end, other=0.0)
        above, equal = emit(out, size, positions, scores, cut, room, above, equal, KEEP, ASM)
    return above, equal


@triton.jit
def first_positions(out, n, K, BLOCK: tl.constexpr):
    """A row that is chosen whole."""
    for first in range(0, K, BLOCK):
        positions = first + tl.arange(0, BLOCK)
        tl.store(out + positions, tl.where(positions < n, positions, -1), mask=positions < K)


@triton.jit
def choose(
    out, logits, start, n, kept, K, target,
    ASM: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr, SAMPLE: tl.constexpr,
):  # fmt: skip
    """The K highest of a row of more than K."""
    row = logits + start
    tile = start // ALIGN * ALIGN
    skew = (start - tile).to(tl.int32)
    size = tl.where(2 * K <= BLOCK, BLOCK, 0)  # of what may be kept
    pivot = tl.cast(LOWEST, tl.int32)
    lo = pivot - 1  # more than `size` reach it, and K are above
    hi = tl.cast(HIGHEST + 1, tl.int32)  # fewer than K reach it
    above = 0
    count = n  # a row of one tile is its own candidates
    guesses = 0
    rank = tl.maximum(SAMPLE * target.to(tl.int64) // n, 1)
    searching = n > size
    while searching:
        if (guesses < GUESSES) & (n > BLOCK):
            j = tl.arange(0, SAMPLE)
            j = (j // RUN) * (n // (SAMPLE // RUN)) + j % RUN
            keys = ordered_key(load_scores(row, j, j < n))
            wanted = tl.minimum(rank, SAMPLE).to(tl.int32)
            pivot = cut_key(keys, LOWEST, wanted, wanted // 8)
            pivot = tl.minimum(tl.maximum(pivot, lo + 1), hi - 1)
        else:
            pivot = middle(lo, hi)
        guesses += 1
        above, equal = emit_row(
            kept, size, logits + tile, skew, n, score_of(pivot), n, BLOCK, ASM, ALIGN, BLOCK
        )
        count = above + equal
        searching = (count < K) | ((above >= K) & (count > size))
        if count < K:
            hi = pivot
        else:
            lo = pivot
        rank = tl.maximum(rank * target // tl.maximum(count, 1), 1)
    if count <= size:
        offs = tl.arange(0, BLOCK // LANES)[:, None] * LANES + tl.arange(0, LANES)[None, :]
        mask = offs < count
        if n <= size:
            positions = offs
            scores = load_scores(row, offs, mask)
        else:
            tl.debug_barrier()  # what other threads kept is read
            positions = tl.load(kept + offs, mask=mask, other=0)
            scores = tl.load(kept + BLOCK + offs, mask=mask, other=NAN_BITS)
            scores = scores.to(tl.float32, bitcast=True)
        cut = score_of(cut_key(ordered_key(scores), pivot, K, 0))
        room = K - tl.sum((scores > cut).to(tl.int32))
        emit(out, K, positions, scores, cut, room, 0, 0, 0, ASM)
    else:
        emit_row(out, K, logits + tile, skew, n, score_of(pivot), K - above, 0, ASM, ALIGN, BLOCK)


@triton.jit(do_not_specialize=["T", "K", "target"])
def _index_topk_kernel(
    logits, row_starts, row_lens, topk_positions, topk_lens, candidates, row_stride, T, K, target,
    ASM: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr, SAMPLE: tl.constexpr,
):  # fmt: skip
    kept = candidates + tl.program_id(0).to(tl.int64) * (2 * BLOCK)
    for i in range(tl.program_id(0), T, tl.num_programs(0)):
        t = T - 1 - i
        n = tl.load(row_lens + t)
        tl.store(topk_lens + t, tl.minimum(n, K))
        t = t.to(tl.int64)
        out = topk_positions + t * K
        if n <= K:
            first_positions(out, n, K, BLOCK)
        else:
            start = t * row_stride + tl.load(row_starts + t)
            choose(out, logits, start, n, kept, K, target, ASM, ALIGN, BLOCK, SAMPLE)


def why_not(problem: Problem) -> str | None:
    if problem.dtype not in INPUTS:
        return f"takes 16- and 32-bit scores, this is {problem.dtype}"
    return None


def run(
    logits: Tensor, row_starts: Tensor, row_lens: Tensor, *, K: int, sorted: bool
) -> tuple[Tensor, Tensor]:
    T, S = logits.shape
    positions = logits.new_empty((T, K), dtype=torch.int32)
    lens = torch.empty_like(row_lens)
    if T == 0:
        return positions, lens
    fits = 2 * K <= BLOCK
    programs = min(T, 4 * multiprocessors(logits.device))
    candidates = row_lens.new_empty((programs if fits and S > BLOCK else 0, 2, BLOCK))
    _index_topk_kernel[(programs,)](
        logits,
        row_starts.contiguous(),
        row_lens.contiguous(),
        positions,
        lens,
        candidates,
        logits.stride(0),
        T,
        K,
        isqrt(K * BLOCK) if fits else K,
        **constants_of(aligned=logits.data_ptr() % 16 == 0),
        num_warps=NUM_WARPS,
        num_stages=1,
        enable_fp_fusion=True,
    )
    return positions, lens


def constants_of(*, aligned: bool) -> dict[str, Any]:
    """Tiles of an aligned tensor begin at multiples of four, wherever a row does."""
    return {
        "ASM": not interpreted(),
        "ALIGN": 4 if aligned else 1,
        "BLOCK": BLOCK,
        "SAMPLE": SAMPLE,
    }


def builds() -> Iterator[Build]:
    """One per target: nothing is compiled for K or S."""
    for capability in TARGETS:
        yield topk_build(capability)


def topk_build(capability: int, dtype: torch.dtype = torch.float32) -> Build:
    constants = constants_of(aligned=True)
    signature = {
        name: "constexpr" if name in constants else "*i32" if name in POINTERS else "i32"
        for name in _index_topk_kernel.arg_names
    }
    signature["logits"] = "*" + TYPES[dtype]
    return Build(
        f"topk-{TYPES[dtype]}", _index_topk_kernel, signature, constants, NUM_WARPS, 1, capability
    )
