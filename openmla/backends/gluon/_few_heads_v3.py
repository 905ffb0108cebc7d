"""Latent attention of few heads over fp8_ds_mla rows of 512 + 64, for decode; Gluon, SM80 and up.

Computes  what _latent.py does, for a segment of slots or positions and 16 heads a program
Grid      (cdiv(H, 16), T, X): one program owns one token, 16 heads, one run of its rows; a grid
          holds 65535 tokens, more take several launches
Reads     q [T, H, 576]; rows of 656 bytes as 32-bit words, ROW from one to the next; row_ids
          [T, K]: slots, or with BS > 0 positions, which table [B, M] maps to blocks. ROW is a
          constant: 16-byte loads must be known to be aligned
Writes    out [T, H, 512] and lse [T, H]; with X > 1 runs part [T, X, H, 512] and part_lse

Data flow as in _few_heads.py.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from openmla.backends.gluon import _few_heads as few
from openmla.backends.gluon import _primitives as primitives
from openmla.backends.gluon import _rows_v3 as v3
from openmla.backends.triton._build import DO_NOT_SPECIALIZE_ON_ALIGNMENT


@gluon.jit
def decode_group(words, scale, valid, BLOCK_N: gl.constexpr):
    """[BLOCK_N, 128] bf16 from [BLOCK_N, 32] words, times DECODE_SCALE. Invalid rows get scale 0
    and so decode to zeros, whatever their bytes."""
    scales = gl.where(valid, v3.scale_pairs(scale), 0)
    scales, words = gl.broadcast(scales[:, None], words)
    a, b, c, d = primitives.decode_e4m3(words, scales)
    return gl.reshape(gl.join(gl.join(a, c), gl.join(b, d)), [BLOCK_N, v3.GROUP])


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
    s0 = gl.convert_layout(s0, primitives.ROWS, assert_trivial=True)
    s1 = gl.convert_layout(s1, primitives.ROWS, assert_trivial=True)
    s2 = gl.convert_layout(s2, primitives.ROWS, assert_trivial=True)
    s3 = gl.convert_layout(s3, primitives.ROWS, assert_trivial=True)
    return s0, s1, s2, s3


@gluon.jit(
    do_not_specialize=v3.DO_NOT_SPECIALIZE,
    do_not_specialize_on_alignment=[*DO_NOT_SPECIALIZE_ON_ALIGNMENT, "q_scale", "table"],
)
def _few_heads_kernel(
    q, q_scale, words, floats, row_ids, row_lens, query_start_loc, table, sink, out, lse,
    B, first_token, num_blocks, qk_scale, q_token, q_head, ids_stride, table_stride, K, M, X,
    run_length,
    Q_SCALES: gl.constexpr, ROW: gl.constexpr, BS: gl.constexpr, H: gl.constexpr,
    SPLIT: gl.constexpr, SINK: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    QUERY: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    QUERY_ROPE: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    first_head, t, t64, x = primitives.program(first_token, few.BLOCK_H)
    qk_scale = qk_scale.to(gl.float32)  # inside a compiled graph it may arrive as fp64
    queries = ()
    for _ in gl.static_range(v3.GROUPS):
        queries += (gl.allocate_shared_memory(gl.bfloat16, [few.BLOCK_H, v3.GROUP], few.SHARED),)
    q_rope = gl.allocate_shared_memory(gl.bfloat16, [few.BLOCK_H, 64], few.SHARED)
    values = ()
    for _ in gl.static_range(v3.GROUPS):
        values += (gl.allocate_shared_memory(gl.bfloat16, [BLOCK_N, v3.GROUP], few.SHARED),)
    exchange = few.allocate_exchange(BLOCK_N)
    offs_row = gl.arange(0, BLOCK_N, primitives.ROWS)
    offs_word = gl.arange(0, v3.GROUP_WORDS, gl.SliceLayout(0, primitives.WORDS))[None, :]
    offs_scale = gl.arange(0, v3.GROUPS, gl.SliceLayout(0, primitives.WORDS))[None, :] + v3.SCALES
    offs_scored = gl.arange(0, BLOCK_N, few.SCORED_ROWS)
    if BS > 0:
        valid_line = gl.allocate_shared_memory(gl.int32, [BLOCK_N], primitives.LINE)
    table, n = v3.token_rows(t, row_lens, query_start_loc, table, table_stride, B, K, BS)
    lo, hi = primitives.run_bounds(n, x, X, run_length, BLOCK_N)
    blocks = gl.maximum((hi - lo + BLOCK_N - 1) // BLOCK_N, 0)
    row_ids += t64 * ids_stride
    # prefetch: row ids three tiles ahead of their use, the table two, rows one
    row_id = load_row_ids(row_ids, lo, 0, offs_row, hi)
    next_id = load_row_ids(row_ids, lo, BLOCK_N, offs_row, hi)
    block, offset = v3.look_up(row_id, table, M, BS)
    row, valid = v3.find_row(block, offset, num_blocks, BS)
    row = row * ROW
    at = words + row[:, None] + offs_word
    groups = ()
    for g in gl.static_range(v3.GROUPS):
        groups += (gl.load(at + v3.GROUP_WORDS * g),)
    rope = gl.load(at + v3.ROPE)
    scales = load_scales(floats, row, offs_scale)
    block, offset = v3.look_up(next_id, table, M, BS)
    row_id = load_row_ids(row_ids, lo, 2 * BLOCK_N, offs_row, hi)
    # queries; heads past the last are zeros
    heads = first_head + gl.arange(0, few.BLOCK_H, gl.SliceLayout(1, QUERY))
    q_at = q + (t64 * q_token + heads * q_head)[:, None]
    q_at += gl.arange(0, v3.GROUP, gl.SliceLayout(0, QUERY))[None, :]
    mask_q = (heads < H)[:, None]
    for g in gl.static_range(v3.GROUPS):
        own = gl.load(q_at + v3.GROUP * g, mask=mask_q, other=0.0)
        if Q_SCALES:  # bf16 holds e4m3 exactly; Triton 3.6 has no direct conversion on SM89
            own = own.to(gl.float32).to(gl.bfloat16)
        queries[g].store(own)
    heads = first_head + gl.arange(0, few.BLOCK_H, gl.SliceLayout(1, QUERY_ROPE))
    q_at = q + (t64 * q_token + heads * q_head)[:, None] + primitives.C
    q_at += gl.arange(0, 64, gl.SliceLayout(0, QUERY_ROPE))[None, :]
    rope_query = gl.load(q_at, mask=(heads < H)[:, None], other=0.0)
    q_rope.store((rope_query.to(gl.float32) * v3.DECODE_SCALE).to(gl.bfloat16))
    acc = ()
    for _ in gl.static_range(v3.GROUPS):
        acc += (gl.zeros([few.BLOCK_H, v3.GROUP], gl.float32, few.MMA),)
    running_sum, running_max = few.initial_state(BLOCK_N)
    if Q_SCALES:
        if Q_SCALES == 2:
            q_scale += t64 * H
        qk_scale = few.scale_heads(qk_scale, q_scale, first_head, H, Q_SCALES)
    primitives.thread_barrier()
    for i in tl.range(0, blocks, disable_licm=True):
        start = lo + i * BLOCK_N
        if BS > 0:
            valid_line.store(valid.to(gl.int32))
        else:
            scored_id = load_row_ids(row_ids, start, 0, offs_scored, hi)
        next_row, next_valid = v3.find_row(block, offset, num_blocks, BS)
        next_row = next_row * ROW
        at = words + next_row[:, None] + offs_word
        scores = gl.zeros([few.BLOCK_H, BLOCK_N], gl.float32, few.MMA)
        next_groups = ()
        for g in gl.static_range(v3.GROUPS):
            tile = decode_group(groups[g], scales[g], valid, BLOCK_N)
            values[g].store(tile)
            scores = few.score(scores, tile, queries[g], 16)
            next_groups += (gl.load(at + v3.GROUP_WORDS * g),)
        groups = next_groups
        first, second = primitives.split_words(gl.where(valid[:, None], rope, 0))
        scores = few.score(scores, gl.reshape(gl.join(first, second), [BLOCK_N, 64]), q_rope, 8)
        rope = gl.load(at + v3.ROPE)
        scales = load_scales(floats, next_row, offs_scale)
        block, offset = v3.look_up(row_id, table, M, BS)
        row_id = load_row_ids(row_ids, start, 3 * BLOCK_N, offs_row, hi)
        valid = next_valid
        if BS > 0:
            scored = valid_line.load(few.SCORED_ROWS) != 0
        else:
            scored = (scored_id >= 0) & (scored_id < num_blocks)
        running_max, running_sum, rescale = few.softmax_step(
            scores, scored, qk_scale, running_max, running_sum, exchange, v3.INV_DECODE_SCALE
        )
        acc = few.accumulate(acc, rescale, exchange, values, v3.GROUPS, BLOCK_N)
    normalizer, line = few.store_lse(
        running_max, running_sum, exchange, lse, sink, first_head, t64, x, X,
        v3.INV_DECODE_SCALE, H, SPLIT, SINK,
    )  # fmt: skip
    heads, at = few.output_at(out, line, first_head, v3.GROUP, H)
    mask_h = (heads < H)[:, None]
    for g in gl.static_range(v3.GROUPS):
        gl.store(at + v3.GROUP * g, (acc[g] * normalizer).to(out.dtype.element_ty), mask=mask_h)
