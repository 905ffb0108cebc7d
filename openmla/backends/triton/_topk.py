"""index_topk's kernel: the K highest scores of each row, without sorting.

Computes  the K highest of logits[t, row_starts[t]:][:row_lens[t]], of equals the leftmost, NaN as
          -inf (specification: ops/index_topk.py; numbers: backends/reference/index_topk.py)
Grid      (min(T, resident programs),): one program owns a row at a time, the last first: those are
          the longest of a prompt.
Reads     logits [T, S], row_starts [T], row_lens [T]
Writes    topk_positions [T, K], ascending whether asked to or not, topk_lens [T],
          candidates [programs, CHUNKS, BLOCK + SPAN], positions and scores, scratch

A sample of the row gives a pivot that about `target` scores reach, more than K and fewer than
BLOCK. One pass keeps those as candidates. The row is cut into CHUNKS, one or two per warp. Each
warp reads its own and writes to their regions, so warps do not synchronise, and chunk after chunk
the regions are in order. The candidates fit in registers, where a ternary search over the bits
finds the K-th. If the sample misled, another pivot is tried; if equals are too many to keep, the
K-th score is known by then and the row is read again.
"""

import triton
import triton.language as tl

from openmla.backends.triton._build import DO_NOT_SPECIALIZE_ON_ALIGNMENT
from openmla.backends.triton._primitives import INT32_MAX, widen

LANES = tl.constexpr(128)  # columns a warp reads at once
SPAN = tl.constexpr(512)  # its part of a tile: four times that, so that four counts fit one int32
VECTOR = tl.constexpr(8)  # neighbours sampled together: the smallest memory transaction
LOWEST = tl.constexpr(-2139095041)  # ordered_key(-inf)
HIGHEST = tl.constexpr(2139095040)  # ordered_key(+inf)
NOTHING = tl.constexpr(-2147483648)  # below every key
GUESSES = tl.constexpr(4)  # pivots taken from the sample; after them the range is halved
TILE = tl.constexpr(512)  # positions written together for a row that is chosen as a whole
# Two counts in one int32, of up to 2**15 each.
LOW_HALF = tl.constexpr(0xFFFF)
HIGH_ONE = tl.constexpr(1 << 16)


@triton.jit
def up_to(SIZE: tl.constexpr, n):
    """0, 1, ..., SIZE - 1. Adding min(n, 0), which is 0 though the compiler cannot know, keeps it
    from hoisting offsets out of the loop over rows, into registers that would spill."""
    return tl.arange(0, SIZE) + tl.minimum(n, 0)


@triton.jit
def as_scores(values, mask):
    """float32, NaN as -inf; outside the mask NaN, which compares false with every pivot."""
    scores = widen(values)
    scores = tl.where(scores == scores, scores, float("-inf"))
    return tl.where(mask, scores, float("nan"))


@triton.jit
def load_scores(row, offs, mask):
    return as_scores(tl.load(row + offs, mask=mask, other=0.0), mask)


@triton.jit
def ordered_key(scores):
    """int32 in the order of the scores, both zeros equal; NaN below all."""
    bits = tl.where(scores == 0.0, 0.0, scores).to(tl.int32, bitcast=True)
    return tl.where(scores == scores, bits ^ ((bits >> 31) & 0x7FFFFFFF), NOTHING)


@triton.jit
def score_of(key):
    """The inverse; -1, which no score has, gives a zero too."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def middle(lo, hi):
    """Midpoint, rounded down, without overflow."""
    return (lo & hi) + ((lo ^ hi) >> 1)


@triton.jit
def lowest_key(keys):
    return tl.min(tl.where(keys == NOTHING, HIGHEST, keys))


@triton.jit
def cut_key(keys, lo, wanted, slack):
    """A key that `wanted` to `wanted + slack` keys reach; if there is none, the wanted-th key
    itself. And how many keys are above it, which are taken before its equals; 0 if no equals have
    to be left out. At least `wanted` keys reach lo. A ternary search over the bits."""
    lo = tl.cast(lo, tl.int32)
    hi = tl.max(keys) + 1
    reached = INT32_MAX
    above = 0
    while (hi > lo + 1) & (reached > wanted + slack):
        # unsigned: the difference may overflow int32
        third = (hi.to(tl.uint32, bitcast=True) - lo.to(tl.uint32, bitcast=True)) // 3
        third = tl.maximum(third.to(tl.int32), 1)
        low, high = lo + third, hi - third
        counts = tl.sum(tl.where(keys >= high, HIGH_ONE + 1, tl.where(keys >= low, 1, 0)))
        low_count, high_count = counts & LOW_HALF, counts >> 16
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
    """Store positions that are not negative, in the layout of the scan: tl.store would convert the
    layout first, and masks of so many elements do not fit in predicate registers."""
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
    """The same where a flag is set, as 64 bits with the score, or its key, in the upper half; `out`
    may differ by row."""
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
def reaches(values, positions, n, pivot):
    return (widen(values) >= pivot) & (positions.to(tl.uint32) < n.to(tl.uint32))


@triton.jit
def keep_row(
    kept, row, skew, n, pivot,
    ASM: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Keep positions and scores of those that reach a pivot above -inf, each warp those of its own
    chunks; their number per chunk. What a chunk has beyond BLOCK is not kept. The row begins `skew`
    elements behind an aligned address."""
    end = tl.cdiv(skew + n, ALIGN) * ALIGN
    chunk = tl.cdiv(end, CHUNKS * LANES) * LANES
    i = up_to(CHUNKS, n)[:, None]
    offs = i * chunk + tl.arange(0, LANES)[None, :]
    stop = (i + 1) * chunk
    # repeated because 3.8 loses it on the way, and loads would not be vectorised
    stop = tl.multiple_of(tl.where(stop < end, stop, end), [ALIGN, ALIGN])
    n = tl.minimum(stop - skew, n)  # the end of each chunk
    seen = tl.zeros((CHUNKS, 1), tl.int32)
    for _ in range(0, chunk, SPAN):
        here = row + offs
        values_0 = tl.load(here, mask=offs < stop, other=0.0)
        values_1 = tl.load(here + LANES, mask=offs + LANES < stop, other=0.0)
        values_2 = tl.load(here + 2 * LANES, mask=offs + 2 * LANES < stop, other=0.0)
        values_3 = tl.load(here + 3 * LANES, mask=offs + 3 * LANES < stop, other=0.0)
        found = offs - skew
        # four counts in one int32, each of at most LANES
        flags = tl.where(reaches(values_0, found, n, pivot), 1, 0)
        flags += tl.where(reaches(values_1, found + LANES, n, pivot), 1 << 8, 0)
        flags += tl.where(reaches(values_2, found + 2 * LANES, n, pivot), 1 << 16, 0)
        flags += tl.where(reaches(values_3, found + 3 * LANES, n, pivot), 1 << 24, 0)
        ranks = tl.cumsum(flags, 1)
        totals = tl.sum(flags, 1, keep_dims=True)
        # beyond BLOCK the last entries are overwritten
        to = kept + (i * (BLOCK + SPAN) + tl.minimum(seen, BLOCK) - 1)
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
    kept, seen, fullest, ASM: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr
):  # fmt: skip
    """Spread the candidates evenly: each chunk's part at the end of its region, where there are
    none yet."""
    tl.static_assert(BLOCK // CHUNKS <= SPAN)
    starts = tl.arange(0, CHUNKS)[:, None] * (BLOCK + SPAN)
    before = tl.cumsum(tl.sum(seen, 1), 0)[:, None] - seen
    for first in range(0, fullest, LANES):
        j = first + tl.arange(0, LANES)[None, :]
        positions, scores = load_pairs(kept, starts + j)
        held = (j < seen).to(tl.int32)
        j += before
        at = j // (BLOCK // CHUNKS) * (BLOCK + SPAN) + BLOCK + j % (BLOCK // CHUNKS)
        scatter_pairs(kept, at, held, 1, positions, scores, ASM)


@triton.jit
def fill_up(kept, held, n, ASM: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr):
    """Pad each chunk's part with NaN. n only keeps offsets in the loop: see up_to()."""
    starts = tl.arange(0, CHUNKS)[:, None] * (BLOCK + SPAN)
    for first in range(tl.minimum(n, 0), BLOCK // CHUNKS, LANES):
        j = first + tl.arange(0, LANES)[None, :]
        padding = tl.full((CHUNKS, LANES), float("nan"), tl.float32)
        scatter_pairs(kept, starts + j, (j >= held).to(tl.int32), 1, j, padding, ASM)


@triton.jit
def load_parts(
    row, kept, first, n, from_kept, PART: tl.constexpr, PER_CHUNK: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Positions and scores of PART elements from `first` on: of the candidates, or of the row."""
    i = first // PER_CHUNK + up_to(PART // PER_CHUNK, n)[:, None]
    j = tl.arange(0, PER_CHUNK)[None, :]
    if from_kept:
        positions, scores = load_pairs(kept, i * (BLOCK + SPAN) + j)
    else:
        positions = i * PER_CHUNK + j
        scores = load_scores(row, positions, positions < n)
    return positions, scores


@triton.jit
def emit(
    out, row, kept, n, from_kept, pivot, num_equal,
    ASM: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Store the positions of scores above a pivot and of the first num_equal equals, in order, from
    the candidates or from the row."""
    PART: tl.constexpr = BLOCK // 2  # as many positions and ranks as registers hold
    PER_CHUNK: tl.constexpr = BLOCK // CHUNKS
    above = 0
    equal = 0
    for first in range(0, tl.where(from_kept, BLOCK, n), PART):
        positions, scores = load_parts(row, kept, first, n, from_kept, PART, PER_CHUNK, BLOCK)
        flags = tl.where(scores > pivot, 1, tl.where(scores == pivot, HIGH_ONE, 0))
        ranks = tl.cumsum(flags.reshape(PART), 0).reshape(PART // PER_CHUNK, PER_CHUNK)
        total = tl.sum(flags)
        equal_ranks = equal + (ranks >> 16)
        at = above + (ranks & LOW_HALF) + tl.minimum(equal_ranks, num_equal) - 1
        chosen = (scores > pivot) | ((scores == pivot) & (equal_ranks <= num_equal))
        scatter(out, at, tl.where(chosen, positions, -1), ASM)
        above += total & LOW_HALF
        equal += total >> 16


@triton.jit
def first_positions(out, n, K):
    """A row of n <= K scores: all of them."""
    for first in range(0, K, TILE):
        positions = first + tl.arange(0, TILE)
        tl.store(out + positions, tl.where(positions < n, positions, -1), mask=positions < K)


@triton.jit
def sample_keys(row, skew, n, guess, ALIGN: tl.constexpr, SAMPLE: tl.constexpr):
    """Keys from all over a row of SAMPLE or more, other ones in each guess."""
    i = tl.arange(0, SAMPLE // VECTOR)[:, None]
    j = tl.arange(0, VECTOR)[None, :]
    stride = n // (SAMPLE // VECTOR)
    first = guess * (stride // GUESSES)
    j += (first + i * stride) // VECTOR * VECTOR
    values = tl.load(row + j, mask=j < tl.cdiv(skew + n, ALIGN) * ALIGN, other=0.0)
    return ordered_key(as_scores(values, (j - skew).to(tl.uint32) < n.to(tl.uint32)))


@triton.jit
def choose(
    out, logits, start, n, kept, K, target,
    ASM: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr, SAMPLE: tl.constexpr,
    CHUNKS: tl.constexpr, FITS: tl.constexpr,
):  # fmt: skip
    """The K highest of a row of more than K."""
    size: tl.constexpr = BLOCK if FITS else 0  # the most candidates
    first = start // ALIGN * ALIGN
    skew = (start - first).to(tl.int32)
    row = logits + first
    lo = tl.cast(LOWEST, tl.int32)  # K or more scores reach it
    hi = tl.cast(HIGHEST + 1, tl.int32)  # fewer do: `above`
    above = 0
    count = n  # a row of one block needs no candidates
    seen = tl.zeros((CHUNKS, 1), tl.int32)
    equals = False
    guesses = 0
    rank = SAMPLE * (target.to(tl.float32) / n)
    searching = n > size
    while searching:
        pivot = lo + 1
        width = n + tl.minimum(guesses, 0)  # n, but recomputed in every iteration: see up_to()
        if not equals:
            if (guesses < GUESSES) & (n > BLOCK):
                keys = sample_keys(row, skew, width, guesses, ALIGN, SAMPLE)
                wanted = tl.minimum(tl.maximum(rank, 1.0), SAMPLE).to(tl.int32)
                pivot, _ = cut_key(keys, lowest_key(keys), wanted, wanted // 8)
                pivot = tl.minimum(tl.maximum(pivot, lo + 1), hi - 1)
            else:
                pivot = middle(lo, hi)
            guesses += 1
        seen = keep_row(kept, row, skew, width, score_of(pivot), ASM, ALIGN, BLOCK, CHUNKS)
        count = tl.sum(tl.sum(seen, 0), 0)
        if not equals:
            rank *= target.to(tl.float32) / tl.maximum(count, 1)
        # too many candidates, perhaps because they are equal: next, are there K above them?
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
        if fullest > BLOCK // CHUNKS:
            tl.debug_barrier()  # reads what other threads kept
            even_out(kept, seen, fullest, ASM, BLOCK, CHUNKS)
            held = count - tl.arange(0, CHUNKS)[:, None] * (BLOCK // CHUNKS)
            kept += BLOCK
        fill_up(kept, held, count, ASM, BLOCK, CHUNKS)
        tl.debug_barrier()
    if (count >= K) & (count <= size):
        _, scores = load_parts(row + skew, kept, 0, n, from_kept, BLOCK, BLOCK // CHUNKS, BLOCK)
        keys = ordered_key(scores)
        if not from_kept:
            lo = lowest_key(keys)
        lo, above = cut_key(keys, lo, K, 0)
    emit(out, row + skew, kept, n, from_kept, score_of(lo), K - above, ASM, BLOCK, CHUNKS)


@triton.jit(
    do_not_specialize=["row_stride", "T", "K", "target"],
    do_not_specialize_on_alignment=DO_NOT_SPECIALIZE_ON_ALIGNMENT,
)
def _index_topk_kernel(
    logits, row_starts, row_lens, topk_positions, topk_lens, candidates, row_stride, T, K, target,
    ASM: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr, SAMPLE: tl.constexpr,
    CHUNKS: tl.constexpr, FITS: tl.constexpr,
):  # fmt: skip
    for i in tl.range(tl.program_id(0), T, tl.num_programs(0), disable_licm=True):
        t = T - 1 - i
        n = tl.load(row_lens + t)
        tl.store(topk_lens + t, tl.minimum(n, K))
        t = t.to(tl.int64)
        out = topk_positions + t * K
        if n <= K:
            first_positions(out, n, K)
        else:
            start = t * row_stride + tl.load(row_starts + t)
            kept = candidates + tl.program_id(0).to(tl.int64) * (CHUNKS * (BLOCK + SPAN))
            choose(out, logits, start, n, kept, K, target, ASM, ALIGN, BLOCK, SAMPLE, CHUNKS, FITS)
