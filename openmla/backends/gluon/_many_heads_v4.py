"""Latent attention of many heads over V4's rows of 448 + 64 (fp8_dsv4); Gluon, SM90.

Computes  what _few_heads_v4.py does, 64 heads a program
Grid      (cdiv(H, 64), T, X): one program owns one token, 64 heads, one run of its rows; a grid
          holds 65535 tokens, more take several launches
Reads     as _few_heads_v4.py
Writes    out [T, H, 512] and lse [T, H]; with X > 1 runs part [T, X, H, 512] and part_lse

Warps and their schedule are _many_heads.py's.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
)

from openmla.backends.gluon._few_heads import first_owner
from openmla.backends.gluon._few_heads_v4 import (
    CHANGING,
    GROUPS,
    LARGER,
    MISSING,
    SMALLER,
    load_names,
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

ABSENT = gl.constexpr(-(2**62))  # where no scales are: the other cache may be at lower addresses


@gluon.jit
def decode_group(words, scales, g: gl.constexpr):
    """64 columns, two bf16 a word; see _few_heads_v4.py."""
    exponent = ((scales >> (8 * g)) & 0xFF).to(gl.int32) + MISSING
    both = gl.where(exponent > 254, 0x7FC07FC0, exponent * 0x00800080)
    both, words = gl.broadcast(both[:, None], words)
    low, high = decode_word(words, both)
    return gl.reshape(gl.join(low, high), [64, 32])


@gluon.jit
def find(
    j, block, offset, n_1, page_1, N_1, page_2, N_2, apart, BS_1: gl.constexpr, BS_2: gl.constexpr,
):  # fmt: skip
    """Where rows are, in 16 bytes from the first cache's start, and where their scales, in 8: the
    first row and ABSENT where there is none. The other cache is `apart` from the first."""
    there = (block >= 0) & (block < gl.where(j < n_1, N_1, N_2))
    offset = gl.where(there, offset, 0)
    page = gl.where(there, block, 0).to(gl.int64) * gl.where(j < n_1, page_1, page_2)
    page += gl.where(there & (j >= n_1), apart, 0)
    scales = page * 2 + gl.where(j < n_1, BS_1 * 72, BS_2 * 72) + offset
    return page + offset * 36, gl.where(there, scales, ABSENT)


@gluon.jit
def load_groups(words, row_line, half: gl.constexpr, first: gl.constexpr, last: gl.constexpr):
    """64 columns at a time of one tile's rows, not yet decoded."""
    at = words + (row_line.slice(64 * half, 64).load(ROWS) * 4)[:, None]
    at += gl.arange(0, 16, gl.SliceLayout(0, WORDS))[None, :]
    groups = ()
    for g in gl.static_range(first, last):
        groups += (gl.load(at + 16 * g),)
    return groups


@gluon.jit
def load_scales(words, scale_line, half: gl.constexpr):
    """Eight exponents a row; zeros for rows that are not there, which make zeros of any bytes."""
    at = scale_line.slice(64 * half, 64).load(ROWS)
    return gl.load(
        words.to(gl.pointer_type(gl.int64), bitcast=True) + at, mask=at != ABSENT, other=0
    )


@gluon.jit
def put_left(tile, groups, scales, FILLED: gl.constexpr):
    """Columns 0 to 255, in one store: between two the compiler would have all threads meet."""
    first = beside(decode_group(groups[0], scales, 0), decode_group(groups[1], scales, 1), 64)
    second = beside(decode_group(groups[2], scales, 2), decode_group(groups[3], scales, 3), 64)
    tile.store(beside(first, second, 128))
    fence_async_shared()
    tell(FILLED, 1)


@gluon.jit
def put_right(tile, groups, scales, FILLED: gl.constexpr):
    """Columns 256 to 447."""
    both = beside(decode_group(groups[0], scales, 4), decode_group(groups[1], scales, 5), 64)
    tile.slice(0, 64, 1).store(both)
    tile.slice(64, 32, 1).store(decode_group(groups[2], scales, 6))
    fence_async_shared()
    tell(FILLED, 1)


@gluon.jit
def copy_rope(tile, words, row_line, scale_line, half: gl.constexpr, copied):
    """Columns 448 to 511, which are stored as they are; zeros for rows that are not there."""
    SLICE: gl.constexpr = gl.SliceLayout(1, COPY)
    there = scale_line.slice(64 * half, 64).load(SLICE) != ABSENT
    at = words.to(gl.pointer_type(gl.bfloat16), bitcast=True) + 32 * GROUPS
    at += (row_line.slice(64 * half, 64).load(SLICE) * 8)[:, None]
    at += gl.arange(0, 64, gl.SliceLayout(0, COPY))[None, :]
    there, at = gl.broadcast(there[:, None], at)
    async_load(tile.slice(192, 64, 1), at, mask=there)
    async_copy.mbarrier_arrive(copied, increment_count=False)


@gluon.jit
def load_partition(
    k0, k1, bias, row_line, scale_line, copied, rows, lo, hi, steps, LISTED: gl.constexpr,
    BS_1: gl.constexpr, BS_2: gl.constexpr,
):  # fmt: skip
    """Rows from the caches, decoded. A thread finds one row of both tiles; names are read two steps
    ahead of their use, tables one. A quarter of the columns is on its way while one is written."""
    k0_left, k0_right = k0
    k1_left, k1_right = k1
    rope0_copied, rope1_copied = copied
    names, n_1, newest, table_1, M_1, table_2, M_2, words, page_1, N_1, page_2, N_2, apart = rows
    left0 = reinterpret(k0_left, gl.int32, [64, 128], WORD_TILE)
    right0 = reinterpret(k0_right, gl.int32, [64, 128], WORD_TILE)
    left1 = reinterpret(k1_left, gl.int32, [64, 128], WORD_TILE)
    right1 = reinterpret(k1_right, gl.int32, [64, 128], WORD_TILE)
    j = lo + gl.arange(0, 128, FOUND)
    name = load_names(names, j, n_1, hi, LISTED)
    block, offset = look_up(j, name, n_1, hi, newest, table_1, M_1, table_2, M_2, BS_1, BS_2)
    row, scale_at = find(j, block, offset, n_1, page_1, N_1, page_2, N_2, apart, BS_1, BS_2)
    row_line.store(row)
    scale_line.store(scale_at)
    bias.index(0).store(gl.where(scale_at != ABSENT, 0.0, float("-inf")))
    even = load_groups(words, row_line, 0, 0, 4)
    even_scales = load_scales(words, scale_line, 0)
    odd = load_groups(words, row_line, 1, 4, GROUPS)
    odd_scales = load_scales(words, scale_line, 1)
    name = load_names(names, j + 128, n_1, hi, LISTED)
    for i in tl.range(0, steps, disable_licm=True):
        j += 128
        block, offset = look_up(j, name, n_1, hi, newest, table_1, M_1, table_2, M_2, BS_1, BS_2)
        name = load_names(names, j + 128, n_1, hi, LISTED)
        wait_for(EVEN_LEFT_READ, i)
        put_left(left0, even, even_scales, EVEN_LEFT_FILLED)
        even_right = load_groups(words, row_line, 0, 4, GROUPS)
        wait_for(ODD_RIGHT_READ, i)
        copy_rope(k1_right, words, row_line, scale_line, 1, rope1_copied)
        put_right(right1, odd, odd_scales, ODD_RIGHT_FILLED)
        odd_left = load_groups(words, row_line, 1, 0, 4)
        wait_for(EVEN_RIGHT_READ, i)
        copy_rope(k0_right, words, row_line, scale_line, 0, rope0_copied)
        put_right(right0, even_right, even_scales, EVEN_RIGHT_FILLED)
        row, scale_at = find(j, block, offset, n_1, page_1, N_1, page_2, N_2, apart, BS_1, BS_2)
        row_line.store(row)
        scale_line.store(scale_at)
        bias.index((i + 1) & 1).store(gl.where(scale_at != ABSENT, 0.0, float("-inf")))
        even = load_groups(words, row_line, 0, 0, 4)
        even_scales = load_scales(words, scale_line, 0)
        wait_for(ODD_LEFT_READ, i)
        put_left(left1, odd_left, odd_scales, ODD_LEFT_FILLED)
        odd = load_groups(words, row_line, 1, 4, GROUPS)
        odd_scales = load_scales(words, scale_line, 1)


@gluon.jit(do_not_specialize=CHANGING, do_not_specialize_on_alignment=PLANNED)
def _many_heads_v4_kernel(
    q, words_1, table_1, words_2, table_2, names, row_lens, positions, query_start_loc, sink, out,
    lse,
    B, first_token, qk_scale, q_token, q_head, names_stride, K, X, run_length,
    page_1, N_1, M_1, span_1, table_stride_1, page_2, N_2, M_2, span_2, table_stride_2,
    LISTED: gl.constexpr, BS_1: gl.constexpr, BS_2: gl.constexpr, H: gl.constexpr,
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
    p0 = gl.allocate_shared_memory(gl.bfloat16, [64, 64], TILE)
    p1 = gl.allocate_shared_memory(gl.bfloat16, [64, 64], TILE)
    bias = gl.allocate_shared_memory(gl.float32, [2, 128], LINE)
    row_line = gl.allocate_shared_memory(gl.int64, [128], LINE)
    scale_line = gl.allocate_shared_memory(gl.int64, [128], LINE)
    lines = ()
    for _ in gl.static_range(4):
        lines += (gl.allocate_shared_memory(gl.float32, [64], LINE),)
    # each on its own: of one array the compiler would think every use touches all
    barriers = ()
    for _ in gl.static_range(4):
        barriers += (gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout()),)
    queries_there, sums_there, rope0_copied, rope1_copied = barriers
    mbarrier.init(queries_there, count=1)
    mbarrier.init(sums_there, count=2)
    mbarrier.init(rope0_copied, count=128)
    mbarrier.init(rope1_copied, count=128)
    fence_async_shared()
    # this program's run of the token's rows, see _few_heads_v4.py
    owner = gl.minimum(first_owner(t, query_start_loc, B), B - 1).to(gl.int64)
    table_1 += owner * table_stride_1
    table_2 += owner * table_stride_2
    names += t64 * names_stride
    position = gl.load(positions + t)
    n_1 = gl.minimum(gl.minimum(position + 1, span_1), M_1 * BS_1).to(gl.int32)
    newest = (position % gl.maximum(M_1 * BS_1, 1)).to(gl.int32)
    if LISTED:
        n_2 = gl.minimum(gl.load(row_lens + t), K)
    else:
        n_2 = gl.minimum((position + 1) // span_2, M_2 * BS_2).to(gl.int32)
    owned = t < gl.load(query_start_loc + B)
    n_1 = gl.where(owned, gl.maximum(n_1, 0), 0)
    n = n_1 + gl.where(owned, gl.maximum(n_2, 0), 0)
    run = ((n + 127) // 128 + X - 1) // X * 128
    run = gl.where(run_length > 0, run_length, run)
    lo = x * run
    hi = gl.minimum(lo + run, n)
    steps = gl.maximum((hi - lo + 127) // 128, 1)  # where there are no rows, one of none
    apart = (words_2.to(gl.int64) - words_1.to(gl.int64)) // 16
    q += t64 * q_token
    last_head = gl.where(hi > lo, H, 0)  # NaN of no use would make scores of no rows NaN
    line = t64
    if SPLIT:
        line = t64 * X + x
    # no tile of its own for the rope: it is among the values, and p0 stands for what is not used
    queries = (queries[0], queries[1], p0)
    even_keys = (k0[0], k0[1], p0)
    odd_keys = (k1[0], k1[1], p0)
    p = (p0, p1)
    largest = (lines[0], lines[1])
    totals = (lines[2], lines[3])
    even_filled = (rope0_copied, rope0_copied)
    odd_filled = (rope1_copied, rope1_copied)
    ends = (qk_scale * LARGER, out, lse, sink, line, first_head)
    rows = (
        names, n_1, newest, table_1, M_1, table_2, M_2, words_1, page_1, N_1, page_2, N_2, apart,
    )  # fmt: skip
    # constants stay constants only inside this very call
    gl.warp_specialize(
        [
            (even_partition, (
                queries, even_keys, k1[0], p, bias, largest, totals, even_filled, queries_there,
                sums_there, q, q_head, last_head, ends, steps, H, SINK, False, False, SMALLER,
                64 * GROUPS,
            )),
            (odd_partition, (
                queries, k0[1], odd_keys, p, bias, largest, totals, odd_filled, queries_there,
                sums_there, ends, steps, H, SINK, False, False, SMALLER, 64 * GROUPS,
            )),
            (load_partition, (
                k0, k1, bias, row_line, scale_line, (rope0_copied, rope1_copied), rows, lo, hi,
                steps, LISTED, BS_1, BS_2,
            )),
        ],
        [4, 4],
        [ODD_REGISTERS, LOAD_REGISTERS],
    )  # fmt: skip
