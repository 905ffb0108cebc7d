"""Latent attention of many heads over V4's rows of 448 + 64 (fp8_dsv4); Gluon, SM90.

Computes  what _few_heads_v4.py does, 64 heads a program
Grid      as _many_heads_v3.py
Reads     as _few_heads_v4.py
Writes    as _many_heads_v3.py

Warp groups and their schedule are _many_heads.py's.
"""

from typing import Any, NamedTuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared
from triton.language.extra.cuda import gdc_launch_dependents

from openmla.backends.gluon import _barriers as named
from openmla.backends.gluon import _many_heads as many
from openmla.backends.gluon import _primitives as primitives
from openmla.backends.gluon import _rows_v4 as v4
from openmla.backends.triton import _pieces as pieces
from openmla.backends.triton._build import DO_NOT_SPECIALIZE_ON_ALIGNMENT
from openmla.backends.triton._versions import async_load

INVALID = gl.constexpr(-(2**62))  # the second cache may lie lower: offsets can be negative


class Pages(NamedTuple):
    """Both caches from the first one's words on: 16-byte units from one page to the next and from
    the first cache to the second, numbers of pages."""

    words: Any
    page_1: Any
    N_1: Any
    page_2: Any
    N_2: Any
    apart: Any


@gluon.jit
def decode_group(words, scales, g: gl.constexpr):
    """64 columns, two bf16 per word, times DECODE_SCALE."""
    scales, words = gl.broadcast(v4.scale_pairs(scales, g)[:, None], words)
    low, high = primitives.decode_e4m3_pairs(words, scales)
    return gl.reshape(gl.join(low, high), [64, 32])


@gluon.jit
def find_row(rows, pages, j, block, offset, BS_1: gl.constexpr, BS_2: gl.constexpr):
    """Where rows are, in 16-byte units from the first cache's start, and where their scales are, in
    8-byte units: row 0 and INVALID where not valid."""
    valid = (block >= 0) & (block < gl.where(j < rows.n_1, pages.N_1, pages.N_2))
    offset = gl.where(valid, offset, 0)
    page = gl.where(valid, block, 0).to(gl.int64)
    page = page * gl.where(j < rows.n_1, pages.page_1, pages.page_2)
    page += gl.where(valid & (j >= rows.n_1), pages.apart, 0)
    scales = page * 2 + gl.where(j < rows.n_1, BS_1 * v4.ROW_8B, BS_2 * v4.ROW_8B) + offset
    return page + offset * v4.ROW_16B, gl.where(valid, scales, INVALID)


@gluon.jit
def load_groups(words, row_line, odd: gl.constexpr, first: gl.constexpr, last: gl.constexpr):
    """Groups of 64 columns of one tile's rows, not yet decoded."""
    at = words + (many.of_tile(row_line, odd).load(primitives.ROWS) * 4)[:, None]
    at += gl.arange(0, v4.GROUP_WORDS, gl.SliceLayout(0, primitives.WORDS))[None, :]
    groups = ()
    for g in gl.static_range(first, last):
        groups += (gl.load(at + v4.GROUP_WORDS * g),)
    return groups


@gluon.jit
def load_scales(words, scale_line, odd: gl.constexpr):
    """Eight exponents a row; invalid rows get zeros, which decode any bytes to zeros."""
    at = many.of_tile(scale_line, odd).load(primitives.ROWS)
    return gl.load(
        words.to(gl.pointer_type(gl.int64), bitcast=True) + at, mask=at != INVALID, other=0
    )


@gluon.jit
def store_left(tile, groups, scales, FILLED: gl.constexpr):
    """Columns 0 to 255, in one store: between two the compiler would put a barrier."""
    first = many.concat_columns(
        decode_group(groups[0], scales, 0), decode_group(groups[1], scales, 1), 64
    )
    second = many.concat_columns(
        decode_group(groups[2], scales, 2), decode_group(groups[3], scales, 3), 64
    )
    tile.store(many.concat_columns(first, second, 128))
    fence_async_shared()
    named.arrive(FILLED, 1)


@gluon.jit
def store_right(tile, groups, scales, FILLED: gl.constexpr):
    """Columns 256 to 447."""
    both = many.concat_columns(
        decode_group(groups[0], scales, 4), decode_group(groups[1], scales, 5), 64
    )
    tile.slice(0, 64, 1).store(both)
    tile.slice(64, 32, 1).store(decode_group(groups[2], scales, 6))
    fence_async_shared()
    named.arrive(FILLED, 1)


@gluon.jit
def copy_rope(tile, words, row_line, scale_line, odd: gl.constexpr, copied):
    """Columns 448 to 511, stored as they are; zeros for invalid rows."""
    valid = many.of_tile(scale_line, odd).load(many.COPY_ROWS) != INVALID
    at = words.to(gl.pointer_type(gl.bfloat16), bitcast=True) + 2 * v4.ROPE
    at += (many.of_tile(row_line, odd).load(many.COPY_ROWS) * 8)[:, None]
    at += gl.arange(0, many.ROPE_COLUMNS, gl.SliceLayout(0, many.COPY))[None, :]
    valid, at = gl.broadcast(valid[:, None], at)
    async_load(tile.slice(many.HALF - many.ROPE_COLUMNS, many.ROPE_COLUMNS, 1), at, mask=valid)
    async_copy.mbarrier_arrive(copied, increment_count=False)


@gluon.jit
def publish_rows(rows, pages, j, block, offset, row_line, scale_line, key_bias,
                 BS_1: gl.constexpr, BS_2: gl.constexpr):  # fmt: skip
    """Where rows and their scales are, for all threads of the group, and the bias of scores."""
    row, scales_at = find_row(rows, pages, j, block, offset, BS_1, BS_2)
    row_line.store(row)
    scale_line.store(scales_at)
    key_bias.store(gl.where(scales_at != INVALID, 0.0, float("-inf")))


@gluon.jit
def load_partition(
    even, odd, key_bias, row_line, scale_line, copied, lists, pages, tokens, cut, run_length,
    LISTED: gl.constexpr, BS_1: gl.constexpr, BS_2: gl.constexpr, FIXED: gl.constexpr,
):  # fmt: skip
    """Rows from the caches, decoded. A thread finds one row of both tiles. Prefetch: row ids two
    steps ahead of their use, tables one, and a quarter of the columns while one is stored."""
    gdc_launch_dependents()  # the merge waits for all of this grid, but its launch need not
    even_copied, odd_copied = copied
    words = pages.words
    even_left, even_right = many.as_words(even.left), many.as_words(even.right)
    odd_left, odd_right = many.as_words(odd.left), many.as_words(odd.right)
    step = 0
    for r in tl.range(0, pieces.num_pieces(cut), disable_licm=True):
        piece = pieces.find_piece(tokens, cut, r, run_length, LISTED, FIXED)
        rows, _ = v4.rows_of(lists, tokens, piece.token, LISTED)
        hi = piece.hi
        j = piece.lo + gl.arange(0, many.STEP, many.ROW_PER_THREAD)
        row_id = v4.load_row_ids(rows, j, hi, LISTED)
        block, offset = v4.look_up(rows, j, row_id, hi, LISTED, BS_1, BS_2)
        publish_rows(
            rows, pages, j, block, offset, row_line, scale_line, key_bias.index(step & 1), BS_1,
            BS_2,
        )  # fmt: skip
        for_even_left = load_groups(words, row_line, 0, 0, 4)
        even_scales = load_scales(words, scale_line, 0)
        for_odd_right = load_groups(words, row_line, 1, 4, v4.GROUPS)
        odd_scales = load_scales(words, scale_line, 1)
        row_id = v4.load_row_ids(rows, j + many.STEP, hi, LISTED)
        for _ in tl.range(0, piece.steps, disable_licm=True):
            j += many.STEP
            block, offset = v4.look_up(rows, j, row_id, hi, LISTED, BS_1, BS_2)
            row_id = v4.load_row_ids(rows, j + many.STEP, hi, LISTED)
            named.wait(named.EVEN_LEFT_READ, step)
            store_left(even_left, for_even_left, even_scales, named.EVEN_LEFT_FILLED)
            for_even_right = load_groups(words, row_line, 0, 4, v4.GROUPS)
            named.wait(named.ODD_RIGHT_READ, step)
            copy_rope(odd.right, words, row_line, scale_line, 1, odd_copied)
            store_right(odd_right, for_odd_right, odd_scales, named.ODD_RIGHT_FILLED)
            for_odd_left = load_groups(words, row_line, 1, 0, 4)
            named.wait(named.EVEN_RIGHT_READ, step)
            copy_rope(even.right, words, row_line, scale_line, 0, even_copied)
            store_right(even_right, for_even_right, even_scales, named.EVEN_RIGHT_FILLED)
            step += 1
            publish_rows(
                rows, pages, j, block, offset, row_line, scale_line, key_bias.index(step & 1), BS_1,
                BS_2,
            )  # fmt: skip
            for_even_left = load_groups(words, row_line, 0, 0, 4)
            even_scales = load_scales(words, scale_line, 0)
            named.wait(named.ODD_LEFT_READ, step - 1)
            store_left(odd_left, for_odd_left, odd_scales, named.ODD_LEFT_FILLED)
            for_odd_right = load_groups(words, row_line, 1, 4, v4.GROUPS)
            odd_scales = load_scales(words, scale_line, 1)
    many.wait_read(step)


@gluon.jit(
    do_not_specialize=v4.DO_NOT_SPECIALIZE,
    do_not_specialize_on_alignment=DO_NOT_SPECIALIZE_ON_ALIGNMENT,
)
def _many_heads_v4_kernel(
    q, words_1, table_1, words_2, table_2, row_ids, row_lens, positions, query_start_loc, sink, out,
    lse, part, part_lse, spans,
    B, first_token, T, slot_rows, units, first_part,
    qk_scale, q_token, q_head, ids_stride, K, run_length,
    page_1, N_1, M_1, span_1, table_stride_1, page_2, N_2, M_2, span_2, table_stride_2,
    LISTED: gl.constexpr, BS_1: gl.constexpr, BS_2: gl.constexpr, H: gl.constexpr,
    SINK: gl.constexpr, FIXED: gl.constexpr, ODD_REGISTERS: gl.constexpr,
    LOAD_REGISTERS: gl.constexpr,
):  # fmt: skip
    qk_scale = qk_scale.to(gl.float32)  # inside a compiled graph it may arrive as fp64
    queries, even, odd = many.allocate_tiles()
    even_probs = gl.allocate_shared_memory(gl.bfloat16, [64, 64], many.TILE)
    odd_probs = gl.allocate_shared_memory(gl.bfloat16, [64, 64], many.TILE)
    key_bias = gl.allocate_shared_memory(gl.float32, [2, many.STEP], primitives.LINE)
    row_line = gl.allocate_shared_memory(gl.int64, [many.STEP], primitives.LINE)
    scale_line = gl.allocate_shared_memory(gl.int64, [many.STEP], primitives.LINE)
    lines = many.allocate_head_lines(2)
    signals, copied = many.allocate_mbarriers(2)
    even_copied, odd_copied = copied
    tokens = v4.tokens_of(
        positions, row_lens, query_start_loc, B, K, M_1, span_1, M_2, span_2, LISTED, BS_1, BS_2
    )
    lists = v4.Lists(
        row_ids, ids_stride, table_1, table_stride_1, M_1, table_2, table_stride_2, M_2
    )
    cut = pieces.own_cut(first_token, T, units, first_part, FIXED)
    apart = (words_2.to(gl.int64) - words_1.to(gl.int64)) // 16
    # the rope is part of the values and has no tile of its own: probs stand in, unused
    queries = many.Tile(queries[0], queries[1], even_probs)
    even = many.Tile(even[0], even[1], even_probs)
    odd = many.Tile(odd[0], odd[1], even_probs)
    exchange = many.Exchange(even_probs, odd_probs, key_bias, lines[0], lines[1], lines[1])
    pages = Pages(words_1, page_1, N_1, page_2, N_2, apart)
    outputs = many.Outputs(out, lse, sink, part, part_lse, spans, slot_rows)
    qk_scale = qk_scale * v4.INV_DECODE_SCALE
    ROPE_TILE: gl.constexpr = False
    COPIED: gl.constexpr = False
    DECODED: gl.constexpr = v4.GROUP * v4.GROUPS
    NO_SCALES: gl.constexpr = 0
    # constants stay constants only inside this very call
    gl.warp_specialize(
        [
            (many.even_partition, (
                queries, even, odd.left, exchange, (even_copied, even_copied), signals, q, sink,
                q_token, q_head, tokens, cut, run_length, qk_scale, outputs, H, SINK, ROPE_TILE,
                COPIED, v4.DECODE_SCALE, DECODED, NO_SCALES, LISTED, FIXED,
            )),
            (many.odd_partition, (
                queries, even.right, odd, exchange, (odd_copied, odd_copied), signals, tokens, cut,
                run_length, qk_scale, outputs, H, SINK, ROPE_TILE, COPIED, v4.DECODE_SCALE, DECODED,
                NO_SCALES, LISTED, FIXED,
            )),
            (load_partition, (
                even, odd, key_bias, row_line, scale_line, (even_copied, odd_copied), lists, pages,
                tokens, cut, run_length, LISTED, BS_1, BS_2, FIXED,
            )),
        ],
        [4, 4],
        [ODD_REGISTERS, LOAD_REGISTERS],
    )  # fmt: skip
