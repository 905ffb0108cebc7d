"""index_select's kernel: the best keys of each token, chosen while they are scored.

Computes  what index_topk chooses of index_logits' scores (specification: ops/index_select.py)
Grid      (min(tiles of BLOCK_Q tokens, programs the machine holds),): one program owns a tile of
          tokens at a time, the last first: they see the most keys of a prompt
Reads     q_idx [T, HI, DI], w_idx [T, HI], cache [N, BS, W], block_table [B, M], row_lens [T]
Writes    topk_positions [T, K], rising whether asked to or not, topk_lens [T],
          scores [programs, BLOCK_Q, STRETCH], kept [programs, BLOCK_Q, 2, ROOM + SPAN], scratch

A token's keys come from left to right, a stretch at a time. Those whose scores beat the threshold
are kept, in order. When they are too many, the best K stay and the threshold is the least of them:
a later key has to beat it, as K that came before reach it. So the scores of a stretch are all that
is written and read again, by the same multiprocessor while they are in its caches.
"""

from __future__ import annotations

import triton
import triton.language as tl

from openmla.backends.triton._build import DO_NOT_SPECIALIZE_ON_ALIGNMENT
from openmla.backends.triton._index import load_queries, load_weights
from openmla.backends.triton._latent import request_of
from openmla.backends.triton.index_logits import score_tile
from openmla.backends.triton.index_topk import (
    HIGHEST,
    LANES,
    NOTHING,
    SPAN,
    first_positions,
    middle,
    ordered_key,
    score_of,
)


@triton.jit
def put(out, at, values, ASM: tl.constexpr):
    """Store 32-bit values at out + at, as they lie: tl.store would carry them to other threads
    first, index_topk.scatter() hold a pointer to each."""
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
def put_where(out, at, flags, values, ASM: tl.constexpr):
    """The same where flags are not zero."""
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
def put_pairs(out, at, flags, positions, scores, WIDTH: tl.constexpr, ASM: tl.constexpr):
    """The same for scores and, WIDTH further, positions."""
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
    """Four times LANES of each row."""
    return (
        tl.load(scores), tl.load(scores + LANES), tl.load(scores + 2 * LANES),
        tl.load(scores + 3 * LANES),
    )  # fmt: skip


@triton.jit
def better_flags(values, j, ends, cut):
    """Which are not at or below the cut: four counts in one, each of at most LANES."""
    flags = tl.where((j < ends) & ~(values[0] <= cut), 1, 0)
    flags += tl.where((j + LANES < ends) & ~(values[1] <= cut), 1 << 8, 0)
    flags += tl.where((j + 2 * LANES < ends) & ~(values[2] <= cut), 1 << 16, 0)
    return flags + tl.where((j + 3 * LANES < ends) & ~(values[3] <= cut), 1 << 24, 0)


@triton.jit
def put_span(kept, seen, values, j, flags, ROOM: tl.constexpr, ASM: tl.constexpr):
    """Append them; the new numbers. Beyond ROOM the last places are written over."""
    WIDTH: tl.constexpr = ROOM + SPAN
    ranks = tl.cumsum(flags, 1)
    totals = tl.sum(flags, 1, keep_dims=True)
    to = kept + tl.minimum(seen, ROOM)
    for i in tl.static_range(4):
        at = (ranks >> (8 * i)) & 255
        put_pairs(to, at, flags & (1 << (8 * i)), j + i * LANES, values[i], WIDTH, ASM)
        to += (totals >> (8 * i)) & 255
    pairs = (totals & 0xFF00FF) + ((totals >> 8) & 0xFF00FF)
    return seen + (pairs & 0xFFFF) + (pairs >> 16)


@triton.jit
def keep_better(
    kept, scores, start, stop, ends, held, cut,
    ASM: tl.constexpr, BLOCK_Q: tl.constexpr, STRETCH: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """Append what is not at or below each row's cut, of keys start to stop - 1; the new numbers of
    those held. What is beyond ROOM is not kept."""
    row = tl.arange(0, BLOCK_Q)[:, None]
    lane = tl.arange(0, LANES)[None, :]
    ends, cut, seen = ends[:, None], cut[:, None], held[:, None]
    scores += row * STRETCH + lane
    kept += row * (2 * (ROOM + SPAN)) - 1
    for first in range(start, stop, 2 * SPAN):
        j = first + lane
        values, more = load_span(scores), load_span(scores + SPAN)
        flags = better_flags(values, j, ends, cut)
        more_flags = better_flags(more, j + SPAN, ends, cut)
        seen = put_span(kept, seen, values, j, flags, ROOM, ASM)
        seen = put_span(kept, seen, more, j + SPAN, more_flags, ROOM, ASM)
        scores += 2 * SPAN
    return tl.sum(seen, 1)


@triton.jit
def load_keys(kept, first, count, PART: tl.constexpr):
    """Ordered keys of PART scores; of what is not there, less than any."""
    offs = first + tl.arange(0, PART)[None, :]
    scores = tl.load(kept + offs).to(tl.float32, bitcast=True)
    keys = ordered_key(tl.where(scores == scores, scores, float("-inf")))
    return tl.where(offs < count, keys, NOTHING)


@triton.jit
def least(keys):
    return tl.min(tl.where(keys == NOTHING, HIGHEST, keys), 1)


@triton.jit
def cut_keys(keys_0, keys_1, keys_2, keys_3, held, wanted):
    """The wanted-th highest of each row's `held` keys, and how many are above: those that reach it
    are taken before its equals are. Rows are searched side by side: a warp reads its own."""
    lo = tl.minimum(
        tl.minimum(least(keys_0), least(keys_1)), tl.minimum(least(keys_2), least(keys_3))
    )
    hi = 1 + tl.max(tl.maximum(tl.maximum(keys_0, keys_1), tl.maximum(keys_2, keys_3)), 1)
    reached = held  # keys at or above lo, `wanted` or more
    above = tl.zeros(lo.shape, tl.int32)  # at or above hi, fewer
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
def put_part(
    out, kept, keys, first, before, floor, room,
    WIDTH: tl.constexpr, PART: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Those above the floor and the first `room` equals, of PART: see take_best(). How many were
    above until now, and in the upper half equal."""
    positions = tl.load(kept + WIDTH + first + tl.arange(0, PART)[None, :])
    # two counts in one, each of at most PART
    flags = tl.where(keys > floor, 1, tl.where((keys == floor) & (keys > NOTHING), 65536, 0))
    ranks = before + tl.cumsum(flags, 1)
    at = (ranks & 65535) + tl.minimum(ranks >> 16, room) - 1
    chosen = (flags == 1) | ((flags > 1) & ((ranks >> 16) <= room))
    if out is None:
        tl.debug_barrier()  # all is read that is written over
        put_pairs(kept, at, chosen.to(tl.int32), positions, score_of(keys), WIDTH, ASM)
    else:
        put_where(out, at, chosen.to(tl.int32), positions, ASM)
    return before + tl.sum(flags, 1, keep_dims=True)


@triton.jit
def take_best(
    out, kept, held, cut, K, ASM: tl.constexpr, ROWS: tl.constexpr, ROOM: tl.constexpr
):  # fmt: skip
    """The K best of each row's, of equals the first, in order: positions into `out`, or where there
    is no out, themselves to the front. The new cuts; rows of fewer than K stay as they are."""
    WIDTH: tl.constexpr = ROOM + SPAN
    PART: tl.constexpr = ROOM // 4
    kept += tl.arange(0, ROWS)[:, None] * (2 * WIDTH)
    if out is not None:
        out += tl.arange(0, ROWS)[:, None].to(tl.int64) * K
    count = held[:, None]
    # zero, which the compiler does not know: it would hold offsets in registers that are scarce
    zero = tl.multiple_of(tl.minimum(tl.max(held, 0), 0), 16)
    keys_0 = load_keys(kept, zero, count, PART)
    keys_1 = load_keys(kept, zero + PART, count, PART)
    keys_2 = load_keys(kept, zero + 2 * PART, count, PART)
    keys_3 = load_keys(kept, zero + 3 * PART, count, PART)
    wanted = tl.minimum(held, K)
    lo, above = cut_keys(keys_0, keys_1, keys_2, keys_3, held, wanted)
    floor, room = lo[:, None], (wanted - above)[:, None]
    before = tl.zeros((ROWS, 1), tl.int32)
    before = put_part(out, kept, keys_0, zero, before, floor, room, WIDTH, PART, ASM)
    before = put_part(out, kept, keys_1, zero + PART, before, floor, room, WIDTH, PART, ASM)
    before = put_part(out, kept, keys_2, zero + 2 * PART, before, floor, room, WIDTH, PART, ASM)
    put_part(out, kept, keys_3, zero + 3 * PART, before, floor, room, WIDTH, PART, ASM)
    return tl.where(held < K, cut, score_of(lo))


@triton.jit
def of_row(values, i, BLOCK_Q: tl.constexpr):
    return tl.sum(tl.where(tl.arange(0, BLOCK_Q) == i, values, 0))


@triton.jit(
    do_not_specialize=["T", "B", "N", "K", "table_stride"],
    do_not_specialize_on_alignment=[*DO_NOT_SPECIALIZE_ON_ALIGNMENT, "table"],
)
def _index_select_kernel(
    topk_positions, topk_lens, scores, kept, q, w, cache, table, query_start_loc, row_lens,
    T, B, N, K, q_token, q_head, w_token, page, row_stride, table_stride,
    HI: tl.constexpr, DI: tl.constexpr, BS: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr,
    SCALES: tl.constexpr, ALIGNED: tl.constexpr, ONE_BLOCK: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
    HOLD: tl.constexpr, ASM: tl.constexpr, UPCAST: tl.constexpr, STAGES: tl.constexpr,
    STRETCH: tl.constexpr, ROOM: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    offs_q = tl.arange(0, BLOCK_Q)
    scores += tl.program_id(0).to(tl.int64) * (BLOCK_Q * STRETCH)
    kept += tl.program_id(0).to(tl.int64) * (BLOCK_Q * 2 * (ROOM + SPAN))
    tiles = tl.cdiv(T, BLOCK_Q)
    for i in tl.range(tl.program_id(0), tiles, tl.num_programs(0), disable_licm=True):
        first = (tiles - 1 - i) * BLOCK_Q
        t = first + offs_q
        lens = tl.load(row_lens + t, mask=t < T, other=0)
        tl.store(topk_lens + t, tl.minimum(lens, K), mask=t < T)
        held = tl.zeros([BLOCK_Q], tl.int32)
        cut = tl.full([BLOCK_Q], float("nan"), tl.float32)  # nothing is at or below it
        end = tl.minimum(first + BLOCK_Q, tl.load(query_start_loc + B))
        if (first < end) & (tl.max(lens, 0) > K):
            q_first = load_queries(
                q, first, T, q_token, q_head, 0, 0, GROUP, HI, BLOCK_Q, BLOCK_H, BLOCK_D, ASM,
                dtype,
            )  # fmt: skip
            w_first = load_weights(w, first, T, w_token, 0, HI, BLOCK_Q, BLOCK_H)
            last = request_of(end - 1, query_start_loc, B)
            for b in range(request_of(first, query_start_loc, B), last + 1):
                mine = (t >= tl.load(query_start_loc + b)) & (t < tl.load(query_start_loc + b + 1))
                ends = tl.where(mine & (lens > K), lens, 0)  # shorter rows are chosen whole
                stop = tl.max(ends, 0)
                blocks = table + tl.cast(b, tl.int64) * table_stride
                for start in tl.range(0, stop, STRETCH, disable_licm=True):
                    pause = tl.minimum(start + STRETCH, stop)
                    for here in tl.range(start, pause, BLOCK_N, num_stages=STAGES):
                        j = here + tl.arange(0, BLOCK_N)
                        total = score_tile(
                            cache, blocks, here, j, stop, N, page, row_stride, q, q_first, q_token,
                            q_head, w, w_first, w_token, first, T, HI, DI, BS, KIND, GROUP, SCALES,
                            ALIGNED, ONE_BLOCK, BLOCK_Q, BLOCK_H, BLOCK_N, BLOCK_D, PRECISION,
                            HOLD, ASM, UPCAST, dtype,
                        )  # fmt: skip
                        column = scores + (offs_q * STRETCH)[None, :]
                        put(column, (j - start)[:, None], total, ASM)
                    tl.debug_barrier()  # other threads wrote what is read
                    seen = keep_better(
                        kept, scores, start, pause, ends, held, cut, ASM, BLOCK_Q, STRETCH,
                        ROOM,
                    )  # fmt: skip
                    tl.debug_barrier()
                    if tl.max(seen, 0) > ROOM:
                        cut = take_best(None, kept, held, cut, K, ASM, BLOCK_Q, ROOM)
                        held = tl.minimum(held, K)
                        # read again rather than held meanwhile: registers are scarce there
                        w_first = load_weights(w, first, T, w_token, 0, HI, BLOCK_Q, BLOCK_H)
                        tl.debug_barrier()
                        seen = keep_better(
                            kept, scores, start, pause, ends, held, cut, ASM, BLOCK_Q,
                            STRETCH, ROOM,
                        )  # fmt: skip
                        tl.debug_barrier()
                    held = seen
        out = topk_positions + first.to(tl.int64) * K
        take_best(out, kept, held, cut, K, ASM, BLOCK_Q, ROOM)
        for row in range(BLOCK_Q):
            if (first + row < T) & (of_row(held, row, BLOCK_Q) == 0):  # chosen whole
                first_positions(out + row * K, of_row(lens, row, BLOCK_Q), K, 512)
        tl.debug_barrier()  # before the next tile's are kept
