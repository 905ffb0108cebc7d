"""index_select, Triton: the best keys of each token, chosen while they are scored.

Computes  what index_topk chooses of index_logits' scores (specification: ops/index_select.py)
Grid      (min(tiles of BLOCK_Q tokens, programs the machine holds),): one program owns a tile of
          tokens at a time, the last first: they see the most keys of a prompt
Reads     q_idx [T, HI, DI], w_idx [T, HI], cache [N, BS, W], block_table [B, M], row_lens [T]
Writes    topk_positions [T, K], rising whether asked to or not, topk_lens [T],
          scores [programs, BLOCK_Q, STRETCH], kept [programs, BLOCK_Q, 2, ROOM + SPAN], scratch
Limits    see why_not(), suits()

A token's keys come from left to right, a stretch at a time. Those whose scores beat the threshold
are kept, in order. When they are too many, the best K stay and the threshold is the least of them:
a later key has to beat it, as K that came before reach it. So the scores of a stretch are all that
is written and read again, by the same multiprocessor while they are in its caches.

Where tokens do not fill the machine by themselves, or all scores take little room, columns are
shared out instead: index_logits' and index_topk's own kernels, some rows after another.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from openmla.backends import Problem
from openmla.backends.triton import cache_write, index_logits, index_topk
from openmla.backends.triton._build import (
    PLANNED,
    TARGETS,
    Build,
    capability_of,
    cdiv,
)
from openmla.backends.triton._index import (
    FP8,
    Config,
    as_stored,
    load_queries,
    load_weights,
    stored_type,
)
from openmla.backends.triton._latent import request_of
from openmla.backends.triton.index_logits import score_tile
from openmla.backends.triton.index_topk import (
    HIGHEST,
    LANES,
    NOTHING,
    SPAN,
    first_positions,
    ordered_key,
    score_of,
)
from openmla.cache.format import get_format
from openmla.hardware import multiprocessors

SCORES = 64 << 20  # bytes held at once where scores are written down
ROOM = 4096  # keys kept of a token, twice K or more; half as many are scored between two looks
TOKENS = 4  # of a program, at most: what is kept of them passes through registers together
LONG = 48  # times K keys. H200: at 32 the other way is 1 to 5 % faster, at 64 this one 2 %
BUSY = 0.8  # share of the machine that tiles of tokens must keep busy


@triton.jit
def put(out, at, values, ASM: tl.constexpr):
    """Store 32-bit values at out + at, as they lie: tl.store would carry them to other threads
    first."""
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
    # Where it would be if keys lay evenly between; an end that stays counts half the next time.
    weight_lo = tl.full(lo.shape, 1.0, tl.float32)
    weight_hi = weight_lo
    moved = above  # the end that was: 1 or -1
    searching = (hi > lo + 1) & (reached > wanted)
    while tl.max(searching.to(tl.int32), 0) > 0:
        beyond = (reached - wanted + 0.5) * weight_lo
        short = (wanted - above - 0.5) * weight_hi
        width = (hi.to(tl.int64) - lo.to(tl.int64)).to(tl.float32)
        step = tl.where(searching, width * (beyond / (beyond + short)), 0.0)
        pivot = (lo.to(tl.int64) + step.to(tl.int64)).to(tl.int32)
        pivot = tl.minimum(tl.maximum(pivot, lo + 1), hi - 1)
        floor = pivot[:, None]
        counts = (keys_0 >= floor).to(tl.int32) + (keys_1 >= floor).to(tl.int32)
        counts += (keys_2 >= floor).to(tl.int32) + (keys_3 >= floor).to(tl.int32)
        count = tl.sum(counts, 1)
        enough = count >= wanted
        weight_lo = tl.where(enough, 1.0, tl.where(moved < 0, 0.5 * weight_lo, weight_lo))
        weight_hi = tl.where(enough, tl.where(moved > 0, 0.5 * weight_hi, weight_hi), 1.0)
        moved = tl.where(enough, 1, -1)
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
    do_not_specialize_on_alignment=[*PLANNED, "table"],
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


def why_not(problem: Problem) -> str | None:
    return index_logits.why_not(problem)


def run(
    q_idx: Tensor,
    w_idx: Tensor,
    cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    row_lens: Tensor,
    *,
    format: str,
    num_keys: int,
    K: int,
    sorted: bool,
) -> tuple[Tensor, Tensor]:
    T, HI, DI = q_idx.shape
    positions = row_lens.new_empty((T, K))
    lens = torch.empty_like(row_lens)
    if T == 0:
        return positions, lens
    capability = capability_of(q_idx.device)
    shape = index_logits.paged_shape(q_idx.dtype, format, HI, DI, capability)
    layout = cache_write.layout_of(format, DI, cut=DI)
    aligned = cache_write.is_aligned(cache, layout)
    config, constants = constants_of(
        shape, format, cache.shape[1], cdiv(T, max(block_table.shape[0], 1)), capability,
        aligned=aligned,
    )  # fmt: skip
    slots = slots_of(config) * max(multiprocessors(q_idx.device), 1)
    tiles = cdiv(T, constants["BLOCK_Q"])
    tensors = (q_idx, w_idx, cache, block_table, query_start_loc, row_lens)
    if not suits(T, num_keys, K, tiles, slots):
        in_turns(*tensors, positions, lens, format=format, num_keys=num_keys)
        return positions, lens
    programs = min(tiles, slots)
    rows = (programs, constants["BLOCK_Q"])
    scores = w_idx.new_empty((*rows, constants["STRETCH"]), dtype=torch.float32)
    kept = row_lens.new_empty((*rows, 2, constants["ROOM"] + SPAN.value))
    table = block_table if block_table.stride(1) == 1 else block_table.contiguous()
    _index_select_kernel[(programs,)](
        positions,
        lens,
        scores,
        kept,
        as_stored(q_idx, shape),
        w_idx,
        as_stored(cache, shape),
        table,
        query_start_loc.contiguous(),
        row_lens.contiguous(),
        T,
        block_table.shape[0],
        cache.shape[0],
        K,
        q_idx.stride(0),
        q_idx.stride(1),
        w_idx.stride(0),
        cache.stride(0),
        cache.stride(1),
        table.stride(0),
        **constants,
        num_warps=config.num_warps,
        num_stages=constants["STAGES"],
        enable_fp_fusion=True,
    )
    return positions, lens


def suits(T: int, num_keys: int, K: int, tiles: int, slots: int) -> bool:
    """Whether to choose while scoring: there is much to write otherwise, rows are so long that the
    first keys, of which most are kept and soon dropped, are few, and nobody waits long for the last
    tiles."""
    if 4 * T * num_keys <= SCORES or num_keys < LONG * K or ROOM < 2 * K:
        return False
    return tiles >= BUSY * slots * cdiv(tiles, slots)


def slots_of(config: Config) -> int:
    """Programs a multiprocessor holds, or is given one after another."""
    return 2 if config.columns == 256 else 4


def constants_of(
    shape: index_logits.Shape,
    format: str,
    BS: int,
    tokens: int,
    capability: int,
    *,
    aligned: bool,
) -> tuple[Config, dict[str, Any]]:
    config, constants = index_logits.constants_of(
        shape, format, BS, min(tokens, TOKENS), capability, aligned=aligned
    )
    del constants["FILL"]
    constants["ROOM"] = ROOM
    constants["STRETCH"] = ROOM // 2  # fits beside K
    return config, constants


def in_turns(
    q_idx: Tensor,
    w_idx: Tensor,
    cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    row_lens: Tensor,
    positions: Tensor,
    lens: Tensor,
    *,
    format: str,
    num_keys: int,
) -> None:
    """Scores of some rows, then their best, then more rows: turns of about equal size."""
    T = q_idx.shape[0]
    starts = torch.zeros_like(row_lens)
    turns = cdiv(T, max(SCORES // (4 * max(num_keys, 1)), 1))
    step = max(cdiv(T, max(turns, 1)), 1)
    for i in range(0, T, step):
        turn = slice(i, min(i + step, T))
        bounds = query_start_loc
        if step < T:
            bounds = query_start_loc.clamp(turn.start, turn.stop) - turn.start
        logits = index_logits.run(
            q_idx[turn],
            w_idx[turn],
            cache,
            block_table,
            bounds,
            row_lens[turn],
            format=format,
            num_keys=num_keys,
        )
        index_topk.choose_rows(logits, starts[turn], row_lens[turn], positions[turn], lens[turn])
        del logits  # before the next turn's


def builds() -> Iterator[Build]:
    """The models' heads; nothing is compiled for K."""
    for capability in TARGETS:
        for HI in (64, 32):
            yield select_build(capability, FP8, "index_fp8", HI, 128, 64)
        yield select_build(capability, torch.bfloat16, "index_bf16", 64, 128, 64)


def select_build(
    capability: int, dtype: torch.dtype, format: str, HI: int, DI: int, BS: int
) -> Build:
    shape = index_logits.paged_shape(dtype, format, HI, DI, capability)
    config, constants = constants_of(shape, format, BS, 4096, capability, aligned=True)
    types = {
        "scores": "*fp32",
        "kept": "*i32",
        "q": "*" + stored_type(dtype, shape),
        "w": "*fp32",
        "cache": "*" + stored_type(get_format(format).dtype, shape),
        **dict.fromkeys(
            ("topk_positions", "topk_lens", "table", "query_start_loc", "row_lens"), "*i32"
        ),
    }
    signature = {
        name: "constexpr" if name in constants else types.get(name, "i32")
        for name in _index_select_kernel.arg_names
    }
    return Build(
        f"select-{format}-{str(dtype)[6:]}-HI{HI}-DI{DI}-BS{BS}", _index_select_kernel,
        signature, constants, config.num_warps, constants["STAGES"], capability,
    )  # fmt: skip
