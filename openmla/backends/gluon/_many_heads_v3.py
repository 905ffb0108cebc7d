"""Latent attention of many heads over rows of 512 + 64, fp8_ds_mla or 16 bits, or 512; Gluon, SM90.

Computes  what _latent.py does, for a segment of slots or positions, 64 heads a program
Grid      (cdiv(H, 64), parts): one program owns 64 heads and a part of all tokens' rows, see
          triton/_pieces.py; fixed runs: (cdiv(H, 64), T, X), a run of one token; a grid has 65535
          tokens, more take several launches
Reads     q [T, H, 576], without ROPE [T, H, 512]; rows as 32-bit words, ROW from one to the next;
          row_ids [T, K]: slots, or with BS > 0 positions, which table [B, M] maps to blocks
Writes    out [T, H, 512] and lse [T, H] where a token is one piece; else part and part_lse of a
          slot and, for the merge, spans [T, 3]

Warp groups and their schedule are _many_heads.py's. Of packed rows (PACKED) 512 columns are
decoded, all others are copied.
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
from openmla.backends.gluon import _rows_v3 as v3
from openmla.backends.triton import _pieces as pieces
from openmla.backends.triton._build import DO_NOT_SPECIALIZE_ON_ALIGNMENT
from openmla.backends.triton._versions import async_load


class Rows(NamedTuple):
    """The cache as words, all tokens' slots or positions, the block table."""

    words: Any
    row_ids: Any
    ids_stride: Any
    table: Any
    table_stride: Any
    M: Any
    num_blocks: Any


@gluon.jit
def rows_of(rows, tokens, token, BS: gl.constexpr):
    """A token's slots or positions and its row of the block table."""
    table = rows.table
    if BS > 0:
        request = primitives.request_of(token, tokens.query_start_loc, tokens.B)
        table += gl.minimum(request, tokens.B - 1).to(gl.int64) * rows.table_stride
    row_ids = rows.row_ids + token.to(gl.int64) * rows.ids_stride
    return Rows(
        rows.words, row_ids, rows.ids_stride, table, rows.table_stride, rows.M, rows.num_blocks
    )


@gluon.jit
def load_row_ids(rows, j, hi):
    return gl.load(rows.row_ids + j, mask=j < hi, other=-1)


@gluon.jit
def publish_rows(rows, block, offset, row_line, key_bias, BS: gl.constexpr):
    """Slots for all threads of the group, -1 where not valid, and the bias for their scores."""
    row, valid = v3.find_row(block, offset, rows.num_blocks, BS)
    row_line.store(gl.where(valid, row.to(gl.int32), -1))
    key_bias.store(gl.where(valid, 0.0, float("-inf")))


@gluon.jit
def first_rows(rows, lo, hi, row_line, key_bias, BS: gl.constexpr):
    """Finds the rows of a piece's first step, one per thread; returns which those are."""
    j = lo + gl.arange(0, many.STEP, many.ROW_PER_THREAD)
    block, offset = v3.look_up(load_row_ids(rows, j, hi), rows.table, rows.M, BS)
    publish_rows(rows, block, offset, row_line, key_bias, BS)
    return j


@gluon.jit
def copy_columns(
    tile, words, row_line, odd: gl.constexpr, first: gl.constexpr, COLUMNS: gl.constexpr,
    ROW: gl.constexpr,
):  # fmt: skip
    """16-bit columns from `first` on, stored as they are; zeros for invalid rows."""
    row = many.of_tile(row_line, odd).load(many.COPY_ROWS)
    at = words.to(gl.pointer_type(gl.bfloat16), bitcast=True) + first
    at += (gl.maximum(row, 0).to(gl.int64) * (2 * ROW))[:, None]
    at += gl.arange(0, COLUMNS, gl.SliceLayout(0, many.COPY))[None, :]
    valid, at = gl.broadcast((row >= 0)[:, None], at)
    async_load(tile, at, mask=valid)


@gluon.jit
def load_half(words, row_line, odd: gl.constexpr, right: gl.constexpr, ROW: gl.constexpr):
    """256 columns of one tile's rows, not yet decoded, and both scales of each row in 8 bytes;
    invalid rows get zeros, which decode any bytes to zeros."""
    row = many.of_tile(row_line, odd).load(primitives.ROWS)
    start = gl.maximum(row, 0).to(gl.int64) * ROW
    at = words + 2 * v3.GROUP_WORDS * right + start[:, None]
    at += gl.arange(0, v3.GROUP_WORDS, gl.SliceLayout(0, primitives.WORDS))[None, :]
    scales_at = (words + v3.SCALES + 2 * right + start).to(gl.pointer_type(gl.int64), bitcast=True)
    scales = gl.load(scales_at, mask=row >= 0, other=0)
    return gl.load(at), gl.load(at + v3.GROUP_WORDS), scales


@gluon.jit
def decode_group(words, scale):
    """128 columns, two bf16 per word, times DECODE_SCALE."""
    scales = v3.scale_pairs(scale.to(gl.float32, bitcast=True))
    scales, words = gl.broadcast(scales[:, None], words)
    low, high = primitives.decode_e4m3_pairs(words, scales)
    return gl.reshape(gl.join(low, high), [64, 64])


@gluon.jit
def store_half(tile, loaded, FILLED: gl.constexpr):
    """In one store: between two the compiler would put a barrier."""
    first, second, scales = loaded
    first = decode_group(first, scales.to(gl.int32))
    second = decode_group(second, (scales >> 32).to(gl.int32))
    tile.store(many.concat_columns(first, second, 128))
    fence_async_shared()
    named.arrive(FILLED, 1)


@gluon.jit
def decode_partition(
    even, odd, key_bias, row_line, copied, all_rows, tokens, cut, run_length, ROW: gl.constexpr,
    BS: gl.constexpr, FIXED: gl.constexpr,
):  # fmt: skip
    """Packed rows from the cache, decoded. A thread finds one row of both tiles. Prefetch: row ids
    two steps ahead of their use, tables one, and a quarter of the columns while one is stored."""
    gdc_launch_dependents()  # the merge waits for all of this grid, but its launch need not
    even_copied, odd_copied = copied
    words = all_rows.words
    even_left, even_right = many.as_words(even.left), many.as_words(even.right)
    odd_left, odd_right = many.as_words(odd.left), many.as_words(odd.right)
    step = 0
    for r in tl.range(0, pieces.num_pieces(cut), disable_licm=True):
        piece = pieces.find_piece(tokens, cut, r, run_length, pieces.ONE_LIST, FIXED)
        rows, hi = rows_of(all_rows, tokens, piece.token, BS), piece.hi
        j = first_rows(rows, piece.lo, hi, row_line, key_bias.index(step & 1), BS)
        for_even_left = load_half(words, row_line, 0, 0, ROW)
        for_odd_right = load_half(words, row_line, 1, 1, ROW)
        j += many.STEP
        row_id = load_row_ids(rows, j, hi)
        for _ in tl.range(0, piece.steps, disable_licm=True):
            block, offset = v3.look_up(row_id, rows.table, rows.M, BS)
            j += many.STEP
            row_id = load_row_ids(rows, j, hi)
            named.wait(named.EVEN_LEFT_READ, step)
            store_half(even_left, for_even_left, named.EVEN_LEFT_FILLED)
            for_even_right = load_half(words, row_line, 0, 1, ROW)
            named.wait(named.ODD_RIGHT_READ, step)
            copy_columns(odd.rope, words, row_line, 1, 2 * v3.ROPE, 64, ROW)
            async_copy.mbarrier_arrive(odd_copied, increment_count=False)
            store_half(odd_right, for_odd_right, named.ODD_RIGHT_FILLED)
            for_odd_left = load_half(words, row_line, 1, 0, ROW)
            named.wait(named.EVEN_RIGHT_READ, step)
            copy_columns(even.rope, words, row_line, 0, 2 * v3.ROPE, 64, ROW)
            async_copy.mbarrier_arrive(even_copied, increment_count=False)
            store_half(even_right, for_even_right, named.EVEN_RIGHT_FILLED)
            step += 1
            publish_rows(rows, block, offset, row_line, key_bias.index(step & 1), BS)
            for_even_left = load_half(words, row_line, 0, 0, ROW)
            named.wait(named.ODD_LEFT_READ, step - 1)
            store_half(odd_left, for_odd_left, named.ODD_LEFT_FILLED)
            for_odd_right = load_half(words, row_line, 1, 1, ROW)
    many.wait_read(step)


@gluon.jit
def copy_partition(
    even, odd, key_bias, row_line, filled, all_rows, tokens, cut, run_length, ROPE: gl.constexpr,
    ROW: gl.constexpr, BS: gl.constexpr, FIXED: gl.constexpr,
):  # fmt: skip
    """Rows of 16 bits: the copy of half a tile is issued as soon as the half was read."""
    gdc_launch_dependents()
    even_left_filled, even_right_filled, odd_left_filled, odd_right_filled = filled
    words = all_rows.words
    step = 0
    for r in tl.range(0, pieces.num_pieces(cut), disable_licm=True):
        piece = pieces.find_piece(tokens, cut, r, run_length, pieces.ONE_LIST, FIXED)
        rows, hi = rows_of(all_rows, tokens, piece.token, BS), piece.hi
        j = first_rows(rows, piece.lo, hi, row_line, key_bias.index(step & 1), BS)
        j += many.STEP
        row_id = load_row_ids(rows, j, hi)
        for _ in tl.range(0, piece.steps, disable_licm=True):
            block, offset = v3.look_up(row_id, rows.table, rows.M, BS)
            j += many.STEP
            row_id = load_row_ids(rows, j, hi)
            named.wait(named.EVEN_LEFT_READ, step)
            copy_columns(even.left, words, row_line, 0, 0, 256, ROW)
            async_copy.mbarrier_arrive(even_left_filled, increment_count=False)
            named.wait(named.ODD_RIGHT_READ, step)
            copy_columns(odd.right, words, row_line, 1, 256, 256, ROW)
            if ROPE:
                copy_columns(odd.rope, words, row_line, 1, 512, 64, ROW)
            async_copy.mbarrier_arrive(odd_right_filled, increment_count=False)
            named.wait(named.EVEN_RIGHT_READ, step)
            copy_columns(even.right, words, row_line, 0, 256, 256, ROW)
            if ROPE:
                copy_columns(even.rope, words, row_line, 0, 512, 64, ROW)
            async_copy.mbarrier_arrive(even_right_filled, increment_count=False)
            named.wait(named.ODD_LEFT_READ, step)
            copy_columns(odd.left, words, row_line, 1, 0, 256, ROW)
            async_copy.mbarrier_arrive(odd_left_filled, increment_count=False)
            step += 1
            publish_rows(rows, block, offset, row_line, key_bias.index(step & 1), BS)
    many.wait_read(step)


@gluon.jit
def load_partition(
    even, odd, key_bias, row_line, filled, rows, tokens, cut, run_length, PACKED: gl.constexpr,
    ROPE: gl.constexpr, ROW: gl.constexpr, BS: gl.constexpr, FIXED: gl.constexpr,
):  # fmt: skip
    if PACKED:
        copied = (filled[1], filled[3])
        decode_partition(
            even, odd, key_bias, row_line, copied, rows, tokens, cut, run_length, ROW, BS, FIXED
        )
    else:
        copy_partition(
            even, odd, key_bias, row_line, filled, rows, tokens, cut, run_length, ROPE, ROW, BS,
            FIXED,
        )  # fmt: skip


@gluon.jit(
    do_not_specialize=v3.DO_NOT_SPECIALIZE,
    do_not_specialize_on_alignment=[*DO_NOT_SPECIALIZE_ON_ALIGNMENT, "q_scale", "table"],
)
def _many_heads_v3_kernel(
    q, q_scale, words, row_ids, row_lens, query_start_loc, table, sink, out, lse, part, part_lse,
    spans,
    B, first_token, T, slot_rows, units, first_part,
    num_blocks, qk_scale, q_token, q_head, ids_stride,
    table_stride, K, M, run_length,
    Q_SCALES: gl.constexpr, PACKED: gl.constexpr, ROPE: gl.constexpr, ROW: gl.constexpr,
    BS: gl.constexpr, H: gl.constexpr, SINK: gl.constexpr, FIXED: gl.constexpr,
    ODD_REGISTERS: gl.constexpr, LOAD_REGISTERS: gl.constexpr,
):  # fmt: skip
    qk_scale = qk_scale.to(gl.float32)  # inside a compiled graph it may arrive as fp64
    queries, even, odd = many.allocate_tiles()
    q_rope = gl.allocate_shared_memory(gl.bfloat16, [64, 64], many.TILE)
    even_rope = gl.allocate_shared_memory(gl.bfloat16, [64, 64], many.TILE)
    odd_rope = gl.allocate_shared_memory(gl.bfloat16, [64, 64], many.TILE)
    odd_probs = gl.allocate_shared_memory(gl.bfloat16, [64, 64], many.TILE)
    key_bias = gl.allocate_shared_memory(gl.float32, [2, many.STEP], primitives.LINE)
    row_line = gl.allocate_shared_memory(gl.int32, [many.STEP], primitives.LINE)
    lines = many.allocate_head_lines(3 if Q_SCALES else 2)
    signals, filled = many.allocate_mbarriers(4)
    even_left, even_right, odd_left, odd_right = filled
    queries = many.Tile(queries[0], queries[1], q_rope)
    even = many.Tile(even[0], even[1], even_rope)
    odd = many.Tile(odd[0], odd[1], odd_rope)
    # once scored, the rope of the even tile makes room for its probs
    exchange = many.Exchange(even_rope, odd_probs, key_bias, lines[0], lines[1], lines[-1])
    tokens = pieces.Tokens(query_start_loc, B, row_lens, K, row_lens, 0, 0, 0, 0)
    cut = pieces.own_cut(first_token, T, units, first_part, FIXED)
    rows = Rows(words, row_ids, ids_stride, table, table_stride, M, num_blocks)
    outputs = many.Outputs(out, lse, sink, part, part_lse, spans, slot_rows)
    COPIED: gl.constexpr = not PACKED
    SCALE: gl.constexpr = v3.DECODE_SCALE if PACKED else 1.0
    ROPE_TILE: gl.constexpr = ROPE
    DECODED: gl.constexpr = 512
    if PACKED:
        qk_scale = qk_scale * v3.INV_DECODE_SCALE
    # constants stay constants only inside this very call
    gl.warp_specialize(
        [
            (many.even_partition, (
                queries, even, odd.left, exchange, (even_left, even_right), signals, q, q_scale,
                q_token, q_head, tokens, cut, run_length, qk_scale, outputs, H, SINK, ROPE_TILE,
                COPIED, SCALE, DECODED, Q_SCALES, pieces.ONE_LIST, FIXED,
            )),
            (many.odd_partition, (
                queries, even.right, odd, exchange, (odd_left, odd_right), signals, tokens, cut,
                run_length, qk_scale, outputs, H, SINK, ROPE_TILE, COPIED, SCALE, DECODED, Q_SCALES,
                pieces.ONE_LIST, FIXED,
            )),
            (load_partition, (
                even, odd, key_bias, row_line, (even_left, even_right, odd_left, odd_right), rows,
                tokens, cut, run_length, PACKED, ROPE, ROW, BS, FIXED,
            )),
        ],
        [4, 4],
        [ODD_REGISTERS, LOAD_REGISTERS],
    )  # fmt: skip
