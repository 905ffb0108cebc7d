"""Latent attention of e4m3 queries over paged rows of 512 + 64 in fp8, one scale; Gluon, SM90.

Computes  what ops/mqa_paged.py says; query rows are tokens times heads, so that several tokens of a
          request share its keys, causal among themselves
Grid      (tiles of ROWS query rows of an item, programs): a persistent program works through the
          runs of its part, see _parts.py; programs of the same part read the same keys, from L2
Reads     q [T, H, 576] as words of four values, q_scale; rows through two TMA descriptors, in boxes
          of BOX rows by 32 words, and of the rope by 16, by the pages that table [B, M] names
Writes    out [T, H, 512] and lse [T, H] where an item is one run; else part and part_lse of a slot
          and, for the merge, spans [T, 3]

Four warp groups. One issues bulk copies of 64 keys into a ring of tiles. One multiplies queries and
keys in fp8, straight from shared memory, keeps the softmax and hands probs, in fp16, and what
rescales accumulators to the other two. Each of these owns half of the output's columns: it decodes
its half of the values from the ring into registers, which are WGMMA's first operand, so products
are transposed, values.T @ probs.T, and nothing decoded is stored. WGMMA takes two keys of a column
as one register: prmt pairs the bytes of two rows, and byte b of all words is one operand, which has
columns b, 4 + b, 8 + b, ... as its rows.
"""

from typing import Any, NamedTuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents

from openmla.backends.gluon import _paged as paged
from openmla.backends.gluon import _parts as parts
from openmla.backends.gluon import _primitives as primitives
from openmla.backends.triton._build import DO_NOT_SPECIALIZE_ON_ALIGNMENT
from openmla.backends.triton._versions import async_load, bulk_load, reinterpret

KEYS = gl.constexpr(64)  # of a tile
BLOCK_H = gl.constexpr(64)  # rows of queries that are scored: the fewest WGMMA takes
HALF_KEYS = gl.constexpr(32)  # decoded at once
SPAN_WORDS = gl.constexpr(32)  # of a bulk copy: one swizzle span
HALF_WORDS = gl.constexpr(64)  # of 256 columns
ROPE_WORDS = gl.constexpr(16)
ROW_BYTES = gl.constexpr(576)
STAGES = gl.constexpr(4)  # tiles of the ring
# The running max follows once it is off by so much: probs up to 2**8 are as exact in fp16, and
# accumulators are rarely rescaled.
SLACK = gl.constexpr(8.0)
WORDS = gl.constexpr(gl.NVMMASharedLayout(128, 32, 2))
VALUES = gl.constexpr(gl.NVMMASharedLayout(128, 8, 2))
NARROW_WORDS = gl.constexpr(gl.NVMMASharedLayout(64, 32, 2))
NARROW_VALUES = gl.constexpr(gl.NVMMASharedLayout(64, 8, 2))
PROBS = gl.constexpr(gl.NVMMASharedLayout(64, 16, 2))
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 32]))
HEADS = gl.constexpr(gl.SliceLayout(1, SCORES))
COPY = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0]))
COPY_ROPE = gl.constexpr(gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0]))
# Words of 32 keys where WGMMA's first operand wants their values, words for rows, keys for columns.
OPERAND_WORDS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[1, 0], [0, 8], [8, 0], [16, 0]],
        [[2, 0], [4, 0], [0, 1], [0, 2], [0, 4]],
        [[0, 16], [0, 32]], [], [32, 64],
    )
)  # fmt: skip


class Ring(NamedTuple):
    """Tiles of keys: columns 0 to 255, 256 to 511, rope; mbarriers of each tile."""

    left: Any
    right: Any
    rope: Any
    filled: Any
    read: Any


class Exchange(NamedTuple):
    """What the softmax hands over: probs of the first and last 32 keys of a tile and the rescaling
    factors, of two tiles; at the end of a run what accumulators are multiplied with."""

    first: Any
    last: Any
    rescale: Any
    probs_ready: Any
    probs_read: Any
    normalizer: Any
    sums_ready: Any
    sums_read: Any


@gluon.jit
def num_tiles(run):
    return gl.maximum(run.hi - run.lo + KEYS - 1, 0) // KEYS


@gluon.jit
def load_span(tile, q, run, first_row, q_token, q_head, first: gl.constexpr, NUM: gl.constexpr,
              H: gl.constexpr, ROWS: gl.constexpr, LAYOUT: gl.constexpr):  # fmt: skip
    """Rows past the item's, or the program's, are zeros. All are where there are no keys."""
    num_rows = gl.where(run.hi > run.lo, gl.minimum(run.num_rows - first_row, ROWS), 0)
    row = gl.arange(0, BLOCK_H, gl.SliceLayout(1, LAYOUT))
    own = first_row + row
    at = q + ((run.token + own // H).to(gl.int64) * q_token + (own % H) * q_head)[:, None]
    at += first + gl.arange(0, NUM, gl.SliceLayout(0, LAYOUT))[None, :]
    valid, at = gl.broadcast((row < num_rows)[:, None], at)
    async_load(tile, at, mask=valid)


@gluon.jit
def load_queries(queries, q, run, first_row, q_token, q_head, H: gl.constexpr, ROWS: gl.constexpr):
    for g in gl.static_range(2):
        load_span(queries[g], q, run, first_row, q_token, q_head, HALF_WORDS * g, HALF_WORDS, H,
                  ROWS, COPY)  # fmt: skip
    load_span(queries[2], q, run, first_row, q_token, q_head, 2 * HALF_WORDS, ROPE_WORDS, H, ROWS,
              COPY_ROPE)  # fmt: skip
    async_copy.commit_group()
    async_copy.wait_group(0)
    primitives.thread_barrier()
    fence_async_shared()


@gluon.jit
def as_half(words):
    return reinterpret(words, gl.float8e4nv, [KEYS, 4 * HALF_WORDS], VALUES)


@gluon.jit
def as_rope(words):
    return reinterpret(words, gl.float8e4nv, [KEYS, 4 * ROPE_WORDS], NARROW_VALUES)


@gluon.jit
def score_tile(queries, ring, stage):
    """Queries times keys; 64 rows by 64 keys."""
    scores = gl.zeros([BLOCK_H, KEYS], gl.float32, SCORES)
    keys = as_half(ring.left.index(stage)).permute((1, 0))
    scores = warpgroup_mma(as_half(queries[0]), keys, scores, use_acc=False, is_async=True)
    keys = as_half(ring.right.index(stage)).permute((1, 0))
    scores = warpgroup_mma(as_half(queries[1]), keys, scores, is_async=True)
    keys = as_rope(ring.rope.index(stage)).permute((1, 0))
    scores = warpgroup_mma(as_rope(queries[2]), keys, scores, is_async=True)
    return warpgroup_mma_wait(0, deps=(scores,))


@gluon.jit
def mask_keys(logits, first_key, run, first_row, H: gl.constexpr, FOLDED: gl.constexpr):
    """-inf for keys past the run or hidden from a row's token; most tiles have none."""
    if first_key + KEYS > gl.minimum(run.visible, run.hi):
        key = first_key + gl.arange(0, KEYS, gl.SliceLayout(0, SCORES))
        seen = (key < run.hi)[None, :]
        if FOLDED:
            row = first_row + gl.arange(0, BLOCK_H, HEADS)
            seen = key[None, :] < gl.minimum(run.visible + row // H, run.hi)[:, None]
        seen, logits = gl.broadcast(seen, logits)
        logits = gl.where(seen, logits, float("-inf"))
    return logits


@gluon.jit
def scale_rows(q_scale, qk_scale, run, row, valid, H: gl.constexpr, Q_SCALES: gl.constexpr):
    """What scores of query rows are multiplied with."""
    if Q_SCALES == 1:
        scale = gl.load(q_scale) + gl.zeros([BLOCK_H], gl.float32, HEADS)
    else:
        line = run.token.to(gl.int64) * H
        scale = gl.load(q_scale + line + row, mask=valid, other=0.0)
    return scale * qk_scale


@gluon.jit
def score_partition(
    queries, ring, exchange, q, q_scale, q_token, q_head, work, part, outputs, qk_scale, kv_scale,
    first_row, H: gl.constexpr, TOKENS: gl.constexpr, CAUSAL: gl.constexpr, FOLDED: gl.constexpr,
    FIXED: gl.constexpr, BLOCK_T: gl.constexpr, ROWS: gl.constexpr, Q_SCALES: gl.constexpr,
):  # fmt: skip
    """Scores and softmax of all tiles."""
    request, item, unit = part.request, part.item, part.unit
    step = 0
    for r in tl.range(0, part.num_runs, disable_licm=True):
        run = parts.find_run(work, part, r, request, item, unit, H, TOKENS, CAUSAL, FIXED)
        load_queries(queries, q, run, first_row, q_token, q_head, H, ROWS)
        lane = gl.arange(0, BLOCK_H, HEADS)
        row = first_row + lane
        valid = (row < run.num_rows) & (lane < ROWS)
        row_scale = scale_rows(q_scale, qk_scale, run, row, valid, H, Q_SCALES)
        running_max = gl.full([BLOCK_H], primitives.INITIAL_MAX, gl.float32, HEADS)
        running_sum = gl.zeros([BLOCK_H], gl.float32, HEADS)
        for i in tl.range(0, num_tiles(run), disable_licm=True):
            stage = step % STAGES
            mbarrier.wait(ring.filled.index(stage), (step // STAGES) & 1)
            scores = score_tile(queries, ring, stage)
            mbarrier.arrive(ring.read.index(stage), count=1)
            logits = scores * row_scale[:, None]
            logits = mask_keys(logits, run.lo + KEYS * i, run, first_row, H, FOLDED)
            tile_max = gl.max(logits, 1)
            new_max = gl.where(tile_max > running_max + SLACK, tile_max, running_max)
            rescale = gl.exp2(running_max - new_max)
            running_max = new_max
            probs = gl.exp2(logits - new_max[:, None])
            running_sum = running_sum * rescale + gl.sum(probs, 1)
            halves = gl.permute(
                gl.reshape(probs.to(gl.float16), [BLOCK_H, 2, HALF_KEYS]), (0, 2, 1)
            )
            first, last = gl.split(halves)
            buffer = step & 1
            mbarrier.wait(exchange.probs_read.index(buffer), ((step >> 1) & 1) ^ 1)
            exchange.first.index(buffer).store(first)
            exchange.last.index(buffer).store(last)
            exchange.rescale.index(buffer).store(rescale)
            fence_async_shared()
            mbarrier.arrive(exchange.probs_ready.index(buffer), count=1)
            step += 1
        _heads, lse, normalizer = primitives.normalize(
            running_max, running_sum, outputs.lse, 0, 1.0, H, False
        )
        mbarrier.wait(exchange.sums_read, (r & 1) ^ 1)
        exchange.normalizer.store(normalizer * kv_scale)
        mbarrier.arrive(exchange.sums_ready, count=1)
        if run.slot < 0:
            gl.store(outputs.lse + run.token.to(gl.int64) * H + row, lse, mask=valid)
        else:
            line = run.slot.to(gl.int64) * outputs.slot_rows
            gl.store(outputs.part_lse + line + row, lse, mask=valid)
        paged.store_spans(outputs, part, run, r, first_row, H, BLOCK_T, FIXED)
        request, item, unit = parts.next_run(work, request, item, unit, TOKENS, FIXED)


@gluon.jit
def pair_bytes(low, high, LAST: gl.constexpr):
    """Bytes 0 and 1, or 2 and 3, of words of two keys as fp16: byte by byte, first key, second."""
    pairs: gl.constexpr = "0x7362" if LAST else "0x5140"
    return gl.inline_asm_elementwise(
        """{
        .reg .b16 low, high;
        .reg .b32 t;
        prmt.b32 t, $4, $5, """ + pairs + """;
        mov.b32 {low, high}, t;
        cvt.rn.f16x2.e4m3x2 t, low;
        mov.b32 {$0, $1}, t;
        cvt.rn.f16x2.e4m3x2 t, high;
        mov.b32 {$2, $3}, t;
        }""",
        "=h,=h,=h,=h,r,r", [low, high],
        dtype=(gl.float16, gl.float16, gl.float16, gl.float16), is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def as_operand(even, odd, ACC: gl.constexpr):
    """Values of even and of odd keys [16, 64] as [64, 32], columns by keys."""
    values = gl.permute(gl.join(even, odd), (1, 0, 2))
    values = gl.reshape(values, [HALF_WORDS, HALF_KEYS])
    return gl.convert_layout(values, gl.DotOperandLayout(0, ACC, 2), assert_trivial=True)


@gluon.jit
def load_words(tile, first: gl.constexpr, num_keys):
    """Of 32 keys, zeros from num_keys on: pages may hold NaN there, and 0 * NaN is NaN."""
    words = tile.slice(first, HALF_KEYS, 0).load(OPERAND_WORDS)
    if first + HALF_KEYS > num_keys:
        key = first + gl.arange(0, HALF_KEYS, gl.SliceLayout(1, OPERAND_WORDS))
        valid, words = gl.broadcast((key < num_keys)[:, None], words)
        words = gl.where(valid, words, 0)
    return words


@gluon.jit
def decode(words, ACC: gl.constexpr):
    """The four operands of 32 keys, a byte of all words each."""
    apart = gl.permute(gl.reshape(words, [HALF_KEYS // 2, 2, HALF_WORDS]), (0, 2, 1))
    low, high = gl.split(apart)
    a, b, c, d = pair_bytes(low, high, False)
    e, f, g, h = pair_bytes(low, high, True)
    return (
        as_operand(a, b, ACC), as_operand(c, d, ACC), as_operand(e, f, ACC), as_operand(g, h, ACC)
    )  # fmt: skip


@gluon.jit
def multiply(values, probs, acc, ROWS: gl.constexpr):
    """Issue values.T @ probs.T of 32 keys."""
    probs = reinterpret(probs, gl.float16, [ROWS, HALF_KEYS], PROBS).permute((1, 0))
    added = ()
    for b in gl.static_range(4):
        added += (warpgroup_mma(values[b], probs, acc[b], is_async=True),)
    return added


@gluon.jit
def value_partition(
    half, ring, exchange, work, part, outputs, first_row, first: gl.constexpr, H: gl.constexpr,
    TOKENS: gl.constexpr, CAUSAL: gl.constexpr, FIXED: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """Half of the output's columns."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    request, item, unit = part.request, part.item, part.unit
    step = 0
    for r in tl.range(0, part.num_runs, disable_licm=True):
        run = parts.find_run(work, part, r, request, item, unit, H, TOKENS, CAUSAL, FIXED)
        acc = ()
        for _ in gl.static_range(4):
            acc += (gl.zeros([HALF_WORDS, ROWS], gl.float32, ACC),)
        for i in tl.range(0, num_tiles(run), disable_licm=True):
            stage = step % STAGES
            buffer = step & 1
            num_keys = run.hi - run.lo - KEYS * i
            mbarrier.wait(ring.filled.index(stage), (step // STAGES) & 1)
            tile = half.index(stage)
            values = decode(load_words(tile, 0, num_keys), ACC)
            mbarrier.wait(exchange.probs_ready.index(buffer), (step >> 1) & 1)
            rescale = exchange.rescale.index(buffer).slice(0, ROWS).load(gl.SliceLayout(0, ACC))
            if gl.min(rescale, 0) < 1.0:
                scaled = ()
                for b in gl.static_range(4):
                    scaled += (acc[b] * rescale[None, :],)
                acc = scaled
            added = multiply(values, exchange.first.index(buffer), acc, ROWS)
            words = load_words(tile, HALF_KEYS, num_keys)
            added = warpgroup_mma_wait(0, deps=added)
            mbarrier.arrive(ring.read.index(stage), count=1)
            added = multiply(decode(words, ACC), exchange.last.index(buffer), added, ROWS)
            acc = warpgroup_mma_wait(0, deps=added)
            mbarrier.arrive(exchange.probs_read.index(buffer), count=1)
            step += 1
        mbarrier.wait(exchange.sums_ready, r & 1)
        normalizer = exchange.normalizer.slice(0, ROWS).load(gl.SliceLayout(0, ACC))
        mbarrier.arrive(exchange.sums_read, count=1)
        store_output(acc, normalizer, outputs, run, first_row, first, H, ROWS)
        request, item, unit = parts.next_run(work, request, item, unit, TOKENS, FIXED)


@gluon.jit
def store_output(
    acc, normalizer, outputs, run, first_row, first: gl.constexpr, H: gl.constexpr,
    ROWS: gl.constexpr,
):  # fmt: skip
    """A thread has four columns of a row, one of each accumulator."""
    pairs = gl.join(gl.join(acc[0], acc[2]), gl.join(acc[1], acc[3]))
    values = gl.reshape(pairs, [HALF_WORDS, ROWS, 4])
    values = gl.reshape(gl.permute(values, (1, 0, 2)), [ROWS, 4 * HALF_WORDS])
    LAYOUT: gl.constexpr = values.type.layout
    values = values * gl.convert_layout(normalizer, gl.SliceLayout(1, LAYOUT))[:, None]
    if run.slot < 0:
        store_values(outputs.out, values, run.token.to(gl.int64) * H, run, first_row, first)
    else:
        line = run.slot.to(gl.int64) * outputs.slot_rows
        store_values(outputs.part, values, line, run, first_row, first)


@gluon.jit
def store_values(out, values, line, run, first_row, first: gl.constexpr):
    LAYOUT: gl.constexpr = values.type.layout
    row = first_row + gl.arange(0, values.shape[0], gl.SliceLayout(1, LAYOUT))
    columns = first + gl.arange(0, values.shape[1], gl.SliceLayout(0, LAYOUT))
    at = out + line * primitives.C + (row * primitives.C)[:, None] + columns[None, :]
    gl.store(at, values.to(out.dtype.element_ty), mask=(row < run.num_rows)[:, None])


@gluon.jit
def load_tile(ring, stage, rows, rope, keys, BOX: gl.constexpr):
    filled = ring.filled.index(stage)
    mbarrier.expect(filled, KEYS * ROW_BYTES)
    for b in gl.static_range(KEYS // BOX):
        for g in gl.static_range(2):
            left = ring.left.index(stage).slice(BOX * b, BOX, 0)
            right = ring.right.index(stage).slice(BOX * b, BOX, 0)
            bulk_load(rows, [keys[b], SPAN_WORDS * g], filled,
                      left.slice(SPAN_WORDS * g, SPAN_WORDS, 1))  # fmt: skip
            bulk_load(rows, [keys[b], HALF_WORDS + SPAN_WORDS * g], filled,
                      right.slice(SPAN_WORDS * g, SPAN_WORDS, 1))  # fmt: skip
        bulk_load(rope, [keys[b], 2 * HALF_WORDS], filled,
                  ring.rope.index(stage).slice(BOX * b, BOX, 0))  # fmt: skip


@gluon.jit
def load_partition(
    ring, rows, rope, table, table_stride, num_keys, work, part, H: gl.constexpr,
    TOKENS: gl.constexpr, CAUSAL: gl.constexpr, FIXED: gl.constexpr, BS: gl.constexpr,
    BOX: gl.constexpr,
):  # fmt: skip
    """Pages are looked up a tile ahead."""
    gdc_launch_dependents()  # the merge waits for all of this grid, but its launch need not
    request, item, unit = part.request, part.item, part.unit
    step = 0
    for r in tl.range(0, part.num_runs, disable_licm=True):
        run = parts.find_run(work, part, r, request, item, unit, H, TOKENS, CAUSAL, FIXED)
        pages = table + run.request.to(gl.int64) * table_stride
        blocks = paged.find_pages(pages, run.lo, run, BS, BOX)
        for i in tl.range(0, num_tiles(run), disable_licm=True):
            key = run.lo + KEYS * i
            keys = paged.find_keys(blocks, key, num_keys, BS, BOX)
            blocks = paged.find_pages(pages, key + KEYS, run, BS, BOX)
            stage = step % STAGES
            mbarrier.wait(ring.read.index(stage), ((step // STAGES) & 1) ^ 1)
            load_tile(ring, stage, rows, rope, keys, BOX)
            step += 1
        request, item, unit = parts.next_run(work, request, item, unit, TOKENS, FIXED)


@gluon.jit
def allocate_barriers(NUM: gl.constexpr, ARRIVALS: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [NUM, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUM):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
    return barriers


@gluon.jit
def allocate_ring():
    left = gl.allocate_shared_memory(gl.int32, [STAGES, KEYS, HALF_WORDS], WORDS)
    right = gl.allocate_shared_memory(gl.int32, [STAGES, KEYS, HALF_WORDS], WORDS)
    rope = gl.allocate_shared_memory(gl.int32, [STAGES, KEYS, ROPE_WORDS], NARROW_WORDS)
    return Ring(left, right, rope, allocate_barriers(STAGES, 1), allocate_barriers(STAGES, 3))


@gluon.jit
def allocate_exchange():
    first = gl.allocate_shared_memory(gl.float16, [2, BLOCK_H, HALF_KEYS], PROBS)
    last = gl.allocate_shared_memory(gl.float16, [2, BLOCK_H, HALF_KEYS], PROBS)
    rescale = gl.allocate_shared_memory(gl.float32, [2, BLOCK_H], primitives.LINE)
    normalizer = gl.allocate_shared_memory(gl.float32, [BLOCK_H], primitives.LINE)
    sums_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    sums_read = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(sums_ready, count=1)
    mbarrier.init(sums_read, count=2)
    return Exchange(
        first, last, rescale, allocate_barriers(2, 1), allocate_barriers(2, 2), normalizer,
        sums_ready, sums_read,
    )  # fmt: skip


@gluon.jit(
    do_not_specialize=paged.DO_NOT_SPECIALIZE,
    do_not_specialize_on_alignment=[*DO_NOT_SPECIALIZE_ON_ALIGNMENT, "table"],
)
def _paged_e4m3_kernel(
    q, q_scale, rows, rope, kv_scale, query_start_loc, seq_lens, table, out, lse, part, part_lse,
    spans, B, T, unit, qk_scale, q_token, q_head, table_stride, num_keys, slot_rows,
    BS: gl.constexpr, BOX: gl.constexpr, H: gl.constexpr, TOKENS: gl.constexpr,
    CAUSAL: gl.constexpr, FOLDED: gl.constexpr, FIXED: gl.constexpr, BLOCK_T: gl.constexpr,
    ROWS: gl.constexpr, Q_SCALES: gl.constexpr, VALUE_REGISTERS: gl.constexpr,
    SCORE_REGISTERS: gl.constexpr, LOAD_REGISTERS: gl.constexpr,
):  # fmt: skip
    first_row = gl.program_id(0) * ROWS
    kv_scale = gl.load(kv_scale)
    qk_scale = qk_scale.to(gl.float32) * kv_scale  # compiled graphs may hand it over as fp64
    queries = ()
    for _ in gl.static_range(2):
        queries += (gl.allocate_shared_memory(gl.int32, [BLOCK_H, HALF_WORDS], WORDS),)
    queries += (gl.allocate_shared_memory(gl.int32, [BLOCK_H, ROPE_WORDS], NARROW_WORDS),)
    ring = allocate_ring()
    exchange = allocate_exchange()
    fence_async_shared()
    work = parts.Work(query_start_loc, seq_lens, B, unit)
    p = gl.program_id(1)
    own = parts.find_part(work, p, gl.num_programs(1), TOKENS, FIXED)
    for t in range(gl.load(query_start_loc + B) + p, T, gl.num_programs(1)):  # nothing to merge
        gl.store(spans + 3 * t, 0)
        gl.store(spans + 3 * t + 1, -1)
    outputs = paged.Outputs(out, lse, part, part_lse, spans, slot_rows)
    LEFT: gl.constexpr = 0
    RIGHT: gl.constexpr = 256
    gl.warp_specialize(
        [
            (value_partition, (
                ring.left, ring, exchange, work, own, outputs, first_row, LEFT, H, TOKENS, CAUSAL,
                FIXED, ROWS,
            )),
            (value_partition, (
                ring.right, ring, exchange, work, own, outputs, first_row, RIGHT, H, TOKENS, CAUSAL,
                FIXED, ROWS,
            )),
            (score_partition, (
                queries, ring, exchange, q, q_scale, q_token, q_head, work, own, outputs, qk_scale,
                kv_scale, first_row, H, TOKENS, CAUSAL, FOLDED, FIXED, BLOCK_T, ROWS, Q_SCALES,
            )),
            (load_partition, (
                ring, rows, rope, table, table_stride, num_keys, work, own, H, TOKENS, CAUSAL,
                FIXED, BS, BOX,
            )),
        ],
        [4, 4, 4],
        [VALUE_REGISTERS, SCORE_REGISTERS, LOAD_REGISTERS],
    )  # fmt: skip
