"""Rows of 512 + 64 in fp8 with one scale: e4m3 as fp16, and queries that go with it.

fp16 holds all of e4m3, NaN too, and one instruction decodes two values; bf16 would take four and a
look for NaN. So queries become fp16, each row times a power of two that makes its largest value
about 2**14: what is then too small for fp16's normal numbers is nothing beside that.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc_launch_dependents

from openmla.backends.gluon import _barriers as named
from openmla.backends.gluon import _many_heads as many
from openmla.backends.gluon import _parts as parts
from openmla.backends.gluon import _primitives as primitives
from openmla.backends.triton._versions import reinterpret

SPAN = gl.constexpr(64)  # columns of queries that are loaded together
SPANS = gl.constexpr(9)
HALF_WORDS = gl.constexpr(64)  # of 256 columns
ROPE_WORDS = gl.constexpr(16)


@gluon.jit
def decode_values(words):
    """Four e4m3 as four fp16."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b16 low, high;
        .reg .b32 t;
        mov.b32 {low, high}, $4;
        cvt.rn.f16x2.e4m3x2 t, low;
        mov.b32 {$0, $1}, t;
        cvt.rn.f16x2.e4m3x2 t, high;
        mov.b32 {$2, $3}, t;
        }""",
        "=h,=h,=h,=h,r", [words],
        dtype=(gl.float16, gl.float16, gl.float16, gl.float16), is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def decode_words(words, NUM: gl.constexpr):
    """The same as words of two fp16, of 64 keys."""
    low, high = gl.inline_asm_elementwise(
        """{
        .reg .b16 low, high;
        mov.b32 {low, high}, $2;
        cvt.rn.f16x2.e4m3x2 $0, low;
        cvt.rn.f16x2.e4m3x2 $1, high;
        }""",
        "=r,=r,r", [words], dtype=(gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip
    return gl.reshape(gl.join(low, high), [many.BLOCK_N, 2 * NUM])


@gluon.jit
def query_spans(q, run, first_row, q_token, q_head, H: gl.constexpr, ROWS: gl.constexpr,
                LAYOUT: gl.constexpr):  # fmt: skip
    """Where the first 64 columns of rows are, and which rows are the item's. None are where there
    are no keys: NaN queries would make scores of no keys NaN."""
    num_rows = gl.where(run.hi > run.lo, run.num_rows, 0)
    row = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    at = q + ((run.token + row // H).to(gl.int64) * q_token + (row % H) * q_head)[:, None]
    at += gl.arange(0, SPAN, gl.SliceLayout(0, LAYOUT))[None, :]
    valid, at = gl.broadcast((row < num_rows)[:, None], at)
    return at, valid


@gluon.jit
def scale_rows(at, valid):
    """What rows are multiplied with, and what undoes it."""
    largest = gl.max(gl.abs(gl.load(at, mask=valid, other=0.0).to(gl.float32)), 1)
    for g in gl.static_range(1, SPANS):
        columns = gl.load(at + SPAN * g, mask=valid, other=0.0).to(gl.float32)
        largest = gl.maximum(largest, gl.max(gl.abs(columns), 1))
    exponent = (largest.to(gl.int32, bitcast=True) >> 23) - 127
    exponent = gl.minimum(gl.maximum(14 - exponent, -126), 126)
    scale = ((127 + exponent) << 23).to(gl.float32, bitcast=True)
    return scale, ((127 - exponent) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def load_span(at, valid, scale, span: gl.constexpr):
    """Read again, which only another cache modifier makes sure of: all of a row in registers would
    spill."""
    columns = gl.load(at + SPAN * span, mask=valid, other=0.0, cache_modifier=".cg").to(gl.float32)
    return (columns * scale[:, None]).to(gl.float16)


@gluon.jit
def load_queries(
    queries, q, run, first_row, q_token, q_head, scales, qk_scale, kv_scale, H: gl.constexpr
):
    """64 rows into shared memory, and what their scores and values are multiplied with."""
    at, valid = query_spans(q, run, first_row, q_token, q_head, H, many.BLOCK_H, many.COPY)
    scale, inverse = scale_rows(at, valid)
    value_scale = gl.load(kv_scale)
    scales.index(0).store(inverse * (qk_scale * value_scale))
    scales.index(1).store(gl.zeros_like(inverse) + value_scale)
    for g in gl.static_range(4):
        queries.left.slice(SPAN * g, SPAN, 1).store(load_span(at, valid, scale, g))
        queries.right.slice(SPAN * g, SPAN, 1).store(load_span(at, valid, scale, 4 + g))
    queries.rope.store(load_span(at, valid, scale, 8))
    primitives.thread_barrier()
    fence_async_shared()


@gluon.jit
def find_rows(pages, first_key, run, page, ROW_WORDS: gl.constexpr, BS: gl.constexpr):
    """Where a tile's rows begin. Past the run its last key is read again: scores are masked, and
    values of no weight had better be finite."""
    key = first_key + gl.arange(0, many.BLOCK_N, primitives.ROWS)
    key = gl.maximum(gl.minimum(key, run.hi - 1), 0)
    block = gl.load(pages + key // BS, mask=(key >= 0) & (run.hi > run.lo), other=0)
    return block.to(gl.int64) * page + key % BS * ROW_WORDS


@gluon.jit
def load_words(words, rows, run, first: gl.constexpr, NUM: gl.constexpr):
    at = words + rows[:, None] + first
    at += gl.arange(0, NUM, gl.SliceLayout(0, primitives.WORDS))[None, :]
    return gl.load(at, mask=run.hi > run.lo, other=0)


@gluon.jit
def load_left(words, rows, run):
    return load_words(words, rows, run, 0, HALF_WORDS)


@gluon.jit
def load_right(words, rows, run):
    """With the rope."""
    right = load_words(words, rows, run, HALF_WORDS, HALF_WORDS)
    return right, load_words(words, rows, run, 2 * HALF_WORDS, ROPE_WORDS)


@gluon.jit
def store_left(tile, loaded, filled):
    many.as_words(tile.left).store(decode_words(loaded, HALF_WORDS))
    fence_async_shared()
    mbarrier.arrive(filled, count=1)


@gluon.jit
def store_right(tile, loaded, filled):
    right, rope = loaded
    many.as_words(tile.right).store(decode_words(right, HALF_WORDS))
    rope_tile = reinterpret(tile.rope, gl.int32, [many.BLOCK_N, 2 * ROPE_WORDS], many.WORD_TILE)
    rope_tile.store(decode_words(rope, ROPE_WORDS))
    fence_async_shared()
    mbarrier.arrive(filled, count=1)


@gluon.jit
def decode_partition(
    even, odd, filled, words, page, table, table_stride, work, part, H: gl.constexpr,
    TOKENS: gl.constexpr, CAUSAL: gl.constexpr, FIXED: gl.constexpr, BS: gl.constexpr,
    ROW_WORDS: gl.constexpr,
):  # fmt: skip
    """The producer of _paged.py. Prefetch: half a tile of one kind while one of the other is
    stored, pages half a step."""
    gdc_launch_dependents()  # the merge waits for all of this grid, but its launch need not
    request, item, unit = part.request, part.item, part.unit
    step = 0
    for r in tl.range(0, part.num_runs, disable_licm=True):
        run = parts.find_run(work, part, r, request, item, unit, H, TOKENS, CAUSAL, FIXED)
        pages = table + run.request.to(gl.int64) * table_stride
        even_rows = find_rows(pages, run.lo, run, page, ROW_WORDS, BS)
        odd_rows = find_rows(pages, run.lo + many.BLOCK_N, run, page, ROW_WORDS, BS)
        for_even_left = load_left(words, even_rows, run)
        for_odd_right = load_right(words, odd_rows, run)
        steps = gl.maximum((run.hi - run.lo + many.STEP - 1) // many.STEP, 1)
        for i in tl.range(0, steps, disable_licm=True):
            next_key = run.lo + many.STEP * (i + 1)
            named.wait(named.EVEN_LEFT_READ, step)
            store_left(even, for_even_left, filled.even_left)
            for_even_right = load_right(words, even_rows, run)
            even_rows = find_rows(pages, next_key, run, page, ROW_WORDS, BS)
            named.wait(named.ODD_RIGHT_READ, step)
            store_right(odd, for_odd_right, filled.odd_right)
            for_odd_left = load_left(words, odd_rows, run)
            odd_rows = find_rows(pages, next_key + many.BLOCK_N, run, page, ROW_WORDS, BS)
            named.wait(named.EVEN_RIGHT_READ, step)
            store_right(even, for_even_right, filled.even_right)
            for_even_left = load_left(words, even_rows, run)
            named.wait(named.ODD_LEFT_READ, step)
            store_left(odd, for_odd_left, filled.odd_left)
            for_odd_right = load_right(words, odd_rows, run)
            step += 1
        request, item, unit = parts.next_run(work, request, item, unit, TOKENS, FIXED)
    many.wait_read(step)
