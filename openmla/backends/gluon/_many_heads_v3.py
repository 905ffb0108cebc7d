"""Latent attention of many heads over rows of 512 + 64, fp8_ds_mla or 16 bits; Gluon, SM90.

Computes  what _latent.py does, for a segment of slots or positions, 64 heads a program
Grid      (cdiv(H, 64), T, X): one program owns one token, 64 heads, one run of its rows; a grid
          holds 65535 tokens, more take several launches
Reads     q [T, H, 576]; rows as 32-bit words, ROW from one to the next; their names [T, K]: slots,
          or with BS > 0 positions that table [B, M] says the block of
Writes    out [T, H, 512] and lse [T, H]; with X > 1 runs part [T, X, H, 512] and part_lse

Warps and their schedule are _many_heads.py's. Of packed rows (PACKED) 512 columns are decoded, all
others are copied.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
)

from openmla.backends.gluon._few_heads import (
    CHANGING,
    SHIFTED,
    SMALLER,
    find_row,
    first_owner,
    look_up,
)
from openmla.backends.gluon._many_heads import (
    COPY,
    EVEN_LEFT_FILLED,
    EVEN_LEFT_READ,
    EVEN_RIGHT_FILLED,
    EVEN_RIGHT_READ,
    FOUND,
    LINE,
    ODD_LEFT_FILLED,
    ODD_LEFT_READ,
    ODD_RIGHT_FILLED,
    ODD_RIGHT_READ,
    ROWS,
    TILE,
    WORD_TILE,
    WORDS,
    beside,
    decode_word,
    even_partition,
    halves,
    odd_partition,
    tell,
    wait_for,
)
from openmla.backends.triton._build import PLANNED
from openmla.backends.triton._versions import async_load, reinterpret


@gluon.jit
def load_names(names, j, hi):
    return gl.load(names + j, mask=j < hi, other=-1)


@gluon.jit
def note_rows(block, offset, num_blocks, row_line, bias, BS: gl.constexpr):
    """What other threads will look up: the numbers of rows, -1 of those that are not there."""
    row, there = find_row(block, offset, num_blocks, BS)
    row_line.store(gl.where(there, row.to(gl.int32), -1))
    bias.store(gl.where(there, 0.0, float("-inf")))


@gluon.jit
def copy_columns(
    tile, words, row_line, half: gl.constexpr, first: gl.constexpr, COLUMNS: gl.constexpr,
    ROW: gl.constexpr,
):  # fmt: skip
    """16-bit columns from `first` on, which are stored as they are; zeros for rows not there."""
    row = row_line.slice(64 * half, 64).load(gl.SliceLayout(1, COPY))
    at = words.to(gl.pointer_type(gl.bfloat16), bitcast=True) + first
    at += (gl.maximum(row, 0).to(gl.int64) * (2 * ROW))[:, None]
    at += gl.arange(0, COLUMNS, gl.SliceLayout(0, COPY))[None, :]
    there, at = gl.broadcast((row >= 0)[:, None], at)
    async_load(tile, at, mask=there)


@gluon.jit
def load_half(words, row_line, half: gl.constexpr, right: gl.constexpr, ROW: gl.constexpr):
    """256 columns of one tile's rows, not yet decoded, with the two scales of each row in 8 bytes;
    zeros for rows that are not there, which make zeros of any bytes."""
    row = row_line.slice(64 * half, 64).load(ROWS)
    start = gl.maximum(row, 0).to(gl.int64) * ROW
    at = words + 64 * right + start[:, None] + gl.arange(0, 32, gl.SliceLayout(0, WORDS))[None, :]
    scales_at = (words + 128 + 2 * right + start).to(gl.pointer_type(gl.int64), bitcast=True)
    scales = gl.load(scales_at, mask=row >= 0, other=0)
    return gl.load(at), gl.load(at + 32), scales


@gluon.jit
def decode_group(words, scale):
    """128 columns, two bf16 a word, as much smaller as _few_heads.py has them."""
    scale = scale.to(gl.float32, bitcast=True) * SHIFTED
    half = scale.to(gl.bfloat16).to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF
    both, words = gl.broadcast((half | (half << 16))[:, None], words)
    low, high = decode_word(words, both)
    return gl.reshape(gl.join(low, high), [64, 64])


@gluon.jit
def put_half(tile, loaded, FILLED: gl.constexpr):
    """In one store: between two the compiler would have all threads meet."""
    first, second, scales = loaded
    first = decode_group(first, scales.to(gl.int32))
    second = decode_group(second, (scales >> 32).to(gl.int32))
    tile.store(beside(first, second, 128))
    fence_async_shared()
    tell(FILLED, 1)


@gluon.jit
def decode_partition(
    k0, k1, bias, row_line, copied, rows, lo, hi, steps, ROW: gl.constexpr, BS: gl.constexpr
):
    """Packed rows from the cache, decoded. A thread finds one row of both tiles; names are read two
    steps ahead of their use, tables one. A quarter of the columns is on its way while one is
    written."""
    k0_left, k0_right, k0_rope = k0
    k1_left, k1_right, k1_rope = k1
    rope0_copied, rope1_copied = copied
    words, names, table, M, num_blocks = rows
    left0 = reinterpret(k0_left, gl.int32, [64, 128], WORD_TILE)
    right0 = reinterpret(k0_right, gl.int32, [64, 128], WORD_TILE)
    left1 = reinterpret(k1_left, gl.int32, [64, 128], WORD_TILE)
    right1 = reinterpret(k1_right, gl.int32, [64, 128], WORD_TILE)
    j = lo + gl.arange(0, 128, FOUND)
    block, offset = look_up(load_names(names, j, hi), table, M, BS)
    note_rows(block, offset, num_blocks, row_line, bias.index(0), BS)
    even = load_half(words, row_line, 0, 0, ROW)
    odd = load_half(words, row_line, 1, 1, ROW)
    j += 128
    name = load_names(names, j, hi)
    for i in tl.range(0, steps, disable_licm=True):
        block, offset = look_up(name, table, M, BS)
        j += 128
        name = load_names(names, j, hi)
        wait_for(EVEN_LEFT_READ, i)
        put_half(left0, even, EVEN_LEFT_FILLED)
        even_right = load_half(words, row_line, 0, 1, ROW)
        wait_for(ODD_RIGHT_READ, i)
        copy_columns(k1_rope, words, row_line, 1, 264, 64, ROW)
        async_copy.mbarrier_arrive(rope1_copied, increment_count=False)
        put_half(right1, odd, ODD_RIGHT_FILLED)
        odd_left = load_half(words, row_line, 1, 0, ROW)
        wait_for(EVEN_RIGHT_READ, i)
        copy_columns(k0_rope, words, row_line, 0, 264, 64, ROW)
        async_copy.mbarrier_arrive(rope0_copied, increment_count=False)
        put_half(right0, even_right, EVEN_RIGHT_FILLED)
        note_rows(block, offset, num_blocks, row_line, bias.index((i + 1) & 1), BS)
        even = load_half(words, row_line, 0, 0, ROW)
        wait_for(ODD_LEFT_READ, i)
        put_half(left1, odd_left, ODD_LEFT_FILLED)
        odd = load_half(words, row_line, 1, 1, ROW)


@gluon.jit
def copy_partition(
    k0, k1, bias, row_line, filled, rows, lo, hi, steps, ROW: gl.constexpr, BS: gl.constexpr
):
    """Rows of 16 bits: half a tile is asked for as soon as it was read."""
    k0_left, k0_right, k0_rope = k0
    k1_left, k1_right, k1_rope = k1
    left0_filled, right0_filled, left1_filled, right1_filled = filled
    words, names, table, M, num_blocks = rows
    j = lo + gl.arange(0, 128, FOUND)
    block, offset = look_up(load_names(names, j, hi), table, M, BS)
    note_rows(block, offset, num_blocks, row_line, bias.index(0), BS)
    j += 128
    name = load_names(names, j, hi)
    for i in tl.range(0, steps, disable_licm=True):
        block, offset = look_up(name, table, M, BS)
        j += 128
        name = load_names(names, j, hi)
        wait_for(EVEN_LEFT_READ, i)
        copy_columns(k0_left, words, row_line, 0, 0, 256, ROW)
        async_copy.mbarrier_arrive(left0_filled, increment_count=False)
        wait_for(ODD_RIGHT_READ, i)
        copy_columns(k1_right, words, row_line, 1, 256, 256, ROW)
        copy_columns(k1_rope, words, row_line, 1, 512, 64, ROW)
        async_copy.mbarrier_arrive(right1_filled, increment_count=False)
        wait_for(EVEN_RIGHT_READ, i)
        copy_columns(k0_right, words, row_line, 0, 256, 256, ROW)
        copy_columns(k0_rope, words, row_line, 0, 512, 64, ROW)
        async_copy.mbarrier_arrive(right0_filled, increment_count=False)
        wait_for(ODD_LEFT_READ, i)
        copy_columns(k1_left, words, row_line, 1, 0, 256, ROW)
        async_copy.mbarrier_arrive(left1_filled, increment_count=False)
        note_rows(block, offset, num_blocks, row_line, bias.index((i + 1) & 1), BS)


@gluon.jit(do_not_specialize=CHANGING, do_not_specialize_on_alignment=[*PLANNED, "table"])
def _many_heads_v3_kernel(
    q, words, names, row_lens, query_start_loc, table, sink, out, lse,
    B, first_token, num_blocks, qk_scale, q_token, q_head, names_stride, table_stride, K, M, X,
    run_length,
    PACKED: gl.constexpr, ROW: gl.constexpr, BS: gl.constexpr, H: gl.constexpr,
    SPLIT: gl.constexpr, SINK: gl.constexpr, ODD_REGISTERS: gl.constexpr,
    LOAD_REGISTERS: gl.constexpr,
):  # fmt: skip
    first_head = gl.program_id(0) * 64
    t = first_token + gl.program_id(1)
    x = gl.program_id(2)
    t64 = t.to(gl.int64)
    qk_scale = qk_scale.to(gl.float32)  # inside a compiled graph it may arrive as fp64
    queries = halves()
    k0 = halves()
    k1 = halves()
    q_rope = gl.allocate_shared_memory(gl.bfloat16, [64, 64], TILE)
    k0_rope = gl.allocate_shared_memory(gl.bfloat16, [64, 64], TILE)
    k1_rope = gl.allocate_shared_memory(gl.bfloat16, [64, 64], TILE)
    p1 = gl.allocate_shared_memory(gl.bfloat16, [64, 64], TILE)
    bias = gl.allocate_shared_memory(gl.float32, [2, 128], LINE)
    row_line = gl.allocate_shared_memory(gl.int32, [128], LINE)
    lines = ()
    for _ in gl.static_range(4):
        lines += (gl.allocate_shared_memory(gl.float32, [64], LINE),)
    # each on its own: of one array the compiler would think every use touches all
    barriers = ()
    for _ in gl.static_range(6):
        barriers += (gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout()),)
    queries_there, sums_there, left0, right0, left1, right1 = barriers
    mbarrier.init(queries_there, count=1)
    mbarrier.init(sums_there, count=2)
    mbarrier.init(left0, count=128)
    mbarrier.init(right0, count=128)
    mbarrier.init(left1, count=128)
    mbarrier.init(right1, count=128)
    fence_async_shared()
    if BS > 0:
        owner = first_owner(t, query_start_loc, B)
        table += gl.minimum(owner, B - 1).to(gl.int64) * table_stride
    # this program's run of the token's rows
    n = gl.where(t < gl.load(query_start_loc + B), gl.minimum(gl.load(row_lens + t), K), 0)
    run = ((n + 127) // 128 + X - 1) // X * 128
    run = gl.where(run_length > 0, run_length, run)
    lo = x * run
    hi = gl.minimum(lo + run, n)
    steps = gl.maximum((hi - lo + 127) // 128, 1)  # where there are no rows, one of none
    names += t64 * names_stride
    q += t64 * q_token
    last_head = gl.where(hi > lo, H, 0)  # NaN of no use would make scores of no rows NaN
    line = t64
    if SPLIT:
        line = t64 * X + x
    queries = (queries[0], queries[1], q_rope)
    k0 = (k0[0], k0[1], k0_rope)
    k1 = (k1[0], k1[1], k1_rope)
    p = (k0_rope, p1)  # scored, the rope's columns of even tiles make room for weights
    largest = (lines[0], lines[1])
    totals = (lines[2], lines[3])
    rows = (words, names, table, M, num_blocks)
    # constants stay constants only inside these very calls
    if PACKED:
        ends = (qk_scale * (1.0 / SMALLER), out, lse, sink, line, first_head)
        gl.warp_specialize(
            [
                (even_partition, (
                    queries, k0, k1[0], p, bias, largest, totals, (left0, right0), queries_there,
                    sums_there, q, q_head, last_head, ends, steps, H, SINK, True, False, SMALLER,
                    512,
                )),
                (odd_partition, (
                    queries, k0[1], k1, p, bias, largest, totals, (left1, right1), queries_there,
                    sums_there, ends, steps, H, SINK, True, False, SMALLER, 512,
                )),
                (decode_partition, (
                    k0, k1, bias, row_line, (right0, right1), rows, lo, hi, steps, ROW, BS,
                )),
            ],
            [4, 4],
            [ODD_REGISTERS, LOAD_REGISTERS],
        )  # fmt: skip
    else:
        ends = (qk_scale, out, lse, sink, line, first_head)
        gl.warp_specialize(
            [
                (even_partition, (
                    queries, k0, k1[0], p, bias, largest, totals, (left0, right0), queries_there,
                    sums_there, q, q_head, last_head, ends, steps, H, SINK, True, True, 1.0, 512,
                )),
                (odd_partition, (
                    queries, k0[1], k1, p, bias, largest, totals, (left1, right1), queries_there,
                    sums_there, ends, steps, H, SINK, True, True, 1.0, 512,
                )),
                (copy_partition, (
                    k0, k1, bias, row_line, (left0, right0, left1, right1), rows, lo, hi, steps,
                    ROW, BS,
                )),
            ],
            [4, 4],
            [ODD_REGISTERS, LOAD_REGISTERS],
        )  # fmt: skip
