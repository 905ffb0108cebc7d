"""index_topk, Triton: the K highest scores of each row, without sorting.

Computes  the K highest of logits[t, row_starts[t]:][:row_lens[t]], of equals the leftmost, NaN as
          -inf (specification: ops/index_topk.py; numbers: backends/reference/index_topk.py)
Grid      (min(T, 4 * multiprocessors),): one program owns a row at a time, the last first: they
          are the longest ones of a prompt.
Reads     logits [T, S], row_starts [T], row_lens [T]
Writes    topk_positions [T, K], rising whether asked to or not, topk_lens [T],
          candidates [programs, BLOCK], positions and scores, scratch
Limits    see why_not()

A sample of a row gives a score that about `target` others reach, more than K and fewer than BLOCK.
One pass keeps the positions of those that do, in order. Of them, which fit in registers, the K-th
is found by halving the range of its bits and counting. Where the sample misled, another score is
tried; where equals are too many to keep, the K-th score is known by then and the row is read again.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import isqrt
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from openmla.backends import Problem
from openmla.backends.triton._build import (
    GFX942,
    PLANNED,
    TARGETS,
    TYPES,
    Build,
    assembly,
    capability_of,
    nearest_target,
)
from openmla.backends.triton.cache_write import widen
from openmla.hardware import multiprocessors

INPUTS = (torch.float32, torch.bfloat16, torch.float16)
BLOCK = 8192  # the most candidates
SAMPLE = 2048
POINTERS = ("row_starts", "row_lens", "topk_positions", "topk_lens")

LAUNCHES = 1


class Config(NamedTuple):
    tile: int  # scores looked at together
    num_warps: int
    maxnreg: int | None


FEW = Config(8192, 16, None)  # not yet measured, as all numbers here
MANY = Config(4096, 16, 64)
AMD = Config(4096, 8, None)


def config_of(T: int, multiprocessors: int, capability: int) -> Config:
    """With few rows the widest tile, which SM80 has no registers for; with many, two programs per
    multiprocessor, so that one reads while the other searches."""
    if capability == GFX942:
        return AMD
    return FEW if multiprocessors >= T and nearest_target(capability) > 80 else MANY


LANES = tl.constexpr(128)  # columns of a tile: one warp's, so that only rows cross warps
RUN = tl.constexpr(4)  # neighbours sampled together
LOWEST = tl.constexpr(-2139095041)  # ordered_key(-inf)
HIGHEST = tl.constexpr(2139095040)  # ordered_key(+inf)
NOTHING = tl.constexpr(-2147483648)  # below every key
NAN_BITS = tl.constexpr(0x7FC00000)
GUESSES = tl.constexpr(4)  # scores taken from the sample; then the range is halved


@triton.jit
def tile_offsets(n, BLOCK: tl.constexpr):
    """Row by row. n is not negative, which the compiler does not know: it would hold the offsets of
    every tile in registers from row to row."""
    rows = tl.arange(0, BLOCK // LANES) + tl.minimum(n, 0)
    return rows[:, None] * LANES + tl.arange(0, LANES)[None, :]


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
    """A key that `wanted` keys reach or up to `slack` more; where there is none, the wanted-th key
    itself. And how many are above: those that reach it are taken before its equals are. At least
    `wanted` keys reach lo."""
    lo = tl.cast(lo, tl.int32)
    hi = tl.max(keys) + 1
    reached = 2147483647
    above = 0
    while (hi > lo + 1) & (reached > wanted + slack):
        key = middle(lo, hi)
        count = tl.sum((keys >= key).to(tl.int32))
        if count >= wanted:
            lo = key
            reached = count
        else:
            hi = key
            above = count
    return lo, tl.where(reached > wanted, above, 0)


@triton.jit
def prefix_sums(flags):
    """How many flags of a tile are set up to each one and with it, row by row, and in all."""
    i = tl.arange(0, flags.shape[0])
    sums = tl.sum(flags, 1)
    earlier = tl.sum(tl.where(i[None, :] < i[:, None], sums[None, :], 0), 1)
    return earlier[:, None] + tl.cumsum(flags, 1), tl.sum(sums, 0)


@triton.jit
def scatter(out, at, positions, ASM: tl.constexpr):
    """Store positions that are not negative. In the layout of the scan: tl.store would carry the
    tile to another one first, and masks of many elements do not fit into predicates."""
    if ASM:
        tl.inline_asm_elementwise(
            """{
            .reg .pred chosen;
            setp.ge.s32 chosen, $2, 0;
            @chosen st.global.b32 [$1], $2;
            mov.b32 $0, 0;
            }""",
            "=r,l,r", [(out + at).to(tl.int64), positions],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        tl.store(out + at, positions, mask=positions >= 0)


@triton.jit
def scatter_pairs(out, at, positions, scores, ASM: tl.constexpr):
    """The same with scores, in the upper half of 64 bits."""
    if ASM:
        tl.inline_asm_elementwise(
            """{
            .reg .pred chosen;
            setp.ge.s32 chosen, $2, 0;
            @chosen st.global.v2.b32 [$1], {$2, $3};
            mov.b32 $0, 0;
            }""",
            "=r,l,r,r", [(out + at).to(tl.int64), positions, scores.to(tl.int32, bitcast=True)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        pairs = (scores.to(tl.int32, bitcast=True).to(tl.int64) << 32) | positions
        tl.store(out + at, pairs, mask=positions >= 0)


@triton.jit
def keep_row(
    kept, size, row, skew, n, cut, ASM: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Positions and scores of those that reach a cut above -inf, in order, and their number; of
    more than `size` not all are kept. The row begins `skew` elements behind an aligned address."""
    offs = tile_offsets(n, BLOCK)
    end = tl.cdiv(skew + n, ALIGN) * ALIGN
    seen = 0
    coming = tl.load(row + offs, mask=offs < end, other=0.0)
    for first in range(0, end, BLOCK):
        scores = widen(coming)
        later = first + BLOCK  # on its way while this tile is counted
        coming = tl.load(row + later + offs, mask=offs < end - later, other=0.0)
        positions = first - skew + offs
        chosen = (scores >= cut) & (positions.to(tl.uint32) < n.to(tl.uint32))
        positions = tl.where(chosen, positions, -1)
        ranks, total = prefix_sums((positions >> 31) + 1)
        at = seen + ranks - 1
        seen += total
        if seen <= size:
            scatter_pairs(kept, at, positions, scores, ASM)
    return seen


@triton.jit
def load_pairs(kept, offs, mask):
    pairs = tl.load(kept + offs, mask=mask, other=NAN_BITS << 32)
    return pairs.to(tl.int32), (pairs >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def emit(out, row, kept, n, from_kept, cut, room, ASM: tl.constexpr, BLOCK: tl.constexpr):
    """Put down the positions of scores above a cut and of the first `room` equals, in order, from
    what was kept or from the row itself."""
    offs = tile_offsets(n, BLOCK)
    above = 0
    equal = 0
    for first in range(0, n, BLOCK):
        positions = first + offs
        if from_kept:
            positions, scores = load_pairs(kept, positions, positions < n)
        else:
            scores = load_scores(row, positions, positions < n)
        # two counts in one, each of at most BLOCK
        ranks, total = prefix_sums(tl.where(scores > cut, 1, tl.where(scores == cut, 65536, 0)))
        equal_ranks = equal + (ranks >> 16)
        at = above + (ranks & 65535) + tl.minimum(equal_ranks, room) - 1
        chosen = (scores > cut) | ((scores == cut) & (equal_ranks <= room))
        scatter(out, at, tl.where(chosen, positions, -1), ASM)
        above += total & 65535
        equal += total >> 16


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
    TILE: tl.constexpr,
):  # fmt: skip
    """The K highest of a row of more than K."""
    row = logits + start
    tile = start // ALIGN * ALIGN
    size = tl.where(2 * K <= BLOCK, BLOCK, 0)  # of what may be kept
    lo = tl.cast(LOWEST, tl.int32)  # K or more scores reach it
    hi = tl.cast(HIGHEST + 1, tl.int32)  # fewer do: `above`
    above = 0
    count = n  # a row of one tile is kept as it is
    equals = False
    guesses = 0
    rank = tl.maximum(SAMPLE * target.to(tl.int64) // n, 1)
    searching = n > size
    while searching:
        pivot = lo + 1
        if not equals:
            if (guesses < GUESSES) & (n > BLOCK):
                j = tl.arange(0, SAMPLE)
                stride = n // (SAMPLE // RUN)
                first = guesses * (stride // GUESSES)  # each guess looks elsewhere
                j = first + (j // RUN) * stride + j % RUN
                keys = ordered_key(load_scores(row, j, j < n))
                wanted = tl.minimum(rank, SAMPLE).to(tl.int32)
                pivot, _ = cut_key(keys, LOWEST, wanted, wanted // 8)
                pivot = tl.minimum(tl.maximum(pivot, lo + 1), hi - 1)
            else:
                pivot = middle(lo, hi)
            guesses += 1
        count = keep_row(
            kept, size, logits + tile, (start - tile).to(tl.int32), n, score_of(pivot),
            ASM, ALIGN, TILE,
        )  # fmt: skip
        if not equals:
            rank = tl.maximum(rank * target // tl.maximum(count, 1), 1)
        # too many to keep, perhaps because they are equal: are there K above them?
        equals = (count >= K) & (count > size) & (pivot > lo + 1)
        if count < K:
            hi = pivot
            above = count
        else:
            lo = pivot
        searching = (hi > lo + 1) & ((count < K) | (count > size)) & (count != K)
    tl.debug_barrier()  # what other threads kept is read
    from_kept = (n > size) & (count >= K) & (count <= size)
    above = tl.where(count == K, 0, above)
    if (count >= K) & (count <= size):
        offs = tile_offsets(n, BLOCK)
        if from_kept:
            _, scores = load_pairs(kept, offs, offs < count)
        else:
            scores = load_scores(row, offs, offs < count)
        lo, above = cut_key(ordered_key(scores), lo, K, 0)
    n = tl.where(from_kept, count, n)
    emit(out, row, kept, n, from_kept, score_of(lo), K - above, ASM, BLOCK // 2)


@triton.jit(
    do_not_specialize=["row_stride", "T", "K", "target"], do_not_specialize_on_alignment=PLANNED
)
def _index_topk_kernel(
    logits, row_starts, row_lens, topk_positions, topk_lens, candidates, row_stride, T, K, target,
    ASM: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr, SAMPLE: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    for i in range(tl.program_id(0), T, tl.num_programs(0)):
        t = T - 1 - i
        n = tl.load(row_lens + t)
        tl.store(topk_lens + t, tl.minimum(n, K))
        t = t.to(tl.int64)
        out = topk_positions + t * K
        if n <= K:
            first_positions(out, n, K, 512)
        else:
            start = t * row_stride + tl.load(row_starts + t)
            # program_id, but computed anew: its tile of addresses is not held from row to row
            kept = candidates + (i % tl.num_programs(0)).to(tl.int64) * BLOCK
            choose(out, logits, start, n, kept, K, target, ASM, ALIGN, BLOCK, SAMPLE, TILE)


def why_not(problem: Problem) -> str | None:
    if problem.dtype not in INPUTS:
        return f"takes 16- and 32-bit scores, this is {problem.dtype}"
    return None


def run(
    logits: Tensor, row_starts: Tensor, row_lens: Tensor, *, K: int, sorted: bool
) -> tuple[Tensor, Tensor]:
    T = logits.shape[0]
    positions = logits.new_empty((T, K), dtype=torch.int32)
    lens = row_lens.new_empty(T)
    choose_rows(logits, row_starts, row_lens, positions, lens)
    return positions, lens


def choose_rows(
    logits: Tensor, row_starts: Tensor, row_lens: Tensor, positions: Tensor, lens: Tensor
) -> None:
    """Launch; positions [T, K] and lens [T] are written, contiguous."""
    (T, S), K = logits.shape, positions.shape[1]
    if T == 0:
        return
    units = multiprocessors(logits.device)
    config = config_of(T, units, capability_of(logits.device))
    fits = 2 * K <= BLOCK
    programs = min(T, 4 * units)
    width = BLOCK if fits and S > BLOCK else 0
    candidates = logits.new_empty((programs, width), dtype=torch.int64)
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
        **constants_of(config, aligned=logits.data_ptr() % 16 == 0),
        num_warps=config.num_warps,
        num_stages=1,
        **({"maxnreg": config.maxnreg} if assembly() else {}),
        enable_fp_fusion=True,
    )


def constants_of(config: Config, *, aligned: bool) -> dict[str, Any]:
    """Tiles of an aligned tensor begin at multiples of four, wherever a row does."""
    return {
        "ASM": assembly(),
        "ALIGN": 4 if aligned else 1,
        "BLOCK": BLOCK,
        "SAMPLE": SAMPLE,
        "TILE": config.tile,
    }


def builds() -> Iterator[Build]:
    """Few rows and many, per target: nothing is compiled for K or S."""
    for capability in TARGETS:
        for config in dict.fromkeys(config_of(T, 100, capability) for T in (1, 1000)):
            yield topk_build(capability, config)


def topk_build(capability: int, config: Config, dtype: torch.dtype = torch.float32) -> Build:
    constants = constants_of(config, aligned=True)
    signature = {
        name: "constexpr" if name in constants else "*i32" if name in POINTERS else "i32"
        for name in _index_topk_kernel.arg_names
    }
    signature |= {"logits": "*" + TYPES[dtype], "candidates": "*i64"}
    return Build(
        f"topk-{TYPES[dtype]}-{config.tile}", _index_topk_kernel, signature, constants,
        config.num_warps, 1, capability, config.maxnreg,
    )  # fmt: skip
