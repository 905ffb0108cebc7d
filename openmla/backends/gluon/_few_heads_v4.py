"""Latent attention of few heads over V4's rows of 448 + 64 (fp8_dsv4), for decode; Gluon, SM80 on.

Computes  what _latent.py does, for a window and after it listed positions, a prefix or nothing,
          16 heads a program, with values of all 512 columns
Grid      (cdiv(H, 16), T, X): one program owns one token, 16 heads, one run of its rows; a grid
          holds 65535 tokens, more take several launches
Reads     q [T, H, 512], pages as 32-bit words: BS rows of 144, then 2 words of scales for each;
          4 * page of them from one page to the next, so that 16-byte loads are known to be aligned
Writes    out [T, H, 512] and lse [T, H]; with X > 1 runs part [T, X, H, 512] and part_lse

Built as _few_heads.py is. The two segments are one list of rows, the window's first; each row is
looked up on its own, so that loads run ahead across the border and a block may hold both.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from openmla.backends.gluon._few_heads import (
    add_values,
    decode_words,
    first_owner,
    split_words,
    thread_barrier,
)
from openmla.backends.triton._build import PLANNED

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
ROW = gl.constexpr(144)  # words
GROUPS = gl.constexpr(7)  # of 64 columns that share a scale
# What differs from step to step: no other value of these is another kernel.
CHANGING = (
    "B", "first_token", "page_1", "N_1", "M_1", "span_1", "table_stride_1",
    "page_2", "N_2", "M_2", "span_2", "table_stride_2", "names_stride", "K", "X",
)  # fmt: skip
# Shifted e4m3 bits are 2**120 too small as bf16. Decoded columns are kept 2**48 smaller than they
# are, so that 2**72 times a scale fits bf16, and the product too, for scales of 2**-76 to 2**55;
# queries of the rope columns are as much smaller, logits and outputs of decoded columns make up.
MISSING = gl.constexpr(72)
SMALLER = gl.constexpr(2.0**-48)
LARGER = gl.constexpr(2.0**48)


@gluon.constexpr_function
def fragments(g):
    """How queries lie in shared memory: 16 bytes are what one matrix instruction takes of a lane,
    two columns of two heads 8 apart and the next two, so that registers need no sorting. A lane has
    16 columns side by side, 8 of the rope's."""
    columns, heads = [[0, 2**i] for i in range(6)], [[2**i, 0] for i in range(4)]
    own = 3 if g == GROUPS else 4
    lanes, rest = columns[own : own + 2] + heads[:3], columns[2:own] + columns[own + 2 :]
    return gl.SharedLinearLayout([columns[0], heads[3], columns[1], *lanes, *rest])


@gluon.jit
def decode_group(words, scales, g: gl.constexpr, BLOCK_N: gl.constexpr):
    """[BLOCK_N, 64] bf16 of [BLOCK_N, 16] words, times 2**-48. Scales are eight exponents a row:
    zeros, as rows have that are not there, make zeros of any bytes; 255, or a scale too large to
    hold, NaN, as writers mark it."""
    exponent = ((scales >> (8 * g)) & 0xFF).to(gl.int32) + MISSING
    both = gl.where(exponent > 254, 0x7FC07FC0, exponent * 0x00800080)
    both, words = gl.broadcast(both[:, None], words)
    a, b, c, d = decode_words(words, both)
    return gl.reshape(gl.join(gl.join(a, c), gl.join(b, d)), [BLOCK_N, 64])


@gluon.jit
def score(scores, tile, q, values, WIDTH: gl.constexpr, MMA: gl.constexpr):
    """64 columns of the keys: kept as values in shared memory, multiplied with the queries."""
    values.store(tile)
    keys = gl.convert_layout(
        gl.permute(tile, (1, 0)), gl.DotOperandLayout(1, MMA, WIDTH), assert_trivial=True
    )
    return mma_v2(q.load(gl.DotOperandLayout(0, MMA, WIDTH)), keys, scores)


@gluon.jit
def issue_loads(number):
    """Loads stay before this; the assembler would gather them at the next barrier, where little is
    left to do while they are under way. It assembles to nothing; any number will do."""
    gl.inline_asm_elementwise(
        "bar.warp.sync 0xffffffff; mov.b32 $0, $1;",
        "=r,r",
        [number],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def load_names(names, j, n_1, hi, LISTED: gl.constexpr):
    """What the second segment lists as a token's j-th rows; -1 where it lists none."""
    if LISTED:
        return gl.load(names + (j - n_1), mask=(j >= n_1) & (j < hi), other=-1)
    return j - n_1


@gluon.jit
def look_up(
    j, name, n_1, hi, newest, table_1, M_1, table_2, M_2, BS_1: gl.constexpr, BS_2: gl.constexpr
):  # fmt: skip
    """Block and offset of a token's j-th rows, not yet looked at so that nothing waits for them;
    block -1 where there is none. The window goes backwards from the newest row of its ring."""
    near = newest - j
    near = gl.where(near < 0, near + M_1 * BS_1, near)
    known = (j < n_1) | ((name >= 0) & (name < M_2 * BS_2))
    at = gl.where(j < n_1, table_1 + near // BS_1, table_2 + name // BS_2)
    block = gl.load(at, mask=known & (j < hi), other=-1)
    return block, gl.where(j < n_1, near % BS_1, name % BS_2)


@gluon.jit
def find_row(
    j, block, offset, n_1, words_1, page_1, N_1, words_2, page_2, N_2, BS_1: gl.constexpr,
    BS_2: gl.constexpr,
):  # fmt: skip
    """Where a row and its scales begin, and whether it is there: a cache's first row where not."""
    there = (block >= 0) & (block < gl.where(j < n_1, N_1, N_2))
    block = gl.where(there, block, 0).to(gl.int64)
    offset = gl.where(there, offset, 0)
    page = gl.where(j < n_1, words_1, words_2)
    page += block * gl.where(j < n_1, page_1, page_2) * 4
    scales = page + gl.where(j < n_1, BS_1 * ROW, BS_2 * ROW) + offset * 2
    return page + offset * ROW, scales.to(gl.pointer_type(gl.int64), bitcast=True), there


@gluon.jit(do_not_specialize=CHANGING, do_not_specialize_on_alignment=PLANNED)
def _few_heads_v4_kernel(
    q, words_1, table_1, words_2, table_2, names, row_lens, positions, query_start_loc, sink, out,
    lse,
    B, first_token, qk_scale, q_token, q_head, names_stride, K, X, run_length,
    page_1, N_1, M_1, span_1, table_stride_1, page_2, N_2, M_2, span_2, table_stride_2,
    LISTED: gl.constexpr, BS_1: gl.constexpr, BS_2: gl.constexpr, H: gl.constexpr,
    SPLIT: gl.constexpr, SINK: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, 4], [16, 8])
    WORDS: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0])
    QUERY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
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
    weight_tile = gl.allocate_shared_memory(gl.bfloat16, [16, BLOCK_N], SHARED)
    score_tile = gl.allocate_shared_memory(
        gl.float32, [16, BLOCK_N], gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
    )
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    per_head = gl.allocate_shared_memory(gl.float32, [16], LINE)
    there_line = gl.allocate_shared_memory(gl.int32, [BLOCK_N], LINE)
    offs_row = gl.arange(0, BLOCK_N, ROWS)
    offs_word = gl.arange(0, 16, gl.SliceLayout(0, WORDS))[None, :]
    offs_rope = gl.arange(0, 32, gl.SliceLayout(0, WORDS))[None, :] + 16 * GROUPS
    # this program's run of the token's rows
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
    run = ((n + BLOCK_N - 1) // BLOCK_N + X - 1) // X * BLOCK_N
    run = gl.where(run_length > 0, run_length, run)
    lo = x * run
    hi = gl.minimum(lo + run, n)
    blocks = gl.maximum((hi - lo + BLOCK_N - 1) // BLOCK_N, 0)
    # names are read three blocks ahead of their use, tables two, rows one
    j = lo + offs_row
    name = load_names(names, j, n_1, hi, LISTED)
    next_name = load_names(names, j + BLOCK_N, n_1, hi, LISTED)
    block, offset = look_up(j, name, n_1, hi, newest, table_1, M_1, table_2, M_2, BS_1, BS_2)
    row, scales_at, there = find_row(
        j, block, offset, n_1, words_1, page_1, N_1, words_2, page_2, N_2, BS_1, BS_2
    )
    groups = ()
    for g in gl.static_range(GROUPS):
        groups += (gl.load(row[:, None] + offs_word + 16 * g),)
    rope = gl.load(row[:, None] + offs_rope)
    scales = gl.load(scales_at, mask=there, other=0)
    j += BLOCK_N
    block, offset = look_up(j, next_name, n_1, hi, newest, table_1, M_1, table_2, M_2, BS_1, BS_2)
    name = load_names(names, j + BLOCK_N, n_1, hi, LISTED)
    # queries; heads past the last are zeros
    heads = first_head + gl.arange(0, 16, gl.SliceLayout(1, QUERY))
    q_at = q + (t64 * q_token + heads * q_head)[:, None]
    q_at += gl.arange(0, 64, gl.SliceLayout(0, QUERY))[None, :]
    queries = ()
    values = ()
    sums_out = ()
    for g in gl.static_range(GROUPS + 1):
        query = gl.load(q_at + 64 * g, mask=(heads < H)[:, None], other=0.0)
        if g == GROUPS:
            query = (query.to(gl.float32) * SMALLER).to(gl.bfloat16)
        queries += (gl.allocate_shared_memory(gl.bfloat16, [16, 64], fragments(g), query),)
        values += (gl.allocate_shared_memory(gl.bfloat16, [BLOCK_N, 64], SHARED),)
        sums_out += (gl.zeros([16, 64], gl.float32, MMA),)
    sums = gl.zeros([16, BLOCK_N], gl.float32, SOFTMAX)  # not reduced until the end
    largest = gl.full([16], -1e30, gl.float32, HEADS)
    thread_barrier()
    for _ in tl.range(0, blocks, disable_licm=True):
        # j is of the next block
        there_line.store(there.to(gl.int32))
        row, scales_at, next_there = find_row(
            j, block, offset, n_1, words_1, page_1, N_1, words_2, page_2, N_2, BS_1, BS_2
        )
        scores = gl.zeros([16, BLOCK_N], gl.float32, MMA)
        next_groups = ()
        for g in gl.static_range(GROUPS):
            tile = decode_group(groups[g], scales, g, BLOCK_N)
            scores = score(scores, tile, queries[g], values[g], 16, MMA)
            next_groups += (gl.load(row[:, None] + offs_word + 16 * g),)
            issue_loads(hi)
        groups = next_groups
        first, second = split_words(gl.where(there[:, None], rope, 0))
        tile = gl.reshape(gl.join(first, second), [BLOCK_N, 64])
        scores = score(scores, tile, queries[GROUPS], values[GROUPS], 8, MMA)
        rope = gl.load(row[:, None] + offs_rope)
        scales = gl.load(scales_at, mask=next_there, other=0)
        there = next_there
        j += BLOCK_N
        block, offset = look_up(j, name, n_1, hi, newest, table_1, M_1, table_2, M_2, BS_1, BS_2)
        name = load_names(names, j + BLOCK_N, n_1, hi, LISTED)
        counts = there_line.load(SCORED) != 0
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
        shrink_out = per_head.load(OUT_HEADS)[:, None]
        shrunk = ()
        for g in gl.static_range(GROUPS + 1):
            shrunk += (sums_out[g] * shrink_out,)
        sums_out = shrunk
        for k in gl.static_range(BLOCK_N // 16):
            part = weight_tile.slice(k * 16, 16, 1).load(gl.DotOperandLayout(0, MMA, 2))
            added = ()
            for g in gl.static_range(GROUPS + 1):
                added += (add_values(sums_out[g], part, values[g], k, MMA),)
            sums_out = added
    total = gl.sum(sums, 1)
    seen = total != 0  # NaN stays NaN
    natural = gl.where(seen, (largest + gl.log2(total)) * LN2, float("-inf"))
    share = gl.where(seen, 1.0 / total, 0.0)
    heads = first_head + gl.arange(0, 16, HEADS)
    if SINK:
        logit = gl.load(sink + heads, mask=heads < H, other=0.0)
        share *= gl.where(seen, 1.0 / (1.0 + gl.exp2((logit - natural) * LOG2E)), 0.0)
    per_head.store(share)
    share_out = per_head.load(OUT_HEADS)[:, None]
    line = t64
    if SPLIT:
        line = t64 * X + x
    gl.store(lse + line * H + heads, natural, mask=heads < H)
    heads = first_head + gl.arange(0, 16, OUT_HEADS)
    at = out + ((line * H + heads) * 512)[:, None]
    at += gl.arange(0, 64, gl.SliceLayout(0, MMA))[None, :]
    for g in gl.static_range(GROUPS + 1):
        result = sums_out[g] * share_out
        if g < GROUPS:
            result *= LARGER
        gl.store(at + 64 * g, result.to(out.dtype.element_ty), mask=(heads < H)[:, None])
