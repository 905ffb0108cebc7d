"""Latent attention of few query rows over paged rows of 512 + 64 in fp8, one scale; Gluon, SM90.

Computes  what ops/mqa_paged.py says; query rows are tokens times heads, so that several tokens of a
          request share its keys, causal among themselves
Grid      (tiles of 16 query rows of an item, programs): a persistent program works through the
          runs of its part, see _parts.py; programs of the same part read the same keys, from L2
Reads     q [T, H, 576]; rows, four values a word, through a TMA descriptor, in boxes of BOX rows by
          16 words, by the pages that table [B, M] names
Writes    out [T, H, 512] and lse [T, H] where an item is one run; else part and part_lse of a slot
          and, for the merge, spans [T, 3]

Products are transposed, keys @ q.T and values.T @ probs: WGMMA takes 64 rows of its first operand,
which keys fill and few query rows would not. Two warp groups take a run's tiles of 64 keys in turn,
each with a softmax of its own, and merge at the end of the run; the third issues bulk copies. Keys
go from shared memory through the decoder into the first product's registers; the same registers are
stored once more, as fp16 values (_rows_fp8.py says why). A lane loads 16 columns, of which WGMMA
wants 2 at a time, so columns of keys and of queries are permuted alike.
"""

from typing import Any, NamedTuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents

from openmla.backends.gluon import _barriers as named
from openmla.backends.gluon import _paged as paged
from openmla.backends.gluon import _parts as parts
from openmla.backends.gluon import _primitives as primitives
from openmla.backends.gluon import _rows_fp8 as fp8
from openmla.backends.triton._build import DO_NOT_SPECIALIZE_ON_ALIGNMENT
from openmla.backends.triton._versions import bulk_load, reinterpret

SPAN = gl.constexpr(64)  # columns of one product
SPAN_WORDS = gl.constexpr(16)
SPANS = gl.constexpr(9)
VALUE_SPANS = gl.constexpr(8)  # the last span is the rope
LEFT_SPANS = gl.constexpr(4)  # copied together
RIGHT_SPANS = gl.constexpr(5)  # with the rope
KEYS = gl.constexpr(64)  # of a tile
ROWS = gl.constexpr(16)  # of queries
KEY_BYTES = gl.constexpr(64)  # of a span
TILE = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
RAW = gl.constexpr(gl.NVMMASharedLayout(64, 32, 2))
PROBS = gl.constexpr(gl.NVMMASharedLayout(32, 16, 2))
MMA = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16]))
# A warp has 16 keys, as in WGMMA's first operand; a lane 4 words of 2 keys, 16 bytes each.
WORDS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0]],
        [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]], [], [64, 16],
    )
)  # fmt: skip
ROW = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))


class Group(NamedTuple):
    """What a warp group has of its own: a tile of values, its raw spans, mbarriers of their two
    parts, probs, and lines for the merge."""

    tile: Any
    raw: Any
    left_filled: Any
    right_filled: Any
    probs: Any
    max_line: Any
    sum_line: Any


@gluon.jit
def permute_columns(tile):
    """Column 16 j + 4 s + 2 h + e to 16 s + 8 h + 2 j + e: lane j of four has j's 16 columns, WGMMA
    wants 2 of it at a time."""
    apart = gl.reshape(tile, [tile.shape[0], 4, 4, 2, 2])
    return gl.reshape(gl.permute(apart, (0, 2, 3, 1, 4)), [tile.shape[0], SPAN])


@gluon.jit
def load_queries(queries, q, run, first_row, q_token, q_head, ODD: gl.constexpr, H: gl.constexpr):
    """Each group stores half of the spans; returns what undoes their scales."""
    at, valid = fp8.query_spans(q, run, first_row, q_token, q_head, H, ROWS, ROW)
    scale, inverse = fp8.scale_rows(at, valid)
    for g in gl.static_range(SPANS):
        if g % 2 == ODD:
            queries[g].store(permute_columns(fp8.load_span(at, valid, scale, g)))
    fence_async_shared()
    return gl.convert_layout(inverse, gl.SliceLayout(0, MMA))


@gluon.jit
def zero_rows(raw, first: gl.constexpr, num: gl.constexpr, keys):
    """Keys from `keys` on, of some spans: pages may hold NaN there, and 0 * NaN is NaN."""
    key = gl.arange(0, KEYS, gl.SliceLayout(1, WORDS))
    for i in gl.static_range(num):
        valid, words = gl.broadcast((key < keys)[:, None], raw[first + i].load(WORDS))
        raw[first + i].store(gl.where(valid, words, 0))
    fence_async_shared()


@gluon.jit
def score_span(scores, raw, query, values, ROPE: gl.constexpr):
    """Adds the product of one span of keys and queries, and leaves it in values."""
    a, b, c, d = fp8.decode_values(raw.load(WORDS))
    span = gl.reshape(gl.join(gl.join(a, c), gl.join(b, d)), [KEYS, SPAN])
    if not ROPE:
        values.store(span)
    keys = permute_columns(span)
    keys = gl.convert_layout(keys, gl.DotOperandLayout(0, MMA, 2), assert_trivial=True)
    scores = warpgroup_mma(keys, query.permute((1, 0)), scores, is_async=True)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    return scores


@gluon.jit
def mask_keys(logits, first_key, run, first_row, H: gl.constexpr, FOLDED: gl.constexpr):
    """-inf for keys past the run or hidden from a row's token; most tiles have none."""
    if first_key + KEYS > gl.minimum(run.visible, run.hi):
        key = first_key + gl.arange(0, KEYS, gl.SliceLayout(1, MMA))
        seen = (key < run.hi)[:, None]
        if FOLDED:
            row = first_row + gl.arange(0, ROWS, gl.SliceLayout(0, MMA))
            seen = key[:, None] < gl.minimum(run.visible + row // H, run.hi)[None, :]
        seen, logits = gl.broadcast(seen, logits)
        logits = gl.where(seen, logits, float("-inf"))
    return logits


@gluon.jit
def as_partial(tile, i: gl.constexpr):
    """Shared memory of half a span of values as an accumulator of one span."""
    LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    two = reinterpret(tile[i // 2], gl.float32, [2 * SPAN, ROWS], LAYOUT)
    return two.slice(i % 2 * SPAN, SPAN, 0)


@gluon.jit
def merge_groups(acc, running_max, running_sum, own, other, ODD: gl.constexpr):
    """Both groups' results of a run; each ends with half of the columns, the even one the left."""
    HALF: gl.constexpr = VALUE_SPANS // 2
    for i in gl.static_range(HALF):
        as_partial(own.tile, i).store(acc[HALF * (1 - ODD) + i])
    own.max_line.store(running_max)
    own.sum_line.store(running_sum)
    named.wait(named.SHARED, 1)
    other_max = other.max_line.load(gl.SliceLayout(0, MMA))
    new_max = gl.maximum(running_max, other_max)
    rescale, other_rescale = gl.exp2(running_max - new_max), gl.exp2(other_max - new_max)
    other_sum = other.sum_line.load(gl.SliceLayout(0, MMA))
    merged = ()
    for i in gl.static_range(HALF):
        partial = as_partial(other.tile, i).load(MMA)
        merged += (acc[HALF * ODD + i] * rescale[None, :] + partial * other_rescale[None, :],)
    named.wait(named.SHARED, 1)  # values are free again, and so are queries
    return merged, new_max, running_sum * rescale + other_sum * other_rescale


@gluon.jit
def store_output(acc, tile, out, line, run, first_row, first: gl.constexpr):
    """Half of the columns; through shared memory tiles of [columns, rows] become rows."""
    row = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, ROW))
    at = out + ((line + row) * primitives.C)[:, None] + first
    at += gl.arange(0, SPAN, gl.SliceLayout(0, ROW))[None, :]
    for i in gl.static_range(len(acc)):
        as_partial(tile, i).store(acc[i])
    for i in gl.static_range(len(acc)):
        values = as_partial(tile, i).permute((1, 0)).load(ROW).to(out.dtype.element_ty)
        gl.store(at + SPAN * i, values, mask=(row < run.num_rows)[:, None])


@gluon.jit
def attend_partition(
    queries, own, other, q, q_token, q_head, work, part, outputs, qk_scale, kv_scale, first_row,
    LEFT_READ: gl.constexpr, RIGHT_READ: gl.constexpr, ODD: gl.constexpr, H: gl.constexpr,
    TOKENS: gl.constexpr, CAUSAL: gl.constexpr, FOLDED: gl.constexpr, FIXED: gl.constexpr,
    BLOCK_T: gl.constexpr,
):  # fmt: skip
    """Every other tile of a run, all columns; of the output half of them."""
    first: gl.constexpr = SPAN * VALUE_SPANS // 2 * ODD
    request, item, unit = part.request, part.item, part.unit
    step = 0
    row_scale = gl.zeros([ROWS], gl.float32, gl.SliceLayout(0, MMA))
    for r in tl.range(0, part.num_runs, disable_licm=True):
        run = parts.find_run(work, part, r, request, item, unit, H, TOKENS, CAUSAL, FIXED)
        if parts.new_item(r, unit, FIXED):
            row_scale = qk_scale * load_queries(queries, q, run, first_row, q_token, q_head, ODD, H)
        acc = ()
        for _ in gl.static_range(VALUE_SPANS):
            acc += (gl.zeros([SPAN, ROWS], gl.float32, MMA),)
        running_max = gl.full([ROWS], primitives.INITIAL_MAX, gl.float32, gl.SliceLayout(0, MMA))
        running_sum = gl.zeros([KEYS, ROWS], gl.float32, MMA)
        named.wait(named.SHARED, 1)  # the other group's half of the queries
        for first_key in tl.range(run.lo + KEYS * ODD, run.hi, 2 * KEYS, disable_licm=True):
            scores = gl.zeros([KEYS, ROWS], gl.float32, MMA)
            mbarrier.wait(own.left_filled, step & 1)
            if first_key + KEYS > run.hi:
                zero_rows(own.raw, 0, LEFT_SPANS, run.hi - first_key)
            for g in gl.static_range(LEFT_SPANS):
                scores = score_span(scores, own.raw[g], queries[g], own.tile[g], False)
            named.arrive(LEFT_READ, 1)
            mbarrier.wait(own.right_filled, step & 1)
            if first_key + KEYS > run.hi:
                zero_rows(own.raw, LEFT_SPANS, RIGHT_SPANS, run.hi - first_key)
            for g in gl.static_range(LEFT_SPANS, VALUE_SPANS):
                scores = score_span(scores, own.raw[g], queries[g], own.tile[g], False)
            scores = score_span(
                scores, own.raw[VALUE_SPANS], queries[VALUE_SPANS], own.tile[0], True
            )
            named.arrive(RIGHT_READ, 1)
            step += 1
            logits = scores * row_scale[None, :]
            logits = mask_keys(logits, first_key, run, first_row, H, FOLDED)
            new_max = gl.maximum(running_max, gl.max(logits, 0))
            rescale = gl.exp2(running_max - new_max)
            running_max = new_max
            probs = gl.exp2(logits - new_max[None, :])
            running_sum = running_sum * rescale[None, :] + probs
            own.probs.store(probs.to(gl.float16))
            fence_async_shared()
            added = ()
            for g in gl.static_range(VALUE_SPANS):
                scaled = acc[g] * rescale[None, :]
                added += (
                    warpgroup_mma(own.tile[g].permute((1, 0)), own.probs, scaled, is_async=True),
                )
            acc = warpgroup_mma_wait(0, deps=added)
        half, row_max, row_sum = merge_groups(
            acc, running_max, gl.sum(running_sum, 0), own, other, ODD
        )
        _heads, row_lse, normalizer = primitives.normalize(
            row_max, row_sum, outputs.lse, 0, 1.0, H, False
        )
        normalized = ()
        for i in gl.static_range(VALUE_SPANS // 2):
            normalized += (half[i] * (normalizer * kv_scale)[None, :],)
        row = first_row + gl.arange(0, ROWS, gl.SliceLayout(0, MMA))
        if run.slot < 0:
            line = run.token.to(gl.int64) * H
            if ODD == 0:
                gl.store(outputs.lse + line + row, row_lse, mask=row < run.num_rows)
            store_output(normalized, own.tile, outputs.out, line, run, first_row, first)
        else:
            line = run.slot.to(gl.int64) * outputs.slot_rows
            if ODD == 0:
                gl.store(outputs.part_lse + line + row, row_lse, mask=row < run.num_rows)
            store_output(normalized, own.tile, outputs.part, line, run, first_row, first)
        if ODD == 0:
            paged.store_spans(outputs, part, run, r, first_row, H, BLOCK_T, FIXED)
        request, item, unit = parts.next_run(work, request, item, unit, TOKENS, FIXED)


@gluon.jit
def load_spans(raw, rows, keys, first: gl.constexpr, num: gl.constexpr, filled, BOX: gl.constexpr):
    mbarrier.expect(filled, KEY_BYTES * KEYS * num)
    for g in gl.static_range(first, first + num):
        for b in gl.static_range(KEYS // BOX):
            bulk_load(rows, [keys[b], SPAN_WORDS * g], filled, raw[g].slice(BOX * b, BOX, 0))


@gluon.jit
def load_left(group, rows, keys, BOX: gl.constexpr):
    load_spans(group.raw, rows, keys, 0, LEFT_SPANS, group.left_filled, BOX)


@gluon.jit
def load_right(group, rows, keys, BOX: gl.constexpr):
    load_spans(group.raw, rows, keys, LEFT_SPANS, RIGHT_SPANS, group.right_filled, BOX)


@gluon.jit
def load_partition(
    even, odd, rows, table, table_stride, num_keys, work, part, H: gl.constexpr,
    TOKENS: gl.constexpr, CAUSAL: gl.constexpr, FIXED: gl.constexpr, BS: gl.constexpr,
    BOX: gl.constexpr,
):  # fmt: skip
    """Each part of a raw tile is refilled as soon as it was read; pages are looked up a pair of
    tiles ahead."""
    gdc_launch_dependents()  # the merge waits for all of this grid, but its launch need not
    request, item, unit = part.request, part.item, part.unit
    even_step = 0
    odd_step = 0
    for r in tl.range(0, part.num_runs, disable_licm=True):
        run = parts.find_run(work, part, r, request, item, unit, H, TOKENS, CAUSAL, FIXED)
        pages = table + run.request.to(gl.int64) * table_stride
        even_blocks = paged.find_pages(pages, run.lo, run, BS, BOX)
        odd_blocks = paged.find_pages(pages, run.lo + KEYS, run, BS, BOX)
        for key in tl.range(run.lo, run.hi, 2 * KEYS, disable_licm=True):
            even_keys = paged.find_keys(even_blocks, key, num_keys, BS, BOX)
            odd_keys = paged.find_keys(odd_blocks, key + KEYS, num_keys, BS, BOX)
            even_blocks = paged.find_pages(pages, key + 2 * KEYS, run, BS, BOX)
            odd_blocks = paged.find_pages(pages, key + 3 * KEYS, run, BS, BOX)
            named.wait(named.EVEN_LEFT_READ, even_step)
            load_left(even, rows, even_keys, BOX)
            named.wait(named.EVEN_RIGHT_READ, even_step)
            load_right(even, rows, even_keys, BOX)
            even_step += 1
            if key + KEYS < run.hi:
                named.wait(named.ODD_LEFT_READ, odd_step)
                load_left(odd, rows, odd_keys, BOX)
                named.wait(named.ODD_RIGHT_READ, odd_step)
                load_right(odd, rows, odd_keys, BOX)
                odd_step += 1
        request, item, unit = parts.next_run(work, request, item, unit, TOKENS, FIXED)
    # what was announced last is waited for, too
    named.wait(named.EVEN_LEFT_READ, even_step)
    named.wait(named.EVEN_RIGHT_READ, even_step)
    named.wait(named.ODD_LEFT_READ, odd_step)
    named.wait(named.ODD_RIGHT_READ, odd_step)


@gluon.jit
def allocate_group():
    values = ()
    for _ in gl.static_range(VALUE_SPANS):
        values += (gl.allocate_shared_memory(gl.float16, [KEYS, SPAN], TILE),)
    raw = ()
    for _ in gl.static_range(SPANS):
        raw += (gl.allocate_shared_memory(gl.int32, [KEYS, SPAN_WORDS], RAW),)
    left_filled = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    right_filled = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(left_filled, count=1)
    mbarrier.init(right_filled, count=1)
    probs = gl.allocate_shared_memory(gl.float16, [KEYS, ROWS], PROBS)
    max_line = gl.allocate_shared_memory(gl.float32, [ROWS], primitives.LINE)
    sum_line = gl.allocate_shared_memory(gl.float32, [ROWS], primitives.LINE)
    return Group(values, raw, left_filled, right_filled, probs, max_line, sum_line)


@gluon.jit(
    do_not_specialize=paged.DO_NOT_SPECIALIZE,
    do_not_specialize_on_alignment=[*DO_NOT_SPECIALIZE_ON_ALIGNMENT, "table"],
)
def _paged_few_kernel(
    q, rows, kv_scale, query_start_loc, seq_lens, table, out, lse, part, part_lse, spans, B, T,
    unit, qk_scale, q_token, q_head, page, table_stride, num_keys, slot_rows,
    BS: gl.constexpr, BOX: gl.constexpr, H: gl.constexpr, TOKENS: gl.constexpr,
    CAUSAL: gl.constexpr, FOLDED: gl.constexpr, FIXED: gl.constexpr, BLOCK_T: gl.constexpr,
    ODD_REGISTERS: gl.constexpr, LOAD_REGISTERS: gl.constexpr,
):  # fmt: skip
    first_row = gl.program_id(0) * ROWS
    kv_scale = gl.load(kv_scale)
    qk_scale = qk_scale.to(gl.float32) * kv_scale  # compiled graphs may hand it over as fp64
    queries = ()
    for _ in gl.static_range(SPANS):
        queries += (gl.allocate_shared_memory(gl.float16, [ROWS, SPAN], TILE),)
    even = allocate_group()
    odd = allocate_group()
    fence_async_shared()
    work = parts.Work(query_start_loc, seq_lens, B, unit)
    p = gl.program_id(1)
    own = parts.find_part(work, p, gl.num_programs(1), TOKENS, FIXED)
    for t in range(gl.load(query_start_loc + B) + p, T, gl.num_programs(1)):  # nothing to merge
        gl.store(spans + 3 * t, 0)
        gl.store(spans + 3 * t + 1, -1)
    outputs = paged.Outputs(out, lse, part, part_lse, spans, slot_rows)
    EVEN: gl.constexpr = 0
    ODD: gl.constexpr = 1
    gl.warp_specialize(
        [
            (attend_partition, (
                queries, even, odd, q, q_token, q_head, work, own, outputs, qk_scale, kv_scale,
                first_row, named.EVEN_LEFT_READ, named.EVEN_RIGHT_READ, EVEN, H, TOKENS, CAUSAL,
                FOLDED, FIXED, BLOCK_T,
            )),
            (attend_partition, (
                queries, odd, even, q, q_token, q_head, work, own, outputs, qk_scale, kv_scale,
                first_row, named.ODD_LEFT_READ, named.ODD_RIGHT_READ, ODD, H, TOKENS, CAUSAL,
                FOLDED, FIXED, BLOCK_T,
            )),
            (load_partition, (
                even, odd, rows, table, table_stride, num_keys, work, own, H, TOKENS, CAUSAL, FIXED,
                BS, BOX,
            )),
        ],
        [4, 4],
        [ODD_REGISTERS, LOAD_REGISTERS],
    )  # fmt: skip
