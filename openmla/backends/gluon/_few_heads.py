"""Latent attention of few heads over fp8_ds_mla rows of 512 + 64, for decode; Gluon, SM80 and up.

Computes  what _latent.py does, for a segment of slots or positions and 16 heads a program
Grid      (cdiv(H, 16), T, X): one program owns one token, 16 heads, one run of its rows; a grid
          holds 65535 tokens, more take several launches
Reads     q [T, H, 576], rows of 656 bytes as 32-bit words, ROW from one to the next, their names
          [T, K]: slots, or with BS > 0 positions that table [B, M] says the block of. ROW is a
          constant, or 16-byte loads could not be told to be aligned
Writes    out [T, H, 512] and lse [T, H]; with X > 1 runs part [T, X, H, 512] and part_lse

The 16-byte loads of 8 rows by 4 lanes are already the second operand of q @ rows.T when that has
16 values per lane, so keys go from memory through the decoder into the matrix units without
shared memory; the same registers are stored once, as bf16, to be read transposed as values. Scores
pass through a small tile so that a head's softmax stays within one warp.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from openmla.backends.triton._build import PLANNED

# its name until Triton 3.6, and since
thread_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier
LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
# What differs from step to step: no other value of these is another kernel.
CHANGING = ("B", "first_token", "num_blocks", "table_stride", "K", "M", "X")
# Shifted e4m3 bits are 2**120 too small as bf16. Tiles are kept 2**16 smaller than the rows, so
# that a scale times what is missing fits bf16 up to 2**23; rope queries, logits, outputs make up.
SHIFTED = gl.constexpr(2.0**104)
SMALLER = gl.constexpr(2.0**-16)
LARGER = gl.constexpr(2.0**16)


@gluon.jit
def decode_words(words, scales):
    """Four e4m3 bytes a word as bf16: bits shifted into place, times a scale given as two equal
    bf16 that hold the power of two the shift is short of. A NaN byte counts as 480: writers mark
    NaN in the scale."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 t, u, v, z, none;
        mov.b32 z, 0;
        mov.b32 none, 0x80008000;
        prmt.b32 t, $4, z, 0x1404;
        shr.u32 u, t, 4;
        and.b32 v, t, 0x80008000;
        lop3.b32 u, u, 0x07f007f0, v, 0xea;
        fma.rn.bf16x2 u, u, $5, none;
        mov.b32 {$0, $1}, u;
        prmt.b32 t, $4, z, 0x3424;
        shr.u32 u, t, 4;
        and.b32 v, t, 0x80008000;
        lop3.b32 u, u, 0x07f007f0, v, 0xea;
        fma.rn.bf16x2 u, u, $5, none;
        mov.b32 {$2, $3}, u;
        }""",
        "=h,=h,=h,=h,r,r",
        [words, scales],
        dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def split_words(words):
    """Two bf16 a word."""
    return gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;",
        "=h,=h,r",
        [words],
        dtype=(gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def decode_tile(words, scale, there, BLOCK_N: gl.constexpr):
    """[BLOCK_N, 128] bf16 of [BLOCK_N, 32] words, times 2**-16; a row that is not there has scale 0
    and so is zeros, whatever its bytes."""
    half = (scale * SHIFTED).to(gl.bfloat16).to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF
    both = gl.where(there, half | (half << 16), 0)
    both, words = gl.broadcast(both[:, None], words)
    a, b, c, d = decode_words(words, both)
    return gl.reshape(gl.join(gl.join(a, c), gl.join(b, d)), [BLOCK_N, 128])


@gluon.jit
def score_group(scores, words, scale, there, q, values, MMA: gl.constexpr, BLOCK_N: gl.constexpr):
    """128 columns of the keys: kept as values in shared memory, multiplied with the queries."""
    tile = decode_tile(words, scale, there, BLOCK_N)
    values.store(tile)
    keys = gl.convert_layout(
        gl.permute(tile, (1, 0)), gl.DotOperandLayout(1, MMA, 16), assert_trivial=True
    )
    return mma_v2(q.load(gl.DotOperandLayout(0, MMA, 16)), keys, scores)


@gluon.jit
def add_values(acc, weights, values, k: gl.constexpr, MMA: gl.constexpr):
    tile = values.slice(k * 16, 16, 0).load(gl.DotOperandLayout(1, MMA, 2))
    return mma_v2(weights, tile, acc)


@gluon.jit
def load_scales(floats, row, columns):
    """The four scales of some rows."""
    four = gl.load(floats + row[:, None] + columns)
    a, b = gl.split(gl.reshape(four, [four.shape[0], 2, 2]))
    s0, s2 = gl.split(a)
    s1, s3 = gl.split(b)
    ROWS: gl.constexpr = row.type.layout
    s0 = gl.convert_layout(s0, ROWS, assert_trivial=True)
    s1 = gl.convert_layout(s1, ROWS, assert_trivial=True)
    s2 = gl.convert_layout(s2, ROWS, assert_trivial=True)
    s3 = gl.convert_layout(s3, ROWS, assert_trivial=True)
    return s0, s1, s2, s3


@gluon.jit
def look_up(name, table, M, BS: gl.constexpr):
    """Block and offset of named rows, not yet looked at so that nothing waits for them: slots are
    blocks of one row; an offset of -1 marks positions that are none."""
    if BS == 0:
        return name, gl.zeros_like(name)
    known = (name >= 0) & (name < M * BS)
    block = gl.load(table + gl.where(known, name // BS, 0), mask=known, other=-1)
    return block, gl.where(known, name % BS, -1)


@gluon.jit
def find_row(block, offset, num_blocks, BS: gl.constexpr):
    """Number of a row and whether it is there."""
    there = (block >= 0) & (block < num_blocks)
    if BS > 0:
        there = there & (offset >= 0)
        block = block * BS + offset
    return gl.where(there, block, 0).to(gl.int64), there


@gluon.jit
def first_owner(t, query_start_loc, B):
    """The request a token belongs to; B for one past them all."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    bounds = gl.arange(0, 128, LAYOUT)
    owner = 0
    for first in range(0, B, 128):
        at = query_start_loc + 1 + first + bounds
        ends = gl.load(at, mask=first + bounds < B, other=2147483647)
        owner += gl.sum((ends <= t).to(gl.int32), 0)
    return owner


@gluon.jit(do_not_specialize=CHANGING, do_not_specialize_on_alignment=[*PLANNED, "table"])
def _few_heads_kernel(
    q, words, floats, names, row_lens, query_start_loc, table, sink, out, lse,
    B, first_token, num_blocks, qk_scale, q_token, q_head, names_stride, table_stride, K, M, X,
    run_length,
    ROW: gl.constexpr, BS: gl.constexpr, H: gl.constexpr, SPLIT: gl.constexpr,
    SINK: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, 4], [16, 8])
    WORDS: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0])
    QUERY: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    QUERY_ROPE: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    ROWS: gl.constexpr = gl.SliceLayout(1, WORDS)
    SOFTMAX: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    SCORED: gl.constexpr = gl.SliceLayout(0, SOFTMAX)
    HEADS: gl.constexpr = gl.SliceLayout(1, SOFTMAX)
    OUT_HEADS: gl.constexpr = gl.SliceLayout(1, MMA)
    first_head = gl.program_id(0) * 16
    t = first_token + gl.program_id(1)
    x = gl.program_id(2)
    t64 = t.to(gl.int64)
    qk_scale = qk_scale.to(gl.float32)  # inside a compiled graph it may arrive as fp64
    q0 = gl.allocate_shared_memory(gl.bfloat16, [16, 128], SHARED)
    q1 = gl.allocate_shared_memory(gl.bfloat16, [16, 128], SHARED)
    q2 = gl.allocate_shared_memory(gl.bfloat16, [16, 128], SHARED)
    q3 = gl.allocate_shared_memory(gl.bfloat16, [16, 128], SHARED)
    q_rope = gl.allocate_shared_memory(gl.bfloat16, [16, 64], SHARED)
    v0 = gl.allocate_shared_memory(gl.bfloat16, [BLOCK_N, 128], SHARED)
    v1 = gl.allocate_shared_memory(gl.bfloat16, [BLOCK_N, 128], SHARED)
    v2 = gl.allocate_shared_memory(gl.bfloat16, [BLOCK_N, 128], SHARED)
    v3 = gl.allocate_shared_memory(gl.bfloat16, [BLOCK_N, 128], SHARED)
    weight_tile = gl.allocate_shared_memory(gl.bfloat16, [16, BLOCK_N], SHARED)
    score_tile = gl.allocate_shared_memory(
        gl.float32, [16, BLOCK_N], gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
    )
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    per_head = gl.allocate_shared_memory(gl.float32, [16], LINE)
    offs_row = gl.arange(0, BLOCK_N, ROWS)
    offs_word = gl.arange(0, 32, gl.SliceLayout(0, WORDS))[None, :]
    offs_scale = gl.arange(0, 4, gl.SliceLayout(0, WORDS))[None, :] + 128
    offs_scored = gl.arange(0, BLOCK_N, SCORED)
    if BS > 0:
        there_line = gl.allocate_shared_memory(gl.int32, [BLOCK_N], LINE)
        owner = first_owner(t, query_start_loc, B)
        table += gl.minimum(owner, B - 1).to(gl.int64) * table_stride
    # this program's run of the token's rows
    n = gl.where(t < gl.load(query_start_loc + B), gl.minimum(gl.load(row_lens + t), K), 0)
    run = ((n + BLOCK_N - 1) // BLOCK_N + X - 1) // X * BLOCK_N
    run = gl.where(run_length > 0, run_length, run)
    lo = x * run
    hi = gl.minimum(lo + run, n)
    blocks = gl.maximum((hi - lo + BLOCK_N - 1) // BLOCK_N, 0)
    mine = names + t64 * names_stride
    # names are read three blocks ahead of their use, the table two, rows one
    name = gl.load(mine + lo + offs_row, mask=lo + offs_row < hi, other=-1)
    next_name = gl.load(mine + lo + BLOCK_N + offs_row, mask=lo + BLOCK_N + offs_row < hi, other=-1)
    block, offset = look_up(name, table, M, BS)
    row, there = find_row(block, offset, num_blocks, BS)
    row = row * ROW
    at = words + row[:, None] + offs_word
    x0 = gl.load(at)
    x1 = gl.load(at + 32)
    x2 = gl.load(at + 64)
    x3 = gl.load(at + 96)
    xr = gl.load(at + 132)
    s0, s1, s2, s3 = load_scales(floats, row, offs_scale)
    block, offset = look_up(next_name, table, M, BS)
    name = gl.load(
        mine + lo + 2 * BLOCK_N + offs_row, mask=lo + 2 * BLOCK_N + offs_row < hi, other=-1
    )
    # queries; heads past the last are zeros
    heads = first_head + gl.arange(0, 16, gl.SliceLayout(1, QUERY))
    q_at = q + (t64 * q_token + heads * q_head)[:, None]
    q_at += gl.arange(0, 128, gl.SliceLayout(0, QUERY))[None, :]
    mask_q = (heads < H)[:, None]
    q0.store(gl.load(q_at, mask=mask_q, other=0.0))
    q1.store(gl.load(q_at + 128, mask=mask_q, other=0.0))
    q2.store(gl.load(q_at + 256, mask=mask_q, other=0.0))
    q3.store(gl.load(q_at + 384, mask=mask_q, other=0.0))
    heads = first_head + gl.arange(0, 16, gl.SliceLayout(1, QUERY_ROPE))
    q_at = q + (t64 * q_token + heads * q_head)[:, None] + 512
    q_at += gl.arange(0, 64, gl.SliceLayout(0, QUERY_ROPE))[None, :]
    rope_query = gl.load(q_at, mask=(heads < H)[:, None], other=0.0)
    q_rope.store((rope_query.to(gl.float32) * SMALLER).to(gl.bfloat16))
    o0 = gl.zeros([16, 128], gl.float32, MMA)
    o1 = gl.zeros([16, 128], gl.float32, MMA)
    o2 = gl.zeros([16, 128], gl.float32, MMA)
    o3 = gl.zeros([16, 128], gl.float32, MMA)
    sums = gl.zeros([16, BLOCK_N], gl.float32, SOFTMAX)  # not reduced until the end
    largest = gl.full([16], -1e30, gl.float32, HEADS)
    thread_barrier()
    for i in tl.range(0, blocks, disable_licm=True):
        start = lo + i * BLOCK_N
        if BS > 0:
            there_line.store(there.to(gl.int32))
        else:
            scored = gl.load(mine + start + offs_scored, mask=start + offs_scored < hi, other=-1)
        next_row, next_there = find_row(block, offset, num_blocks, BS)
        next_row = next_row * ROW
        at = words + next_row[:, None] + offs_word
        scores = gl.zeros([16, BLOCK_N], gl.float32, MMA)
        scores = score_group(scores, x0, s0, there, q0, v0, MMA, BLOCK_N)
        x0 = gl.load(at)
        scores = score_group(scores, x1, s1, there, q1, v1, MMA, BLOCK_N)
        x1 = gl.load(at + 32)
        scores = score_group(scores, x2, s2, there, q2, v2, MMA, BLOCK_N)
        x2 = gl.load(at + 64)
        scores = score_group(scores, x3, s3, there, q3, v3, MMA, BLOCK_N)
        x3 = gl.load(at + 96)
        first, second = split_words(gl.where(there[:, None], xr, 0))
        rope = gl.reshape(gl.join(first, second), [BLOCK_N, 64])
        rope = gl.convert_layout(
            gl.permute(rope, (1, 0)), gl.DotOperandLayout(1, MMA, 8), assert_trivial=True
        )
        scores = mma_v2(q_rope.load(gl.DotOperandLayout(0, MMA, 8)), rope, scores)
        xr = gl.load(at + 132)
        s0, s1, s2, s3 = load_scales(floats, next_row, offs_scale)
        block, offset = look_up(name, table, M, BS)
        name = gl.load(
            mine + start + 3 * BLOCK_N + offs_row,
            mask=start + 3 * BLOCK_N + offs_row < hi,
            other=-1,
        )
        there = next_there
        if BS > 0:
            counts = there_line.load(SCORED) != 0
        else:
            counts = (scored >= 0) & (scored < num_blocks)
        score_tile.store(scores)
        logits = score_tile.load(SOFTMAX) * (qk_scale * LARGER)
        logits = gl.where(counts[None, :], logits, float("-inf"))
        new_largest = gl.maximum(largest, gl.max(logits, 1))
        shrink = gl.exp2(largest - new_largest)
        largest = new_largest
        weights = gl.exp2(logits - new_largest[:, None])
        weight_tile.store(weights.to(gl.bfloat16))
        per_head.store(shrink)
        sums = sums * shrink[:, None] + weights
        shrink_out = per_head.load(OUT_HEADS)
        o0 = o0 * shrink_out[:, None]
        o1 = o1 * shrink_out[:, None]
        o2 = o2 * shrink_out[:, None]
        o3 = o3 * shrink_out[:, None]
        for k in gl.static_range(BLOCK_N // 16):
            part = weight_tile.slice(k * 16, 16, 1).load(gl.DotOperandLayout(0, MMA, 2))
            o0 = add_values(o0, part, v0, k, MMA)
            o1 = add_values(o1, part, v1, k, MMA)
            o2 = add_values(o2, part, v2, k, MMA)
            o3 = add_values(o3, part, v3, k, MMA)
    total = gl.sum(sums, 1)
    seen = total != 0  # NaN stays NaN
    natural = gl.where(seen, (largest + gl.log2(total)) * LN2, float("-inf"))
    share = gl.where(seen, LARGER / total, 0.0)
    heads = first_head + gl.arange(0, 16, HEADS)
    if SINK:
        logit = gl.load(sink + heads, mask=heads < H, other=0.0)
        share *= gl.where(seen, 1.0 / (1.0 + gl.exp2((logit - natural) * LOG2E)), 0.0)
    per_head.store(share)
    share_out = per_head.load(OUT_HEADS)
    line = t64
    if SPLIT:
        line = t64 * X + x
    gl.store(lse + line * H + heads, natural, mask=heads < H)
    heads = first_head + gl.arange(0, 16, OUT_HEADS)
    at = out + ((line * H + heads) * 512)[:, None]
    at += gl.arange(0, 128, gl.SliceLayout(0, MMA))[None, :]
    mask_h = (heads < H)[:, None]
    gl.store(at, (o0 * share_out[:, None]).to(out.dtype.element_ty), mask=mask_h)
    gl.store(at + 128, (o1 * share_out[:, None]).to(out.dtype.element_ty), mask=mask_h)
    gl.store(at + 256, (o2 * share_out[:, None]).to(out.dtype.element_ty), mask=mask_h)
    gl.store(at + 384, (o3 * share_out[:, None]).to(out.dtype.element_ty), mask=mask_h)
