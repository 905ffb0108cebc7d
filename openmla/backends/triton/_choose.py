"""index_select's kernel: the best keys of each token, selected while they are scored.

Computes  what index_topk selects of index_logits' scores (specification: ops/index_select.py)
Grid      (min(tiles of BLOCK_Q tokens, resident programs),): one program owns a tile of tokens at a
          time, the last first: in a prompt those see the most keys
Reads     q_idx [T, HI, DI], w_idx [T, HI], cache [N, BS, W], block_table [B, M], row_lens [T]
Writes    topk_positions [T, K], ascending whether asked to or not, topk_lens [T],
          scores [programs, BLOCK_Q, CHUNK], kept [programs, BLOCK_Q, 2, CAPACITY + SPAN], scratch

A token's keys are scored from left to right, a chunk at a time. Those above the token's threshold
are kept, in order. When they exceed CAPACITY, the best K stay and the least of them is the new
threshold: a later key has to exceed it, as K earlier ones reach it. So only the scores of a chunk
are written and read back, by the same multiprocessor while they are in its caches.
"""

from __future__ import annotations

import triton
import triton.language as tl

from openmla.backends.triton._build import DO_NOT_SPECIALIZE_ON_ALIGNMENT
from openmla.backends.triton._index import (
    Chunk,
    Pages,
    Queries,
    Scoring,
    Stored,
    load_queries,
    load_weights,
    score_paged_keys,
)
from openmla.backends.triton._primitives import request_of
from openmla.backends.triton._topk import (
    HIGH_ONE,
    HIGHEST,
    LANES,
    LOW_HALF,
    NOTHING,
    SPAN,
    first_positions,
    middle,
    ordered_key,
    score_of,
)


@triton.jit
def scatter_all(out, at, values, ASM: tl.constexpr):
    """Store 32-bit values at out + at in their own layout: tl.store would convert it first, and
    _topk.scatter() takes a 64-bit pointer for each."""
    if ASM:
        tl.inline_asm_elementwise(
            """{
            .reg .b64 to;
            mad.wide.s32 to, $2, 4, $1;
            st.global.b32 [to], $3;
            mov.b32 $0, 0;
            }""",
            "=r,l,r,r", [out.to(tl.int64), at, values], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        tl.store(out + at, values)


@triton.jit
def scatter_where(out, at, flags, values, ASM: tl.constexpr):
    """The same where flags are set."""
    if ASM:
        tl.inline_asm_elementwise(
            """{
            .reg .pred wanted;
            .reg .b64 to;
            setp.ne.b32 wanted, $3, 0;
            mad.wide.s32 to, $2, 4, $1;
            @wanted st.global.b32 [to], $4;
            mov.b32 $0, 0;
            }""",
            "=r,l,r,r,r", [out.to(tl.int64), at, flags, values],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        tl.store(out + at, values, mask=flags != 0)


@triton.jit
def scatter_split(out, at, flags, positions, scores, WIDTH: tl.constexpr, ASM: tl.constexpr):
    """The same for scores and, WIDTH behind them, positions."""
    if ASM:
        tl.inline_asm_elementwise(
            """{
            .reg .pred wanted;
            .reg .b64 to;
            setp.ne.b32 wanted, $3, 0;
            mad.wide.s32 to, $2, 4, $1;
            @wanted st.global.b32 [to], $5;
            add.s64 to, to, $6;
            @wanted st.global.b32 [to], $4;
            mov.b32 $0, 0;
            }""",
            "=r,l,r,r,r,r,l",
            [out.to(tl.int64), at, flags, positions, scores, tl.cast(4 * WIDTH, tl.int64)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        tl.store(out + at, scores.to(tl.int32, bitcast=True), mask=flags != 0)
        tl.store(out + WIDTH + at, positions, mask=flags != 0)


@triton.jit
def load_span(scores):
    """SPAN scores of each row, as four vectors of LANES."""
    return (
        tl.load(scores), tl.load(scores + LANES), tl.load(scores + 2 * LANES),
        tl.load(scores + 3 * LANES),
    )  # fmt: skip


@triton.jit
def flag_above(values, j, limits, threshold):
    """Those not at or below the threshold: four counts in one int32, each of at most LANES."""
    flags = tl.where((j < limits) & ~(values[0] <= threshold), 1, 0)
    flags += tl.where((j + LANES < limits) & ~(values[1] <= threshold), 1 << 8, 0)
    flags += tl.where((j + 2 * LANES < limits) & ~(values[2] <= threshold), 1 << 16, 0)
    return flags + tl.where((j + 3 * LANES < limits) & ~(values[3] <= threshold), 1 << 24, 0)


@triton.jit
def append_span(kept, seen, values, j, flags, CAPACITY: tl.constexpr, ASM: tl.constexpr):
    """Append flagged scores; the new counts. Beyond CAPACITY the last entries are overwritten."""
    WIDTH: tl.constexpr = CAPACITY + SPAN
    ranks = tl.cumsum(flags, 1)
    totals = tl.sum(flags, 1, keep_dims=True)
    to = kept + tl.minimum(seen, CAPACITY)
    for i in tl.static_range(4):
        at = (ranks >> (8 * i)) & 255
        scatter_split(to, at, flags & (1 << (8 * i)), j + i * LANES, values[i], WIDTH, ASM)
        to += (totals >> (8 * i)) & 255
    pairs = (totals & 0xFF00FF) + ((totals >> 8) & 0xFF00FF)
    return seen + (pairs & 0xFFFF) + (pairs >> 16)


@triton.jit
def append_above(
    kept, scores, start, stop, limits, held, threshold,
    ASM: tl.constexpr, BLOCK_Q: tl.constexpr, CHUNK: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """Append, of keys start .. stop - 1, those not at or below each row's threshold; the new
    counts. What exceeds CAPACITY is lost."""
    row = tl.arange(0, BLOCK_Q)[:, None]
    lane = tl.arange(0, LANES)[None, :]
    limits, threshold, seen = limits[:, None], threshold[:, None], held[:, None]
    scores += row * CHUNK + lane
    kept += row * (2 * (CAPACITY + SPAN)) - 1
    for first in range(start, stop, 2 * SPAN):
        j = first + lane
        values, more = load_span(scores), load_span(scores + SPAN)
        flags = flag_above(values, j, limits, threshold)
        more_flags = flag_above(more, j + SPAN, limits, threshold)
        seen = append_span(kept, seen, values, j, flags, CAPACITY, ASM)
        seen = append_span(kept, seen, more, j + SPAN, more_flags, CAPACITY, ASM)
        scores += 2 * SPAN
    return tl.sum(seen, 1)


@triton.jit
def load_ordered_keys(kept, first, count, PART: tl.constexpr):
    """Ordered keys of PART kept scores, NOTHING past the last."""
    offs = first + tl.arange(0, PART)[None, :]
    scores = tl.load(kept + offs).to(tl.float32, bitcast=True)
    keys = ordered_key(tl.where(scores == scores, scores, float("-inf")))
    return tl.where(offs < count, keys, NOTHING)


@triton.jit
def lowest_keys(keys):
    return tl.min(tl.where(keys == NOTHING, HIGHEST, keys), 1)


@triton.jit
def kth_keys(keys_0, keys_1, keys_2, keys_3, held, wanted):
    """The wanted-th highest of each row's `held` keys, and how many are above it, which are taken
    before its equals; 0 if no equals have to be left out. Rows are searched side by side, each by
    its own warp."""
    lo = tl.minimum(
        tl.minimum(lowest_keys(keys_0), lowest_keys(keys_1)),
        tl.minimum(lowest_keys(keys_2), lowest_keys(keys_3)),
    )
    hi = 1 + tl.max(tl.maximum(tl.maximum(keys_0, keys_1), tl.maximum(keys_2, keys_3)), 1)
    reached = held  # keys at or above lo: `wanted` or more
    above = tl.zeros(lo.shape, tl.int32)  # keys at or above hi: fewer
    searching = (hi > lo + 1) & (reached > wanted)
    while tl.max(searching.to(tl.int32), 0) > 0:
        pivot = middle(lo, hi)
        floor = pivot[:, None]
        counts = (keys_0 >= floor).to(tl.int32) + (keys_1 >= floor).to(tl.int32)
        counts += (keys_2 >= floor).to(tl.int32) + (keys_3 >= floor).to(tl.int32)
        count = tl.sum(counts, 1)
        enough = count >= wanted
        lo = tl.where(searching & enough, pivot, lo)
        reached = tl.where(searching & enough, count, reached)
        hi = tl.where(searching & ~enough, pivot, hi)
        above = tl.where(searching & ~enough, count, above)
        searching = (hi > lo + 1) & (reached > wanted)
    return lo, tl.where(reached > wanted, above, 0)


@triton.jit
def emit_part(
    out, kept, keys, first, before, floor, num_equal,
    WIDTH: tl.constexpr, PART: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Those of PART above the floor and the first num_equal equals: see take_best(). The counts so
    far of those above and, in the upper half, of equals."""
    positions = tl.load(kept + WIDTH + first + tl.arange(0, PART)[None, :])
    flags = tl.where(keys > floor, 1, tl.where((keys == floor) & (keys > NOTHING), HIGH_ONE, 0))
    ranks = before + tl.cumsum(flags, 1)
    at = (ranks & LOW_HALF) + tl.minimum(ranks >> 16, num_equal) - 1
    chosen = (flags == 1) | ((flags > 1) & ((ranks >> 16) <= num_equal))
    if out is None:
        tl.debug_barrier()  # all is read before it is overwritten
        scatter_split(kept, at, chosen.to(tl.int32), positions, score_of(keys), WIDTH, ASM)
    else:
        scatter_where(out, at, chosen.to(tl.int32), positions, ASM)
    return before + tl.sum(flags, 1, keep_dims=True)


@triton.jit
def take_best(
    out, kept, held, threshold, K, ASM: tl.constexpr, ROWS: tl.constexpr, CAPACITY: tl.constexpr
):  # fmt: skip
    """The K best that each row holds, of equals the first, in order: their positions into `out`, or
    without one, moved to the front. The new thresholds; rows of fewer than K stay as they are."""
    WIDTH: tl.constexpr = CAPACITY + SPAN
    PART: tl.constexpr = CAPACITY // 4
    kept += tl.arange(0, ROWS)[:, None] * (2 * WIDTH)
    if out is not None:
        out += tl.arange(0, ROWS)[:, None].to(tl.int64) * K
    count = held[:, None]
    # 0, but the compiler cannot know and does not hoist offsets into registers: see _topk.up_to()
    zero = tl.multiple_of(tl.minimum(tl.max(held, 0), 0), 16)
    keys_0 = load_ordered_keys(kept, zero, count, PART)
    keys_1 = load_ordered_keys(kept, zero + PART, count, PART)
    keys_2 = load_ordered_keys(kept, zero + 2 * PART, count, PART)
    keys_3 = load_ordered_keys(kept, zero + 3 * PART, count, PART)
    wanted = tl.minimum(held, K)
    lo, above = kth_keys(keys_0, keys_1, keys_2, keys_3, held, wanted)
    floor, num_equal = lo[:, None], (wanted - above)[:, None]
    before = tl.zeros((ROWS, 1), tl.int32)
    before = emit_part(out, kept, keys_0, zero, before, floor, num_equal, WIDTH, PART, ASM)
    before = emit_part(out, kept, keys_1, zero + PART, before, floor, num_equal, WIDTH, PART, ASM)
    before = emit_part(
        out, kept, keys_2, zero + 2 * PART, before, floor, num_equal, WIDTH, PART, ASM
    )
    emit_part(out, kept, keys_3, zero + 3 * PART, before, floor, num_equal, WIDTH, PART, ASM)
    return tl.where(held < K, threshold, score_of(lo))


@triton.jit
def pick_row(values, i, BLOCK_Q: tl.constexpr):
    return tl.sum(tl.where(tl.arange(0, BLOCK_Q) == i, values, 0))


@triton.jit(
    do_not_specialize=["T", "B", "N", "K", "table_stride"],
    do_not_specialize_on_alignment=[*DO_NOT_SPECIALIZE_ON_ALIGNMENT, "table"],
)
def _index_select_kernel(
    topk_positions, topk_lens, scores, kept, q, w, cache, table, query_start_loc, row_lens,
    T, B, N, K, q_token, q_head, w_token, page, row_stride, table_stride,
    HI: tl.constexpr, DI: tl.constexpr, BS: tl.constexpr, FORMAT: tl.constexpr, SLICE: tl.constexpr,
    SCALES: tl.constexpr, ALIGNED: tl.constexpr, ONE_BLOCK: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
    HOLD: tl.constexpr, ASM: tl.constexpr, UPCAST: tl.constexpr, STAGES: tl.constexpr,
    CHUNK: tl.constexpr, CAPACITY: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    STORED: tl.constexpr = Stored(BS, FORMAT, ONE_BLOCK, BLOCK_N)
    SCORING: tl.constexpr = Scoring(
        HI, DI, SLICE, SCALES, ALIGNED, BLOCK_Q, BLOCK_H, BLOCK_D, PRECISION, HOLD, ASM, UPCAST,
        dtype,
    )  # fmt: skip
    offs_q = tl.arange(0, BLOCK_Q)
    scores += tl.program_id(0).to(tl.int64) * (BLOCK_Q * CHUNK)
    kept += tl.program_id(0).to(tl.int64) * (BLOCK_Q * 2 * (CAPACITY + SPAN))
    tiles = tl.cdiv(T, BLOCK_Q)
    for i in tl.range(tl.program_id(0), tiles, tl.num_programs(0), disable_licm=True):
        first = (tiles - 1 - i) * BLOCK_Q
        t = first + offs_q
        lens = tl.load(row_lens + t, mask=t < T, other=0)
        tl.store(topk_lens + t, tl.minimum(lens, K), mask=t < T)
        held = tl.zeros([BLOCK_Q], tl.int32)
        threshold = tl.full([BLOCK_Q], float("nan"), tl.float32)  # nothing compares at or below it
        end = tl.minimum(first + BLOCK_Q, tl.load(query_start_loc + B))
        if (first < end) & (tl.max(lens, 0) > K):
            queries = Queries(q, q_token, q_head, w, w_token, first, T)
            q_first = load_queries(queries, 0, 0, SCORING)
            w_first = load_weights(queries, 0, SCORING)
            last = request_of(end - 1, query_start_loc, B)
            for b in range(request_of(first, query_start_loc, B), last + 1):
                owned = (t >= tl.load(query_start_loc + b)) & (t < tl.load(query_start_loc + b + 1))
                limits = tl.where(owned & (lens > K), lens, 0)  # shorter rows need no scores
                stop = tl.max(limits, 0)
                blocks = table + tl.cast(b, tl.int64) * table_stride
                pages = Pages(cache, N, page, row_stride, blocks)
                for start in tl.range(0, stop, CHUNK, disable_licm=True):
                    chunk_end = tl.minimum(start + CHUNK, stop)
                    for tile_start in tl.range(start, chunk_end, BLOCK_N, num_stages=STAGES):
                        j = tile_start + tl.arange(0, BLOCK_N)
                        chunk = Chunk(q_first, w_first)
                        tile = score_paged_keys(
                            pages, tile_start, j, stop, queries, chunk, STORED, SCORING
                        )
                        column = scores + (offs_q * CHUNK)[None, :]
                        scatter_all(column, (j - start)[:, None], tile, ASM)
                    tl.debug_barrier()  # reads scores that other threads wrote
                    seen = append_above(
                        kept, scores, start, chunk_end, limits, held, threshold, ASM, BLOCK_Q,
                        CHUNK, CAPACITY,
                    )  # fmt: skip
                    tl.debug_barrier()
                    if tl.max(seen, 0) > CAPACITY:
                        threshold = take_best(
                            None, kept, held, threshold, K, ASM, BLOCK_Q, CAPACITY
                        )
                        held = tl.minimum(held, K)
                        # reloaded: held across take_best() they would spill
                        w_first = load_weights(queries, 0, SCORING)
                        tl.debug_barrier()
                        seen = append_above(
                            kept, scores, start, chunk_end, limits, held, threshold, ASM, BLOCK_Q,
                            CHUNK, CAPACITY,
                        )  # fmt: skip
                        tl.debug_barrier()
                    held = seen
        out = topk_positions + first.to(tl.int64) * K
        take_best(out, kept, held, threshold, K, ASM, BLOCK_Q, CAPACITY)
        for row in range(BLOCK_Q):
            if (first + row < T) & (pick_row(held, row, BLOCK_Q) == 0):  # all of its keys
                first_positions(out + row * K, pick_row(lens, row, BLOCK_Q), K)
        tl.debug_barrier()  # before the next tile overwrites `kept`
