"""index_topk, Triton: the K highest scores of each row, without sorting.

Computes  the K highest of logits[t, row_starts[t]:][:row_lens[t]], of equals the leftmost, NaN as
          -inf (specification: ops/index_topk.py; numbers: backends/reference/index_topk.py)
Grid      (min(T, what multiprocessors hold),): one program owns a row at a time, the last first:
          they are the longest ones of a prompt.
Reads     logits [T, S], row_starts [T], row_lens [T]
Writes    topk_positions [T, K], rising whether asked to or not, topk_lens [T],
          candidates [programs, WARPS, BLOCK + SPAN], positions and scores, scratch
Limits    see why_not()

A sample of a row gives a score that about `target` others reach, more than K and fewer than BLOCK.
One pass keeps the positions of those that do. Each warp reads a stretch of the row and keeps what
it finds in a region of its own, so that warps need not wait for one another; stretch after stretch
the regions are in order. Of what they hold, which fits in registers, the K-th is found by cutting
the range of its bits in three and counting. Where the sample misled, another score is tried; where
equals are too many to keep, the K-th score is known by then and the row is read again.
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
    DO_NOT_SPECIALIZE_ON_ALIGNMENT,
    GFX942,
    TARGETS,
    TYPES,
    Build,
    assembly,
    capability_of,
    nearest_target,
)
from openmla.backends.triton._versions import JOINS_BRANCHES
from openmla.backends.triton.cache_write import widen
from openmla.hardware import multiprocessors

INPUTS = (torch.float32, torch.bfloat16, torch.float16)
SAMPLE = 4096
POINTERS = ("row_starts", "row_lens", "topk_positions", "topk_lens")

LAUNCHES = 1
FP_FUSION = True


class Config(NamedTuple):
    block: int  # the most candidates; where twice K are more, none are kept
    num_warps: int
    programs: int  # per multiprocessor
    maxnreg: int | None


# H200: 8 warps for few rows and 2 or 3 programs for many were tried and lost.
FEW = Config(4096, 16, 1, None)
MANY = Config(4096, 8, 3, 80) if JOINS_BRANCHES else Config(4096, 8, 4, 64)  # or it spills
MANY_ELSEWHERE = Config(4096, 8, 2, 128) if JOINS_BRANCHES else MANY  # not on SM90
LARGE = Config(8192, 16, 1, None)
AMD = Config(4096, 8, 2, None)


def config_of(T: int, K: int, multiprocessors: int, capability: int) -> Config:
    """With few rows the most warps; with many, four programs per multiprocessor, so that some read
    while others search."""
    if FEW.block < 2 * K:
        return LARGE
    if capability == GFX942:
        return AMD
    if multiprocessors >= T:
        return FEW
    return MANY if nearest_target(capability) == 90 else MANY_ELSEWHERE


LANES = tl.constexpr(128)  # columns a warp reads at once
SPAN = tl.constexpr(512)  # and its part of a tile: four times that, whose counts fit in one int32
RUN = tl.constexpr(8)  # neighbours sampled together: what memory gives at the least
LOWEST = tl.constexpr(-2139095041)  # ordered_key(-inf)
HIGHEST = tl.constexpr(2139095040)  # ordered_key(+inf)
NOTHING = tl.constexpr(-2147483648)  # below every key
NAN_BITS = tl.constexpr(0x7FC00000)
GUESSES = tl.constexpr(4)  # scores taken from the sample; then the range is halved


@triton.jit
def up_to(SIZE: tl.constexpr, n):
    """0, 1, ..., SIZE - 1. n is not negative, which the compiler does not know: it would compute
    offsets once for all rows, and hold them in registers that are scarce."""
    return tl.arange(0, SIZE) + tl.minimum(n, 0)


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
def lowest_key(keys):
    return tl.min(tl.where(keys == NOTHING, HIGHEST, keys))


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
        # the difference may not fit with its sign
        third = (hi.to(tl.uint32, bitcast=True) - lo.to(tl.uint32, bitcast=True)) // 3
        third = tl.maximum(third.to(tl.int32), 1)
        low, high = lo + third, hi - third
        # two counts in one
        counts = tl.sum(tl.where(keys >= high, 65537, tl.where(keys >= low, 1, 0)))
        low_count, high_count = counts & 65535, counts >> 16
        if high_count >= wanted:
            lo = high
            reached = high_count
        elif low_count >= wanted:
            lo = low
            reached = low_count
            hi = high
            above = high_count
        else:
            hi = low
            above = low_count
    return lo, tl.where(reached > wanted, above, 0)


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
def scatter_pairs(out, at, flags, flag, positions, scores, ASM: tl.constexpr):
    """The same with scores or their keys, in the upper half of 64 bits, where a flag is set; `out`
    may differ."""
    if ASM:
        tl.inline_asm_elementwise(
            """{
            .reg .pred chosen;
            .reg .b32 set;
            .reg .b64 to;
            and.b32 set, $3, $4;
            setp.ne.b32 chosen, set, 0;
            mad.wide.s32 to, $2, 8, $1;
            @chosen st.global.v2.b32 [to], {$5, $6};
            mov.b32 $0, 0;
            }""",
            "=r,l,r,r,r,r,r",
            [out.to(tl.int64), at, flags, flag, positions, scores.to(tl.int32, bitcast=True)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        pairs = (scores.to(tl.int32, bitcast=True).to(tl.int64) << 32) | positions
        tl.store(out + at, pairs, mask=(flags & flag) != 0)


@triton.jit
def reached(values, positions, n, cut):
    return (widen(values) >= cut) & (positions.to(tl.uint32) < n.to(tl.uint32))


@triton.jit
def keep_row(
    kept, row, skew, n, cut,
    ASM: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Positions and scores of those that reach a cut above -inf, and their number, for each warp's
    stretch of the row. What a warp finds beyond BLOCK is not kept. The row begins `skew` elements
    behind an aligned address."""
    end = tl.cdiv(skew + n, ALIGN) * ALIGN
    stretch = tl.cdiv(end, WARPS * LANES) * LANES
    warp = up_to(WARPS, n)[:, None]
    offs = warp * stretch + tl.arange(0, LANES)[None, :]
    stop = (warp + 1) * stretch
    # said again: 3.8 forgets it in between, and loads would be of one element each
    stop = tl.multiple_of(tl.where(stop < end, stop, end), [ALIGN, ALIGN])
    n = tl.minimum(stop - skew, n)  # where each warp's own ends
    seen = tl.zeros((WARPS, 1), tl.int32)
    for _ in range(0, stretch, SPAN):
        here = row + offs
        values_0 = tl.load(here, mask=offs < stop, other=0.0)
        values_1 = tl.load(here + LANES, mask=offs + LANES < stop, other=0.0)
        values_2 = tl.load(here + 2 * LANES, mask=offs + 2 * LANES < stop, other=0.0)
        values_3 = tl.load(here + 3 * LANES, mask=offs + 3 * LANES < stop, other=0.0)
        found = offs - skew
        # four counts in one, each of at most LANES
        flags = tl.where(reached(values_0, found, n, cut), 1, 0)
        flags += tl.where(reached(values_1, found + LANES, n, cut), 1 << 8, 0)
        flags += tl.where(reached(values_2, found + 2 * LANES, n, cut), 1 << 16, 0)
        flags += tl.where(reached(values_3, found + 3 * LANES, n, cut), 1 << 24, 0)
        ranks = tl.cumsum(flags, 1)
        totals = tl.sum(flags, 1, keep_dims=True)
        # beyond BLOCK the last places are written over
        to = kept + (warp * (BLOCK + SPAN) + tl.minimum(seen, BLOCK) - 1)
        scatter_pairs(to, ranks & 255, flags, 1, found, widen(values_0), ASM)
        to += totals & 255
        ranks >>= 8
        scatter_pairs(to, ranks & 255, flags, 1 << 8, found + LANES, widen(values_1), ASM)
        to += (totals >> 8) & 255
        ranks >>= 8
        scatter_pairs(to, ranks & 255, flags, 1 << 16, found + 2 * LANES, widen(values_2), ASM)
        to += (totals >> 16) & 255
        ranks >>= 8
        scatter_pairs(to, ranks & 255, flags, 1 << 24, found + 3 * LANES, widen(values_3), ASM)
        pairs = (totals & 0xFF00FF) + ((totals >> 8) & 0xFF00FF)
        seen += (pairs & 0xFFFF) + (pairs >> 16)
        offs += SPAN
    return seen


@triton.jit
def load_pairs(kept, offs):
    pairs = tl.load(kept + offs)
    return pairs.to(tl.int32), (pairs >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def even_out(
    kept, seen, fullest, ASM: tl.constexpr, BLOCK: tl.constexpr, WARPS: tl.constexpr
):  # fmt: skip
    """Spread the candidates over the ends of the regions, which none of them is in, each warp's
    share in one."""
    tl.static_assert(BLOCK // WARPS <= SPAN)
    starts = tl.arange(0, WARPS)[:, None] * (BLOCK + SPAN)
    before = tl.cumsum(tl.sum(seen, 1), 0)[:, None] - seen
    for first in range(0, fullest, LANES):
        j = first + tl.arange(0, LANES)[None, :]
        positions, scores = load_pairs(kept, starts + j)
        held = (j < seen).to(tl.int32)
        j += before
        at = j // (BLOCK // WARPS) * (BLOCK + SPAN) + BLOCK + j % (BLOCK // WARPS)
        scatter_pairs(kept, at, held, 1, positions, scores, ASM)


@triton.jit
def fill_up(kept, held, n, ASM: tl.constexpr, BLOCK: tl.constexpr, WARPS: tl.constexpr):
    """NaN behind what the shares hold. Of n in all, which is not negative: see up_to()."""
    starts = tl.arange(0, WARPS)[:, None] * (BLOCK + SPAN)
    for first in range(tl.minimum(n, 0), BLOCK // WARPS, LANES):
        j = first + tl.arange(0, LANES)[None, :]
        nothing = tl.full((WARPS, LANES), float("nan"), tl.float32)
        scatter_pairs(kept, starts + j, (j >= held).to(tl.int32), 1, j, nothing, ASM)


@triton.jit
def load_shares(
    row, kept, first, n, from_kept, PART: tl.constexpr, SHARE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Positions and scores of PART elements from the first on: of shares of the candidates, or of
    the row itself."""
    i = first // SHARE + up_to(PART // SHARE, n)[:, None]
    j = tl.arange(0, SHARE)[None, :]
    if from_kept:
        positions, scores = load_pairs(kept, i * (BLOCK + SPAN) + j)
    else:
        positions = i * SHARE + j
        scores = load_scores(row, positions, positions < n)
    return positions, scores


@triton.jit
def emit(
    out, row, kept, n, from_kept, cut, room,
    ASM: tl.constexpr, BLOCK: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Put down the positions of scores above a cut and of the first `room` equals, in order, from
    what was kept or from the row itself."""
    PART: tl.constexpr = BLOCK // 2  # of which registers hold positions and ranks
    SHARE: tl.constexpr = BLOCK // WARPS
    above = 0
    equal = 0
    for first in range(0, tl.where(from_kept, BLOCK, n), PART):
        positions, scores = load_shares(row, kept, first, n, from_kept, PART, SHARE, BLOCK)
        # two counts in one, each of at most PART
        flags = tl.where(scores > cut, 1, tl.where(scores == cut, 65536, 0))
        ranks = tl.cumsum(flags.reshape(PART), 0).reshape(PART // SHARE, SHARE)
        total = tl.sum(flags)
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
def sample_keys(row, skew, n, guess, ALIGN: tl.constexpr, SAMPLE: tl.constexpr):
    """From all over a row of SAMPLE or more; each guess looks elsewhere."""
    i = tl.arange(0, SAMPLE // RUN)[:, None]
    j = tl.arange(0, RUN)[None, :]
    stride = n // (SAMPLE // RUN)
    first = guess * (stride // GUESSES)
    j += (first + i * stride) // RUN * RUN
    values = tl.load(row + j, mask=j < tl.cdiv(skew + n, ALIGN) * ALIGN, other=0.0)
    return ordered_key(as_scores(values, (j - skew).to(tl.uint32) < n.to(tl.uint32)))


@triton.jit
def choose(
    out, logits, start, n, kept, K, target,
    ASM: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr, SAMPLE: tl.constexpr,
    WARPS: tl.constexpr, FITS: tl.constexpr,
):  # fmt: skip
    """The K highest of a row of more than K."""
    size: tl.constexpr = BLOCK if FITS else 0  # of what may be kept
    first = start // ALIGN * ALIGN
    skew = (start - first).to(tl.int32)
    row = logits + first
    lo = tl.cast(LOWEST, tl.int32)  # K or more scores reach it
    hi = tl.cast(HIGHEST + 1, tl.int32)  # fewer do: `above`
    above = 0
    count = n  # a row of one block is kept as it is
    seen = tl.zeros((WARPS, 1), tl.int32)
    equals = False
    guesses = 0
    rank = SAMPLE * (target.to(tl.float32) / n)
    searching = n > size
    while searching:
        pivot = lo + 1
        width = n + tl.minimum(guesses, 0)  # n; what follows from it is not held from try to try
        if not equals:
            if (guesses < GUESSES) & (n > BLOCK):
                keys = sample_keys(row, skew, width, guesses, ALIGN, SAMPLE)
                wanted = tl.minimum(tl.maximum(rank, 1.0), SAMPLE).to(tl.int32)
                pivot, _ = cut_key(keys, lowest_key(keys), wanted, wanted // 8)
                pivot = tl.minimum(tl.maximum(pivot, lo + 1), hi - 1)
            else:
                pivot = middle(lo, hi)
            guesses += 1
        seen = keep_row(kept, row, skew, width, score_of(pivot), ASM, ALIGN, BLOCK, WARPS)
        count = tl.sum(tl.sum(seen, 0), 0)
        if not equals:
            rank *= target.to(tl.float32) / tl.maximum(count, 1)
        # too many to keep, perhaps because they are equal: are there K above them?
        equals = (count >= K) & (count > size) & (pivot > lo + 1)
        if count < K:
            hi = pivot
            above = count
        else:
            lo = pivot
        searching = (hi > lo + 1) & ((count < K) | (count > size)) & (count != K)
    from_kept = (n > size) & (count >= K) & (count <= size)
    above = tl.where(count == K, 0, above)
    if from_kept:
        held = seen
        fullest = tl.max(tl.max(seen, 0), 0)
        if fullest > BLOCK // WARPS:
            tl.debug_barrier()  # what other threads kept is read
            even_out(kept, seen, fullest, ASM, BLOCK, WARPS)
            held = count - tl.arange(0, WARPS)[:, None] * (BLOCK // WARPS)
            kept += BLOCK
        fill_up(kept, held, count, ASM, BLOCK, WARPS)
        tl.debug_barrier()
    if (count >= K) & (count <= size):
        _, scores = load_shares(row + skew, kept, 0, n, from_kept, BLOCK, BLOCK // WARPS, BLOCK)
        keys = ordered_key(scores)
        if not from_kept:
            lo = lowest_key(keys)
        lo, above = cut_key(keys, lo, K, 0)
    emit(out, row + skew, kept, n, from_kept, score_of(lo), K - above, ASM, BLOCK, WARPS)


@triton.jit(
    do_not_specialize=["row_stride", "T", "K", "target"],
    do_not_specialize_on_alignment=DO_NOT_SPECIALIZE_ON_ALIGNMENT,
)
def _index_topk_kernel(
    logits, row_starts, row_lens, topk_positions, topk_lens, candidates, row_stride, T, K, target,
    ASM: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr, SAMPLE: tl.constexpr,
    WARPS: tl.constexpr, FITS: tl.constexpr,
):  # fmt: skip
    for i in tl.range(tl.program_id(0), T, tl.num_programs(0), disable_licm=True):
        t = T - 1 - i
        n = tl.load(row_lens + t)
        tl.store(topk_lens + t, tl.minimum(n, K))
        t = t.to(tl.int64)
        out = topk_positions + t * K
        if n <= K:
            first_positions(out, n, K, 512)
        else:
            start = t * row_stride + tl.load(row_starts + t)
            kept = candidates + tl.program_id(0).to(tl.int64) * (WARPS * (BLOCK + SPAN))
            choose(out, logits, start, n, kept, K, target, ASM, ALIGN, BLOCK, SAMPLE, WARPS, FITS)


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
    config = config_of(T, K, units, capability_of(logits.device))
    fits = config.block >= 2 * K
    size = config.block if fits else 0
    programs = min(T, config.programs * units)
    width = config.block + SPAN.value if size < S else 0
    candidates = logits.new_empty((programs, config.num_warps, width), dtype=torch.int64)
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
        isqrt(K * config.block) if fits else K,
        **constants_of(config, aligned=logits.data_ptr() % 16 == 0, fits=fits),
        num_warps=config.num_warps,
        num_stages=1,
        **({"maxnreg": config.maxnreg} if assembly() else {}),
        enable_fp_fusion=FP_FUSION,
    )


def constants_of(config: Config, *, aligned: bool, fits: bool) -> dict[str, Any]:
    """Tiles of an aligned tensor begin at multiples of four, wherever a row does."""
    return {
        "ASM": assembly(),
        "ALIGN": 4 if aligned else 1,
        "BLOCK": config.block,
        "SAMPLE": SAMPLE,
        "WARPS": config.num_warps,
        "FITS": fits,
    }


def builds() -> Iterator[Build]:
    """Few rows and many and a large K, per target: nothing is compiled for K or S."""
    for capability in TARGETS:
        shapes = ((1, 2048), (1000, 2048), (1000, 4096))
        for config in dict.fromkeys(config_of(T, K, 100, capability) for T, K in shapes):
            yield topk_build(capability, config)


def topk_build(capability: int, config: Config, dtype: torch.dtype = torch.float32) -> Build:
    constants = constants_of(config, aligned=True, fits=True)
    signature = {
        name: "constexpr" if name in constants else "*i32" if name in POINTERS else "i32"
        for name in _index_topk_kernel.arg_names
    }
    signature |= {"logits": "*" + TYPES[dtype], "candidates": "*i64"}
    return Build(
        f"topk-{TYPES[dtype]}-{config.block}-{config.num_warps}", _index_topk_kernel, signature,
        constants, config.num_warps, 1, capability, FP_FUSION, config.maxnreg,
    )  # fmt: skip
