"""Latent attention over paged rows of 512 + 64, 16 bits or fp8, 64 query rows a program; SM90.

Computes  what ops/mqa_paged.py says; query rows are tokens times heads, so that several tokens of a
          request share its keys, causal among themselves
Grid      (tiles of 64 rows of an item, programs): a persistent program works through the runs
          of its part, see _parts.py; programs of the same part read the same keys, from L2
Reads     q [T, H, 576]; rows by the pages that table [B, M] names: through a TMA descriptor, in
          boxes of BOX rows by 64 columns, or with ROW_WORDS > 0 fp8 as words
Writes    out [T, H, 512] and lse [T, H] where an item is one run; else part and part_lse of a slot
          and, for the merge, spans [T, 3]

A producer and two consumers follow the schedule that _many_heads.py draws, with these barriers:

    barrier                        who arrives                     who waits
    -----------------------------  ------------------------------  --------------------
    filled.even_left, .even_right  bulk copies, or the producer    even consumer
    filled.odd_left, .odd_right    bulk copies, or the producer    odd consumer
    copied, the same four halves   bulk copies of a run's end      producer
    READ, MAX, PROBS (named)       as drawn                        as drawn
    queries_ready, once a run      even consumer                   odd consumer
    sums_ready, once a run         both consumers                  both consumers
    ODD_STORED (named), as often   odd consumer                    even consumer

The producer issues bulk copies, or decodes (_rows_fp8.py). What pages hold behind the last key is
overwritten with zeros, in the last step of a run only: 0 * NaN is NaN. Where a run ends within a
box, the producer waits for that step's copies itself and then arrives at the halves' mbarriers.
"""

from typing import Any, NamedTuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
)
from triton.language.extra.cuda import gdc_launch_dependents

from openmla.backends.gluon import _barriers as named
from openmla.backends.gluon import _many_heads as many
from openmla.backends.gluon import _parts as parts
from openmla.backends.gluon import _primitives as primitives
from openmla.backends.gluon import _rows_fp8 as fp8
from openmla.backends.triton._build import DO_NOT_SPECIALIZE_ON_ALIGNMENT
from openmla.backends.triton._versions import async_load, bulk_load, reinterpret

BOX_COLUMNS = gl.constexpr(64)  # 128 bytes: one swizzle span
KEY_BYTES = gl.constexpr(2 * 64)  # of one column of a tile
DO_NOT_SPECIALIZE = ("B", "T", "unit", "table_stride", "num_keys", "slot_rows")


class Filled(NamedTuple):
    """mbarriers of tile halves."""

    even_left: Any
    even_right: Any
    odd_left: Any
    odd_right: Any


class Outputs(NamedTuple):
    out: Any
    lse: Any
    part: Any
    part_lse: Any
    spans: Any
    slot_rows: Any


@gluon.jit
def num_steps(run):
    """Without keys, one step of none: its rows get zeros and -inf."""
    return gl.maximum((run.hi - run.lo + many.STEP - 1) // many.STEP, 1)


@gluon.jit
def load_queries(queries, q, run, first_row, q_token, q_head, H: gl.constexpr):
    """Rows past the item's are zeros. All are where there are no keys: NaN queries would make
    scores of no keys NaN."""
    num_rows = gl.where(run.hi > run.lo, run.num_rows, 0)
    row = first_row + gl.arange(0, many.BLOCK_H, many.COPY_ROWS)
    at = q + ((run.token + row // H).to(gl.int64) * q_token + (row % H) * q_head)[:, None]
    half = at + gl.arange(0, many.HALF, gl.SliceLayout(0, many.COPY))[None, :]
    valid, half = gl.broadcast((row < num_rows)[:, None], half)
    async_load(queries.left, half, mask=valid)
    async_load(queries.right, half + many.HALF, mask=valid)
    rope = at + 2 * many.HALF
    rope += gl.arange(0, many.ROPE_COLUMNS, gl.SliceLayout(0, many.COPY))[None, :]
    valid, rope = gl.broadcast((row < num_rows)[:, None], rope)
    async_load(queries.rope, rope, mask=valid)
    async_copy.commit_group()
    async_copy.wait_group(0)
    primitives.thread_barrier()
    fence_async_shared()


@gluon.jit
def scale_of_rows(qk_scale, scales, FP8: gl.constexpr):
    """What scores are multiplied with; of fp8 rows each query row has its own."""
    if FP8:
        qk_scale = scales.index(0).load(many.HEADS)[:, None]
    return qk_scale


@gluon.jit
def mask_keys(logits, first_key, run, first_row, H: gl.constexpr, FOLDED: gl.constexpr):
    """-inf for keys past the run or hidden from a row's token; most tiles have none."""
    if first_key + many.BLOCK_N > gl.minimum(run.visible, run.hi):
        key = first_key + gl.arange(0, many.BLOCK_N, many.KEYS)
        seen = (key < run.hi)[None, :]
        if FOLDED:
            row = first_row + gl.arange(0, many.BLOCK_H, many.HEADS)
            visible = gl.minimum(run.visible + row // H, run.hi)
            seen = key[None, :] < visible[:, None]
        seen, logits = gl.broadcast(seen, logits)
        logits = gl.where(seen, logits, float("-inf"))
    return logits


@gluon.jit
def even_partition(
    queries, even, odd_left, exchange, scales, filled, queries_ready, sums_ready, q, q_token,
    q_head, work, part, outputs, qk_scale, kv_scale, first_row, H: gl.constexpr,
    TOKENS: gl.constexpr, CAUSAL: gl.constexpr, FOLDED: gl.constexpr, FIXED: gl.constexpr,
    BLOCK_T: gl.constexpr, FP8: gl.constexpr,
):  # fmt: skip
    """The even consumer: scores of even tiles, output columns 0 to 255."""
    request, item, unit = part.request, part.item, part.unit
    step = 0
    for r in tl.range(0, part.num_runs, disable_licm=True):
        run = parts.find_run(work, part, r, request, item, unit, H, TOKENS, CAUSAL, FIXED)
        zeros, acc, running_max, running_sum = many.initial_state()
        if parts.new_item(r, unit, FIXED):
            if FP8:
                fp8.load_queries(
                    queries, q, run, first_row, q_token, q_head, scales, qk_scale, kv_scale, H
                )
            else:
                load_queries(queries, q, run, first_row, q_token, q_head, H)
        mbarrier.arrive(queries_ready, count=1)
        for i in tl.range(0, num_steps(run), disable_licm=True):
            scores, more = many.even_scores(
                queries, even, zeros, filled.even_left, filled.even_right, step & 1,
                True, True, not FP8,
            )  # fmt: skip
            row_scale = scale_of_rows(qk_scale, scales, FP8)
            logits = many.wait_scores(scores, more, not FP8) * row_scale
            logits = mask_keys(logits, run.lo + many.STEP * i, run, first_row, H, FOLDED)
            acc, running_max, running_sum = many.even_update(
                logits, acc, running_max, running_sum, even.left, odd_left, exchange, 1
            )
            step += 1
        exchange.even_max.store(running_sum)
        mbarrier.arrive(sums_ready, count=1)
        mbarrier.wait(sums_ready, r & 1)
        running_sum += exchange.odd_max.load(many.HEADS)
        store_output(
            acc, running_sum, running_max, queries.left, scales, outputs, run, first_row, 0, H,
            FP8,
        )  # fmt: skip
        store_spans(outputs, part, run, r, first_row, H, BLOCK_T, FIXED)
        named.wait(named.ODD_STORED, 1)  # through the queries' other half
        request, item, unit = parts.next_run(work, request, item, unit, TOKENS, FIXED)


@gluon.jit
def odd_partition(
    queries, even_right, odd, exchange, scales, filled, queries_ready, sums_ready, work, part,
    outputs, qk_scale, first_row, H: gl.constexpr, TOKENS: gl.constexpr, CAUSAL: gl.constexpr,
    FOLDED: gl.constexpr, FIXED: gl.constexpr, FP8: gl.constexpr,
):  # fmt: skip
    """The odd consumer: scores of odd tiles, output columns 256 to 511."""
    request, item, unit = part.request, part.item, part.unit
    step = 0
    for r in tl.range(0, part.num_runs, disable_licm=True):
        run = parts.find_run(work, part, r, request, item, unit, H, TOKENS, CAUSAL, FIXED)
        zeros, acc, running_max, running_sum = many.initial_state()
        mbarrier.wait(queries_ready, r & 1)
        for i in tl.range(0, num_steps(run), disable_licm=True):
            scores, more = many.odd_scores(
                queries, odd, zeros, filled.odd_left, filled.odd_right, step & 1,
                True, True, not FP8,
            )  # fmt: skip
            row_scale = scale_of_rows(qk_scale, scales, FP8)
            logits = many.wait_scores(scores, more, not FP8) * row_scale
            first_key = run.lo + many.STEP * i + many.BLOCK_N
            logits = mask_keys(logits, first_key, run, first_row, H, FOLDED)
            acc, running_max, running_sum = many.odd_update(
                logits, acc, running_max, running_sum, even_right, odd.right, exchange, 1
            )
            step += 1
        exchange.odd_max.store(running_sum)
        mbarrier.arrive(sums_ready, count=1)
        mbarrier.wait(sums_ready, r & 1)
        running_sum += exchange.even_max.load(many.HEADS)
        store_output(
            acc, running_sum, running_max, queries.right, scales, outputs, run, first_row,
            many.HALF, H, FP8,
        )  # fmt: skip
        named.arrive(named.ODD_STORED, 1)
        request, item, unit = parts.next_run(work, request, item, unit, TOKENS, FIXED)


@gluon.jit
def store_output(
    acc, running_sum, running_max, tile, scales, outputs, run, first_row, first: gl.constexpr,
    H: gl.constexpr, FP8: gl.constexpr,
):  # fmt: skip
    """Half of the columns: of outputs, or of a slot for the merge."""
    _, lse, normalizer = primitives.normalize(
        running_max, running_sum, outputs.lse, 0, 1.0, H, False
    )
    if FP8:
        normalizer *= scales.index(1).load(many.HEADS)
        tile = reinterpret(tile, outputs.out.dtype.element_ty, [many.BLOCK_H, many.HALF], many.TILE)
    acc = acc * gl.convert_layout(normalizer, many.ACC_HEADS)[:, None]
    if run.slot < 0:
        line = run.token.to(gl.int64) * H
        if first == 0:
            store_lse(outputs.lse + line, lse, run, first_row)
        tile.store(acc.to(tile.dtype))  # through shared memory: coalesced stores
        store_half(outputs.out, tile.load(many.COPY), line, run, first_row, first, many.COPY)
    else:
        line = run.slot.to(gl.int64) * outputs.slot_rows
        if first == 0:
            store_lse(outputs.part_lse + line, lse, run, first_row)
        store_half(outputs.part, acc, line, run, first_row, first, many.ACC)


@gluon.jit
def store_lse(at, lse, run, first_row):
    row = first_row + gl.arange(0, many.BLOCK_H, many.HEADS)
    gl.store(at + row, lse, mask=row < run.num_rows)


@gluon.jit
def store_half(out, half, line, run, first_row, first: gl.constexpr, LAYOUT: gl.constexpr):
    row = first_row + gl.arange(0, many.BLOCK_H, gl.SliceLayout(1, LAYOUT))
    columns = first + gl.arange(0, many.HALF, gl.SliceLayout(0, LAYOUT))
    at = out + ((line + row) * primitives.C)[:, None] + columns[None, :]
    gl.store(at, half, mask=(row < run.num_rows)[:, None])


@gluon.jit
def store_spans(
    outputs, part, run, r, first_row, H: gl.constexpr, BLOCK_T: gl.constexpr, FIXED: gl.constexpr
):
    """What the merge has to know about an item's tokens."""
    index = part.index
    if FIXED:
        index += r
    i = gl.arange(0, BLOCK_T, parts.LAYOUT)
    valid = (i < run.num_rows // H) & (first_row == 0)
    at = outputs.spans + 3 * (run.token + i)
    gl.store(at, gl.zeros_like(i) + index, mask=valid & run.first)
    gl.store(at + 1, gl.zeros_like(i) + index, mask=valid & run.last)
    gl.store(at + 2, i, mask=valid & run.first)


@gluon.jit
def find_pages(table, first_key, run, BS: gl.constexpr, BOX: gl.constexpr):
    """Blocks of a tile's boxes, not used yet so that nothing waits for them; -1 past the run."""
    blocks = ()
    for g in gl.static_range(64 // BOX):
        key = first_key + BOX * g
        blocks += (gl.load(table + key // BS, mask=key < run.hi, other=-1),)
    return blocks


@gluon.jit
def find_keys(blocks, first_key, num_keys, BS: gl.constexpr, BOX: gl.constexpr):
    """Where boxes begin in the cache; past the run, behind all of it: bulk copies fill in zeros."""
    keys = ()
    for g in gl.static_range(64 // BOX):
        key = blocks[g] * BS + (first_key + BOX * g) % BS
        keys += (gl.where(blocks[g] >= 0, key, num_keys),)
    return keys


@gluon.jit
def load_columns(
    tile, rows, keys, first: gl.constexpr, COLUMNS: gl.constexpr, filled, BOX: gl.constexpr
):
    """A barrier comes before every copy, so that they are as wide as their descriptor allows."""
    WIDTH: gl.constexpr = rows.block_type.shape[1]
    for g in gl.static_range(64 // BOX):
        box = tile.slice(BOX * g, BOX, 0)
        for c in gl.static_range(COLUMNS // WIDTH):
            at = [keys[g], first + WIDTH * c]
            bulk_load(rows, at, filled, box.slice(WIDTH * c, WIDTH, 1))


@gluon.jit
def load_left(tile, rows, keys, filled, BOX: gl.constexpr):
    load_columns(tile.left, rows, keys, 0, many.HALF, filled, BOX)


@gluon.jit
def load_right(tile, rows, rope, keys, filled, BOX: gl.constexpr):
    load_columns(tile.right, rows, keys, many.HALF, many.HALF, filled, BOX)
    load_columns(tile.rope, rope, keys, 2 * many.HALF, many.ROPE_COLUMNS, filled, BOX)


@gluon.jit
def zero_rows(half, num):
    """Rows from num on."""
    row = gl.arange(0, many.BLOCK_N, many.COPY_ROWS)
    for c in gl.static_range(many.HALF // BOX_COLUMNS):
        columns = half.slice(BOX_COLUMNS * c, BOX_COLUMNS, 1)
        valid, values = gl.broadcast((row < num)[:, None], columns.load(many.COPY))
        columns.store(gl.where(valid, values, 0.0))


@gluon.jit
def load_step(even, odd, rows, rope, even_keys, odd_keys, filled, step, BOX: gl.constexpr):
    """Refill each half as soon as it was read."""
    LEFT: gl.constexpr = KEY_BYTES * many.HALF
    RIGHT: gl.constexpr = KEY_BYTES * (many.HALF + many.ROPE_COLUMNS)
    named.wait(named.EVEN_LEFT_READ, step)
    mbarrier.expect(filled.even_left, LEFT)
    load_left(even, rows, even_keys, filled.even_left, BOX)
    named.wait(named.ODD_RIGHT_READ, step)
    mbarrier.expect(filled.odd_right, RIGHT)
    load_right(odd, rows, rope, odd_keys, filled.odd_right, BOX)
    named.wait(named.EVEN_RIGHT_READ, step)
    mbarrier.expect(filled.even_right, RIGHT)
    load_right(even, rows, rope, even_keys, filled.even_right, BOX)
    named.wait(named.ODD_LEFT_READ, step)
    mbarrier.expect(filled.odd_left, LEFT)
    load_left(odd, rows, odd_keys, filled.odd_left, BOX)


@gluon.jit
def end_half(half, copied, filled, num, ends):
    """Hand half a tile over once it is copied, with zeros from row num on."""
    mbarrier.wait(copied, ends & 1)
    if (num > 0) & (num < many.BLOCK_N):
        zero_rows(half, num)
    fence_async_shared()
    mbarrier.arrive(filled, count=1)


@gluon.jit
def load_partition(
    even, odd, filled, copied, rows, rope, page, table, table_stride, num_keys, work, part,
    H: gl.constexpr, TOKENS: gl.constexpr, CAUSAL: gl.constexpr, FIXED: gl.constexpr,
    BS: gl.constexpr, BOX: gl.constexpr, ROW_WORDS: gl.constexpr,
):  # fmt: skip
    if ROW_WORDS > 0:
        fp8.decode_partition(
            even, odd, filled, rows, page, table, table_stride, work, part, H, TOKENS, CAUSAL,
            FIXED, BS, ROW_WORDS,
        )  # fmt: skip
    else:
        copy_partition(
            even, odd, filled, copied, rows, rope, table, table_stride, num_keys, work, part, H,
            TOKENS, CAUSAL, FIXED, BS, BOX,
        )  # fmt: skip


@gluon.jit
def copy_partition(
    even, odd, filled, copied, rows, rope, table, table_stride, num_keys, work, part,
    H: gl.constexpr, TOKENS: gl.constexpr, CAUSAL: gl.constexpr, FIXED: gl.constexpr,
    BS: gl.constexpr, BOX: gl.constexpr,
):  # fmt: skip
    """The producer. Half a tile is refilled as soon as it was read; pages are looked up a step
    ahead."""
    gdc_launch_dependents()  # the merge waits for all of this grid, but its launch need not
    request, item, unit = part.request, part.item, part.unit
    step = 0
    ends = 0
    for r in tl.range(0, part.num_runs, disable_licm=True):
        run = parts.find_run(work, part, r, request, item, unit, H, TOKENS, CAUSAL, FIXED)
        pages = table + run.request.to(gl.int64) * table_stride
        even_blocks = find_pages(pages, run.lo, run, BS, BOX)
        odd_blocks = find_pages(pages, run.lo + many.BLOCK_N, run, BS, BOX)
        for i in tl.range(0, num_steps(run), disable_licm=True):
            key = run.lo + many.STEP * i
            even_keys = find_keys(even_blocks, key, num_keys, BS, BOX)
            odd_keys = find_keys(odd_blocks, key + many.BLOCK_N, num_keys, BS, BOX)
            even_blocks = find_pages(pages, key + many.STEP, run, BS, BOX)
            odd_blocks = find_pages(pages, key + many.STEP + many.BLOCK_N, run, BS, BOX)
            # boxes past the run are zeros; in one that the run ends in there is something else
            tail = run.hi - key
            if (tail >= many.STEP) | (tail % BOX == 0):
                load_step(even, odd, rows, rope, even_keys, odd_keys, filled, step, BOX)
            else:
                load_step(even, odd, rows, rope, even_keys, odd_keys, copied, step, BOX)
                end_half(even.left, copied.even_left, filled.even_left, tail, ends)
                end_half(odd.right, copied.odd_right, filled.odd_right, tail - many.BLOCK_N, ends)
                end_half(even.right, copied.even_right, filled.even_right, tail, ends)
                end_half(odd.left, copied.odd_left, filled.odd_left, tail - many.BLOCK_N, ends)
                ends += 1
            step += 1
        request, item, unit = parts.next_run(work, request, item, unit, TOKENS, FIXED)
    many.wait_read(step)


@gluon.jit(
    do_not_specialize=DO_NOT_SPECIALIZE,
    do_not_specialize_on_alignment=[*DO_NOT_SPECIALIZE_ON_ALIGNMENT, "table"],
)
def _paged_kernel(
    q, rows, rope, kv_scale, query_start_loc, seq_lens, table, out, lse, part, part_lse, spans, B,
    T, unit, qk_scale, q_token, q_head, page, table_stride, num_keys, slot_rows,
    BS: gl.constexpr, BOX: gl.constexpr, H: gl.constexpr, TOKENS: gl.constexpr,
    CAUSAL: gl.constexpr, FOLDED: gl.constexpr, FIXED: gl.constexpr, BLOCK_T: gl.constexpr,
    ROW_WORDS: gl.constexpr, ODD_REGISTERS: gl.constexpr, LOAD_REGISTERS: gl.constexpr,
):  # fmt: skip
    FP8: gl.constexpr = ROW_WORDS > 0
    first_row = gl.program_id(0) * many.BLOCK_H
    qk_scale = qk_scale.to(gl.float32)  # inside a compiled graph it may arrive as fp64
    dtype: gl.constexpr = gl.float16 if FP8 else q.dtype.element_ty
    queries, even, odd = many.allocate_tiles(dtype)
    q_rope = gl.allocate_shared_memory(dtype, [64, 64], many.TILE)
    even_rope = gl.allocate_shared_memory(dtype, [64, 64], many.TILE)
    odd_rope = gl.allocate_shared_memory(dtype, [64, 64], many.TILE)
    odd_probs = gl.allocate_shared_memory(dtype, [64, 64], many.TILE)
    even_max, odd_max = many.allocate_head_lines(2)
    scales = even_max
    if FP8:  # of scores, and of values
        scales = gl.allocate_shared_memory(gl.float32, [2, many.BLOCK_H], primitives.LINE)
    queries_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    sums_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(queries_ready, count=1)
    mbarrier.init(sums_ready, count=2)
    halves = ()
    for i in gl.static_range(8):
        halves += (gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout()),)
        mbarrier.init(halves[i], count=1)
    fence_async_shared()
    filled = Filled(halves[0], halves[1], halves[2], halves[3])
    copied = Filled(halves[4], halves[5], halves[6], halves[7])
    queries = many.Tile(queries[0], queries[1], q_rope)
    even = many.Tile(even[0], even[1], even_rope)
    odd = many.Tile(odd[0], odd[1], odd_rope)
    # once scored, the rope of the even tile makes room for its probs
    exchange = many.Exchange(even_rope, odd_probs, even_max, even_max, odd_max, odd_max)
    work = parts.Work(query_start_loc, seq_lens, B, unit)
    p = gl.program_id(1)
    own = parts.find_part(work, p, gl.num_programs(1), TOKENS, FIXED)
    for t in range(gl.load(query_start_loc + B) + p, T, gl.num_programs(1)):  # nothing to merge
        gl.store(spans + 3 * t, 0)
        gl.store(spans + 3 * t + 1, -1)
    outputs = Outputs(out, lse, part, part_lse, spans, slot_rows)
    gl.warp_specialize(
        [
            (even_partition, (
                queries, even, odd.left, exchange, scales, filled, queries_ready, sums_ready, q,
                q_token, q_head, work, own, outputs, qk_scale, kv_scale, first_row, H, TOKENS,
                CAUSAL, FOLDED, FIXED, BLOCK_T, FP8,
            )),
            (odd_partition, (
                queries, even.right, odd, exchange, scales, filled, queries_ready, sums_ready, work,
                own, outputs, qk_scale, first_row, H, TOKENS, CAUSAL, FOLDED, FIXED, FP8,
            )),
            (load_partition, (
                even, odd, filled, copied, rows, rope, page, table, table_stride, num_keys, work,
                own, H, TOKENS, CAUSAL, FIXED, BS, BOX, ROW_WORDS,
            )),
        ],
        [4, 4],
        [ODD_REGISTERS, LOAD_REGISTERS],
    )  # fmt: skip
