"""Latent attention of few heads over fp8_ds_mla rows of 512 + 64, for decode; Gluon, SM80 and up.

Computes  what _latent.py does, for a segment of slots or positions and 16 heads a program
Grid      (cdiv(H, 16), T, X): one program owns one token, 16 heads, one run of its rows; a grid
          holds 65535 tokens, more take several launches
Reads     q [T, H, 576]; rows of 656 bytes as 32-bit words, ROW from one to the next; row_ids
          [T, K]: slots, or with BS > 0 positions, whose block table [B, M] holds. ROW is a
          constant: 16-byte loads must be known to be aligned
Writes    out [T, H, 512] and lse [T, H]; with X > 1 runs part [T, X, H, 512] and part_lse

Data flow as in _few_heads.py.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from openmla.backends.gluon._few_heads import (
    BLOCK_H,
    HEADS,
    MMA,
    SCORED_ROWS,
    SHARED,
    SOFTMAX,
    accumulate,
    allocate_softmax,
    output_at,
    score,
    softmax_step,
    store_lse,
)
from openmla.backends.gluon._primitives import (
    INITIAL_MAX,
    LINE,
    ROWS,
    WORDS,
    decode_e4m3,
    run_bounds,
    split_words,
    thread_barrier,
)
from openmla.backends.gluon._rows_v3 import (
    DECODE_SCALE,
    DO_NOT_SPECIALIZE,
    GROUP_WORDS,
    GROUPS,
    INV_DECODE_SCALE,
    ROPE,
    SCALES,
    find_row,
    look_up,
    scale_pairs,
    token_rows,
)
from openmla.backends.triton._build import PLANNED


@gluon.jit
def decode_group(words, scale, valid, BLOCK_N: gl.constexpr):
    """[BLOCK_N, 128] bf16 from [BLOCK_N, 32] words, times DECODE_SCALE. Invalid rows get scale 0
    and so decode to zeros, whatever their bytes."""
    scales = gl.where(valid, scale_pairs(scale), 0)
    scales, words = gl.broadcast(scales[:, None], words)
    a, b, c, d = decode_e4m3(words, scales)
    return gl.reshape(gl.join(gl.join(a, c), gl.join(b, d)), [BLOCK_N, 128])


@gluon.jit
def load_row_ids(row_ids, start, AHEAD: gl.constexpr, offs, hi):
    return gl.load(row_ids + start + AHEAD + offs, mask=start + AHEAD + offs < hi, other=-1)


@gluon.jit
def load_scales(floats, row, columns):
    """Four scales per row."""
    four = gl.load(floats + row[:, None] + columns)
    a, b = gl.split(gl.reshape(four, [four.shape[0], 2, 2]))
    s0, s2 = gl.split(a)
    s1, s3 = gl.split(b)
    s0 = gl.convert_layout(s0, ROWS, assert_trivial=True)
    s1 = gl.convert_layout(s1, ROWS, assert_trivial=True)
    s2 = gl.convert_layout(s2, ROWS, assert_trivial=True)
    s3 = gl.convert_layout(s3, ROWS, assert_trivial=True)
    return s0, s1, s2, s3


@gluon.jit(do_not_specialize=DO_NOT_SPECIALIZE, do_not_specialize_on_alignment=[*PLANNED, "table"])
def _few_heads_kernel(
    q, words, floats, row_ids, row_lens, query_start_loc, table, sink, out, lse,
    B, first_token, num_blocks, qk_scale, q_token, q_head, ids_stride, table_stride, K, M, X,
    run_length,
    ROW: gl.constexpr, BS: gl.constexpr, H: gl.constexpr, SPLIT: gl.constexpr,
    SINK: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    QUERY: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    QUERY_ROPE: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    first_head = gl.program_id(0) * BLOCK_H
    t = first_token + gl.program_id(1)
    x = gl.program_id(2)
    t64 = t.to(gl.int64)
    qk_scale = qk_scale.to(gl.float32)  # inside a compiled graph it may arrive as fp64
    queries = ()
    for _ in gl.static_range(GROUPS):
        queries += (gl.allocate_shared_memory(gl.bfloat16, [BLOCK_H, 128], SHARED),)
    q_rope = gl.allocate_shared_memory(gl.bfloat16, [BLOCK_H, 64], SHARED)
    values = ()
    for _ in gl.static_range(GROUPS):
        values += (gl.allocate_shared_memory(gl.bfloat16, [BLOCK_N, 128], SHARED),)
    tiles = allocate_softmax(BLOCK_N)
    offs_row = gl.arange(0, BLOCK_N, ROWS)
    offs_word = gl.arange(0, GROUP_WORDS, gl.SliceLayout(0, WORDS))[None, :]
    offs_scale = gl.arange(0, GROUPS, gl.SliceLayout(0, WORDS))[None, :] + SCALES
    offs_scored = gl.arange(0, BLOCK_N, SCORED_ROWS)
    if BS > 0:
        valid_line = gl.allocate_shared_memory(gl.int32, [BLOCK_N], LINE)
    table, n = token_rows(t, row_lens, query_start_loc, table, table_stride, B, K, BS)
    lo, hi = run_bounds(n, x, X, run_length, BLOCK_N)
    blocks = gl.maximum((hi - lo + BLOCK_N - 1) // BLOCK_N, 0)
    row_ids += t64 * ids_stride
    # prefetch: row ids three tiles ahead of their use, the table two, rows one
    row_id = load_row_ids(row_ids, lo, 0, offs_row, hi)
    next_id = load_row_ids(row_ids, lo, BLOCK_N, offs_row, hi)
    block, offset = look_up(row_id, table, M, BS)
    row, valid = find_row(block, offset, num_blocks, BS)
    row = row * ROW
    at = words + row[:, None] + offs_word
    groups = ()
    for g in gl.static_range(GROUPS):
        groups += (gl.load(at + GROUP_WORDS * g),)
    rope = gl.load(at + ROPE)
    scales = load_scales(floats, row, offs_scale)
    block, offset = look_up(next_id, table, M, BS)
    row_id = load_row_ids(row_ids, lo, 2 * BLOCK_N, offs_row, hi)
    # queries; heads past the last are zeros
    heads = first_head + gl.arange(0, BLOCK_H, gl.SliceLayout(1, QUERY))
    q_at = q + (t64 * q_token + heads * q_head)[:, None]
    q_at += gl.arange(0, 128, gl.SliceLayout(0, QUERY))[None, :]
    mask_q = (heads < H)[:, None]
    for g in gl.static_range(GROUPS):
        queries[g].store(gl.load(q_at + 128 * g, mask=mask_q, other=0.0))
    heads = first_head + gl.arange(0, BLOCK_H, gl.SliceLayout(1, QUERY_ROPE))
    q_at = q + (t64 * q_token + heads * q_head)[:, None] + 512
    q_at += gl.arange(0, 64, gl.SliceLayout(0, QUERY_ROPE))[None, :]
    rope_query = gl.load(q_at, mask=(heads < H)[:, None], other=0.0)
    q_rope.store((rope_query.to(gl.float32) * DECODE_SCALE).to(gl.bfloat16))
    acc = ()
    for _ in gl.static_range(GROUPS):
        acc += (gl.zeros([BLOCK_H, 128], gl.float32, MMA),)
    running_sum = gl.zeros([BLOCK_H, BLOCK_N], gl.float32, SOFTMAX)  # reduced in the epilogue
    running_max = gl.full([BLOCK_H], INITIAL_MAX, gl.float32, HEADS)
    thread_barrier()
    for i in tl.range(0, blocks, disable_licm=True):
        start = lo + i * BLOCK_N
        if BS > 0:
            valid_line.store(valid.to(gl.int32))
        else:
            scored_id = load_row_ids(row_ids, start, 0, offs_scored, hi)
        next_row, next_valid = find_row(block, offset, num_blocks, BS)
        next_row = next_row * ROW
        at = words + next_row[:, None] + offs_word
        scores = gl.zeros([BLOCK_H, BLOCK_N], gl.float32, MMA)
        next_groups = ()
        for g in gl.static_range(GROUPS):
            tile = decode_group(groups[g], scales[g], valid, BLOCK_N)
            values[g].store(tile)
            scores = score(scores, tile, queries[g], 16)
            next_groups += (gl.load(at + GROUP_WORDS * g),)
        groups = next_groups
        first, second = split_words(gl.where(valid[:, None], rope, 0))
        scores = score(scores, gl.reshape(gl.join(first, second), [BLOCK_N, 64]), q_rope, 8)
        rope = gl.load(at + ROPE)
        scales = load_scales(floats, next_row, offs_scale)
        block, offset = look_up(row_id, table, M, BS)
        row_id = load_row_ids(row_ids, start, 3 * BLOCK_N, offs_row, hi)
        valid = next_valid
        if BS > 0:
            scored = valid_line.load(SCORED_ROWS) != 0
        else:
            scored = (scored_id >= 0) & (scored_id < num_blocks)
        running_max, running_sum, rescale = softmax_step(
            scores, scored, qk_scale, running_max, running_sum, tiles, INV_DECODE_SCALE
        )
        acc = accumulate(acc, rescale, tiles[0], values, GROUPS, BLOCK_N)
    normaliser, line = store_lse(
        running_max, running_sum, tiles[2], lse, sink, first_head, t64, x, X, INV_DECODE_SCALE, H,
        SPLIT, SINK,
    )  # fmt: skip
    heads, at = output_at(out, line, first_head, 128, H)
    mask_h = (heads < H)[:, None]
    for g in gl.static_range(GROUPS):
        gl.store(at + 128 * g, (acc[g] * normaliser).to(out.dtype.element_ty), mask=mask_h)
