"""Latent attention of few heads over V4's rows of 448 + 64 (fp8_dsv4), for decode; Gluon, SM80 on.

Computes  what _latent.py does, for a window and after it listed positions, a prefix or nothing,
          16 heads a program, with values of all 512 columns
Grid      (cdiv(H, 16), T, X): one program owns one token, 16 heads, one run of its rows; a grid
          holds 65535 tokens, more take several launches
Reads     q [T, H, 512], pages as 32-bit words: BS rows of 144, then 2 words of scales for each;
          4 * page of them from one page to the next, so that 16-byte loads are known to be aligned
Writes    out [T, H, 512] and lse [T, H]; with X > 1 runs part [T, X, H, 512] and part_lse

Data flow as in _few_heads.py. The two segments are one list of rows, the window's first; each row
is looked up on its own, so that prefetch runs across the border and a tile may hold both.
"""

from typing import Any, NamedTuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from openmla.backends.gluon import _few_heads as few
from openmla.backends.gluon import _primitives as primitives
from openmla.backends.gluon import _rows_v4 as v4
from openmla.backends.triton._build import DO_NOT_SPECIALIZE_ON_ALIGNMENT


class Pages(NamedTuple):
    """Both caches: words, 16-byte units from one page to the next, number of pages."""

    words_1: Any
    page_1: Any
    N_1: Any
    words_2: Any
    page_2: Any
    N_2: Any


@gluon.constexpr_function
def query_layout(g):
    """Queries in shared memory as mma takes them: 16 bytes are one lane's share of one instruction,
    two columns of two heads 8 apart and the next two, so that registers need no shuffle. A lane has
    16 adjacent columns, 8 of the rope's."""
    columns, heads = [[0, 2**i] for i in range(6)], [[2**i, 0] for i in range(4)]
    own = 3 if g == v4.GROUPS else 4
    lanes, rest = columns[own : own + 2] + heads[:3], columns[2:own] + columns[own + 2 :]
    return gl.SharedLinearLayout([columns[0], heads[3], columns[1], *lanes, *rest])


@gluon.jit
def decode_group(words, scales, g: gl.constexpr, BLOCK_N: gl.constexpr):
    """[BLOCK_N, 64] bf16 from [BLOCK_N, 16] words, times DECODE_SCALE. Scales of 0, as invalid rows
    have, decode any bytes to zeros."""
    scales, words = gl.broadcast(v4.scale_pairs(scales, g)[:, None], words)
    a, b, c, d = primitives.decode_e4m3(words, scales)
    return gl.reshape(gl.join(gl.join(a, c), gl.join(b, d)), [BLOCK_N, 64])


@gluon.jit
def issue_loads(number):
    """Keeps loads before this point: ptxas would sink them to the next barrier, where little is
    left to hide them. Assembles to nothing; any number will do."""
    gl.inline_asm_elementwise(
        "bar.warp.sync 0xffffffff; mov.b32 $0, $1;",
        "=r,r",
        [number],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def find_row(rows, pages, j, block, offset, BS_1: gl.constexpr, BS_2: gl.constexpr):
    """Pointers to a row and its scales, and the valid mask; a cache's first row where not valid."""
    valid = (block >= 0) & (block < gl.where(j < rows.n_1, pages.N_1, pages.N_2))
    block = gl.where(valid, block, 0).to(gl.int64)
    offset = gl.where(valid, offset, 0)
    page = gl.where(j < rows.n_1, pages.words_1, pages.words_2)
    page += block * gl.where(j < rows.n_1, pages.page_1, pages.page_2) * 4
    scales = page + gl.where(j < rows.n_1, BS_1 * v4.ROW, BS_2 * v4.ROW) + offset * v4.SCALE_WORDS
    return page + offset * v4.ROW, scales.to(gl.pointer_type(gl.int64), bitcast=True), valid


@gluon.jit(
    do_not_specialize=v4.DO_NOT_SPECIALIZE,
    do_not_specialize_on_alignment=DO_NOT_SPECIALIZE_ON_ALIGNMENT,
)
def _few_heads_v4_kernel(
    q, words_1, table_1, words_2, table_2, row_ids, row_lens, positions, query_start_loc, sink, out,
    lse,
    B, first_token, qk_scale, q_token, q_head, ids_stride, K, X, run_length,
    page_1, N_1, M_1, span_1, table_stride_1, page_2, N_2, M_2, span_2, table_stride_2,
    LISTED: gl.constexpr, BS_1: gl.constexpr, BS_2: gl.constexpr, H: gl.constexpr,
    SPLIT: gl.constexpr, SINK: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    QUERY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    first_head, t, t64, x = primitives.program(first_token, few.BLOCK_H)
    qk_scale = qk_scale.to(gl.float32)  # inside a compiled graph it may arrive as fp64
    exchange = few.allocate_exchange(BLOCK_N)
    valid_line = gl.allocate_shared_memory(gl.int32, [BLOCK_N], primitives.LINE)
    offs_row = gl.arange(0, BLOCK_N, primitives.ROWS)
    offs_word = gl.arange(0, v4.GROUP_WORDS, gl.SliceLayout(0, primitives.WORDS))[None, :]
    offs_rope = gl.arange(0, 32, gl.SliceLayout(0, primitives.WORDS))[None, :] + v4.ROPE
    tokens = v4.tokens_of(
        positions, row_lens, query_start_loc, B, K, M_1, span_1, M_2, span_2, LISTED, BS_1, BS_2
    )
    lists = v4.Lists(
        row_ids, ids_stride, table_1, table_stride_1, M_1, table_2, table_stride_2, M_2
    )
    rows, n = v4.rows_of(lists, tokens, t, LISTED)
    pages = Pages(words_1, page_1, N_1, words_2, page_2, N_2)
    lo, hi = primitives.run_bounds(n, x, X, run_length, BLOCK_N)
    blocks = gl.maximum((hi - lo + BLOCK_N - 1) // BLOCK_N, 0)
    # prefetch: row ids three tiles ahead of their use, tables two, rows one
    j = lo + offs_row
    row_id = v4.load_row_ids(rows, j, hi, LISTED)
    next_id = v4.load_row_ids(rows, j + BLOCK_N, hi, LISTED)
    block, offset = v4.look_up(rows, j, row_id, hi, LISTED, BS_1, BS_2)
    row, scales_at, valid = find_row(rows, pages, j, block, offset, BS_1, BS_2)
    groups = ()
    for g in gl.static_range(v4.GROUPS):
        groups += (gl.load(row[:, None] + offs_word + v4.GROUP_WORDS * g),)
    rope = gl.load(row[:, None] + offs_rope)
    scales = gl.load(scales_at, mask=valid, other=0)
    j += BLOCK_N
    block, offset = v4.look_up(rows, j, next_id, hi, LISTED, BS_1, BS_2)
    row_id = v4.load_row_ids(rows, j + BLOCK_N, hi, LISTED)
    # queries; heads past the last are zeros
    heads = first_head + gl.arange(0, few.BLOCK_H, gl.SliceLayout(1, QUERY))
    q_at = q + (t64 * q_token + heads * q_head)[:, None]
    q_at += gl.arange(0, v4.GROUP, gl.SliceLayout(0, QUERY))[None, :]
    queries = ()
    values = ()
    acc = ()
    for g in gl.static_range(v4.GROUPS + 1):
        query = gl.load(q_at + v4.GROUP * g, mask=(heads < H)[:, None], other=0.0)
        if g == v4.GROUPS:
            query = (query.to(gl.float32) * v4.DECODE_SCALE).to(gl.bfloat16)
        queries += (
            gl.allocate_shared_memory(gl.bfloat16, [few.BLOCK_H, v4.GROUP], query_layout(g), query),
        )
        values += (gl.allocate_shared_memory(gl.bfloat16, [BLOCK_N, v4.GROUP], few.SHARED),)
        acc += (gl.zeros([few.BLOCK_H, v4.GROUP], gl.float32, few.MMA),)
    running_sum, running_max = few.initial_state(BLOCK_N)
    primitives.thread_barrier()
    for _ in tl.range(0, blocks, disable_licm=True):
        # j is of the next tile
        valid_line.store(valid.to(gl.int32))
        row, scales_at, next_valid = find_row(rows, pages, j, block, offset, BS_1, BS_2)
        scores = gl.zeros([few.BLOCK_H, BLOCK_N], gl.float32, few.MMA)
        next_groups = ()
        for g in gl.static_range(v4.GROUPS):
            tile = decode_group(groups[g], scales, g, BLOCK_N)
            values[g].store(tile)
            scores = few.score(scores, tile, queries[g], 16)
            next_groups += (gl.load(row[:, None] + offs_word + v4.GROUP_WORDS * g),)
            issue_loads(hi)
        groups = next_groups
        first, second = primitives.split_words(gl.where(valid[:, None], rope, 0))
        tile = gl.reshape(gl.join(first, second), [BLOCK_N, 64])
        values[v4.GROUPS].store(tile)
        scores = few.score(scores, tile, queries[v4.GROUPS], 8)
        rope = gl.load(row[:, None] + offs_rope)
        scales = gl.load(scales_at, mask=next_valid, other=0)
        valid = next_valid
        j += BLOCK_N
        block, offset = v4.look_up(rows, j, row_id, hi, LISTED, BS_1, BS_2)
        row_id = v4.load_row_ids(rows, j + BLOCK_N, hi, LISTED)
        scored = valid_line.load(few.SCORED_ROWS) != 0
        running_max, running_sum, rescale = few.softmax_step(
            scores, scored, qk_scale, running_max, running_sum, exchange, v4.INV_DECODE_SCALE
        )
        acc = few.accumulate(acc, rescale, exchange, values, v4.GROUPS + 1, BLOCK_N)
    normalizer, line = few.store_lse(
        running_max, running_sum, exchange, lse, sink, first_head, t64, x, X, 1.0, H, SPLIT, SINK,
    )  # fmt: skip
    heads, at = few.output_at(out, line, first_head, v4.GROUP, H)
    for g in gl.static_range(v4.GROUPS + 1):
        result = acc[g] * normalizer
        if g < v4.GROUPS:
            result *= v4.INV_DECODE_SCALE
        gl.store(at + v4.GROUP * g, result.to(out.dtype.element_ty), mask=(heads < H)[:, None])
