"""Latent attention of many heads over V4's rows of 448 + 64 (fp8_dsv4); Gluon, SM90.

Computes  what _few_heads_v4.py does, 64 heads a program
Grid      (cdiv(H, 64), T, X): one program owns one token, 64 heads, one run of its rows; a grid
          holds 65535 tokens, more take several launches
Reads     as _few_heads_v4.py
Writes    out [T, H, 512] and lse [T, H]; with X > 1 runs part [T, X, H, 512] and part_lse

Three groups of four warps. One loads rows and decodes them into tiles of 64 keys, two at a time, in
halves of 256 columns. The other two each own one half of the output's columns; one scores the even
tile of a pair, one the odd, and they exchange weights. The running maximum goes from the one to the
other and back, so both sums stay in one scale. So products of one group hide the softmax of the
other: the schedule is the one FlashMLA published (MIT licence).

What one group waits for of another are the hardware's named barriers, one instruction for a thread:
`tell` and `wait_for`, between 256 threads each. Copies under way, which no thread waits for, and
what happens only once have mbarriers.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from openmla.backends.triton._build import PLANNED
from openmla.backends.triton._few_heads import first_owner, thread_barrier
from openmla.backends.triton._few_heads_v4 import (
    CHANGING,
    GROUPS,
    LARGER,
    LN2,
    LOG2E,
    MISSING,
    SMALLER,
    load_names,
    look_up,
)

TILE = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
WORD_TILE = gl.constexpr(gl.NVMMASharedLayout(128, 32, 2))
LINE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
WEIGHTS = gl.constexpr(gl.DotOperandLayout(0, SUMS, 2))
HEADS = gl.constexpr(gl.SliceLayout(1, SCORES))
KEYS = gl.constexpr(gl.SliceLayout(0, SCORES))
SUM_HEADS = gl.constexpr(gl.SliceLayout(1, SUMS))
WORDS = gl.constexpr(gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0]))
ROWS = gl.constexpr(gl.SliceLayout(1, WORDS))
FOUND = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
COPY = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
ABSENT = gl.constexpr(-(2**62))  # where no scales are: the other cache may be at lower addresses
# Named barriers; Triton's own are the first four.
EVEN_LEFT_FILLED = gl.constexpr("4")
EVEN_RIGHT_FILLED = gl.constexpr("5")
ODD_LEFT_FILLED = gl.constexpr("6")
ODD_RIGHT_FILLED = gl.constexpr("7")
EVEN_LARGEST = gl.constexpr("8")
ODD_LARGEST = gl.constexpr("9")
EVEN_WEIGHTS = gl.constexpr("10")
ODD_WEIGHTS = gl.constexpr("11")
EVEN_LEFT_READ = gl.constexpr("12")
EVEN_RIGHT_READ = gl.constexpr("13")
ODD_LEFT_READ = gl.constexpr("14")
ODD_RIGHT_READ = gl.constexpr("15")


@gluon.jit
def tell(NAME: gl.constexpr, number):
    """Arrive at a named barrier, without waiting, unless the number is 0."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $1, 0; @p bar.arrive " + NAME + ", 256; mov.b32 $0, $1; }",
        "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def wait_for(NAME: gl.constexpr, number):
    """Wait at a named barrier unless the number is 0."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $1, 0; @p bar.sync " + NAME + ", 256; mov.b32 $0, $1; }",
        "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def load_queries(q_left, q_right, q, first_head, q_head, last_head):
    """Heads past the last are zeros; the rope's columns are made as small as decoded ones."""
    heads = first_head + gl.arange(0, 64, gl.SliceLayout(1, COPY))
    at = q + (heads * q_head)[:, None] + gl.arange(0, 256, gl.SliceLayout(0, COPY))[None, :]
    there, at = gl.broadcast((heads < last_head)[:, None], at)
    async_copy.async_copy_global_to_shared(q_left, at, mask=there)
    async_copy.async_copy_global_to_shared(q_right, at + 256, mask=there)
    async_copy.commit_group()
    async_copy.wait_group(0)
    thread_barrier()
    rope = q_right.slice(192, 64, 1)
    rope.store((rope.load(COPY).to(gl.float32) * SMALLER).to(gl.bfloat16))
    fence_async_shared()


@gluon.jit
def even_partition(
    queries, k0, k1_left, weight_tiles, bias, largest_lines, total_lines, copied, queries_there,
    sums_there, q, q_head, last_head, ends, steps, H: gl.constexpr, SINK: gl.constexpr,
):  # fmt: skip
    """Scores of even tiles, output columns 0 to 255."""
    q_left, q_right = queries
    k0_left, k0_right = k0
    p0, p1 = weight_tiles
    largest0, largest1 = largest_lines
    total0, total1 = total_lines
    qk_scale = ends[0]
    nothing = gl.zeros([64, 64], gl.float32, SCORES)
    sums = gl.zeros([64, 256], gl.float32, SUMS)
    largest = gl.full([64], -1e30, gl.float32, HEADS)
    total = gl.zeros([64], gl.float32, HEADS)
    load_queries(q_left, q_right, q, ends[5], q_head, last_head)
    mbarrier.arrive(queries_there, count=1)
    for i in tl.range(0, steps, disable_licm=True):
        phase = i & 1
        wait_for(EVEN_LEFT_FILLED, 1)
        scores = warpgroup_mma(
            q_left, k0_left.permute((1, 0)), nothing, use_acc=False, is_async=True
        )
        wait_for(EVEN_RIGHT_FILLED, 1)
        mbarrier.wait(copied, phase)
        scores = warpgroup_mma(q_right, k0_right.permute((1, 0)), scores, is_async=True)
        counted = bias.index(phase).slice(0, 64).load(KEYS)
        scores = warpgroup_mma_wait(0, deps=(scores,))
        logits = scores * qk_scale + counted[None, :]
        new_largest = gl.maximum(largest, gl.max(logits, 1))
        largest0.store(new_largest)
        tell(EVEN_LARGEST, 1)
        shrink = gl.exp2(largest - new_largest)
        weights = gl.exp2(logits - new_largest[:, None])
        sums = sums * gl.convert_layout(shrink, SUM_HEADS)[:, None]
        operand = gl.convert_layout(weights.to(gl.bfloat16), WEIGHTS)
        sums = warpgroup_mma(operand, k0_left, sums, is_async=True)
        total = total * shrink + gl.sum(weights, 1)
        sums = warpgroup_mma_wait(0, deps=(sums,))
        tell(EVEN_LEFT_READ, steps - 1 - i)
        wait_for(ODD_LARGEST, 1)
        largest = largest1.load(HEADS)
        shrink = gl.exp2(new_largest - largest)
        p0.store((weights * shrink[:, None]).to(gl.bfloat16))
        fence_async_shared()
        tell(EVEN_WEIGHTS, 1)
        total = total * shrink
        sums = sums * gl.convert_layout(shrink, SUM_HEADS)[:, None]
        wait_for(ODD_WEIGHTS, 1)
        sums = warpgroup_mma(p1, k1_left, sums, is_async=True)
        sums = warpgroup_mma_wait(0, deps=(sums,))
        tell(ODD_LEFT_READ, steps - 1 - i)
    total0.store(total)
    mbarrier.arrive(sums_there, count=1)
    mbarrier.wait(sums_there, 0)
    total += total1.load(HEADS)
    put_results(sums, total, largest, q_left, ends, 0, H, SINK)


@gluon.jit
def odd_partition(
    queries, k0_right, k1, weight_tiles, bias, largest_lines, total_lines, copied, queries_there,
    sums_there, ends, steps, H: gl.constexpr, SINK: gl.constexpr,
):  # fmt: skip
    """Scores of odd tiles, output columns 256 to 511."""
    q_left, q_right = queries
    k1_left, k1_right = k1
    p0, p1 = weight_tiles
    largest0, largest1 = largest_lines
    total0, total1 = total_lines
    qk_scale = ends[0]
    nothing = gl.zeros([64, 64], gl.float32, SCORES)
    sums = gl.zeros([64, 256], gl.float32, SUMS)
    largest = gl.full([64], -1e30, gl.float32, HEADS)
    total = gl.zeros([64], gl.float32, HEADS)
    mbarrier.wait(queries_there, 0)
    for i in tl.range(0, steps, disable_licm=True):
        phase = i & 1
        wait_for(ODD_RIGHT_FILLED, 1)
        mbarrier.wait(copied, phase)
        scores = warpgroup_mma(
            q_right, k1_right.permute((1, 0)), nothing, use_acc=False, is_async=True
        )
        wait_for(ODD_LEFT_FILLED, 1)
        scores = warpgroup_mma(q_left, k1_left.permute((1, 0)), scores, is_async=True)
        counted = bias.index(phase).slice(64, 64).load(KEYS)
        scores = warpgroup_mma_wait(0, deps=(scores,))
        logits = scores * qk_scale + counted[None, :]
        own_largest = gl.max(logits, 1)
        wait_for(EVEN_LARGEST, 1)
        new_largest = gl.maximum(largest0.load(HEADS), own_largest)
        largest1.store(new_largest)
        tell(ODD_LARGEST, 1)
        shrink = gl.exp2(largest - new_largest)
        largest = new_largest
        weights = gl.exp2(logits - new_largest[:, None])
        sums = sums * gl.convert_layout(shrink, SUM_HEADS)[:, None]
        rounded = weights.to(gl.bfloat16)
        operand = gl.convert_layout(rounded, WEIGHTS)
        sums = warpgroup_mma(operand, k1_right, sums, is_async=True)
        p1.store(rounded)
        fence_async_shared()
        tell(ODD_WEIGHTS, 1)
        total = total * shrink + gl.sum(weights, 1)
        wait_for(EVEN_WEIGHTS, 1)
        sums = warpgroup_mma(p0, k0_right, sums, is_async=True)
        sums = warpgroup_mma_wait(1, deps=(sums,))
        tell(ODD_RIGHT_READ, steps - 1 - i)
        sums = warpgroup_mma_wait(0, deps=(sums,))
        tell(EVEN_RIGHT_READ, steps - 1 - i)
    total1.store(total)
    mbarrier.arrive(sums_there, count=1)
    mbarrier.wait(sums_there, 0)
    total += total0.load(HEADS)
    put_results(sums, total, largest, q_right, ends, 256, H, SINK)


@gluon.jit
def put_results(
    sums, total, largest, tile, ends, first: gl.constexpr, H: gl.constexpr, SINK: gl.constexpr
):
    """Half of the output's columns, and from one of the halves lse; queries are not needed now."""
    _, out, lse, sink, line, first_head = ends
    seen = total != 0  # NaN stays NaN
    natural = gl.where(seen, (largest + gl.log2(total)) * LN2, float("-inf"))
    share = gl.where(seen, 1.0 / total, 0.0)
    heads = first_head + gl.arange(0, 64, HEADS)
    if SINK:
        logit = gl.load(sink + heads, mask=heads < H, other=0.0)
        share *= gl.where(seen, 1.0 / (1.0 + gl.exp2((logit - natural) * LOG2E)), 0.0)
    if first == 0:
        gl.store(lse + line * H + heads, natural, mask=heads < H)
    columns = first + gl.arange(0, 256, gl.SliceLayout(0, SUMS))
    sums = sums * gl.where(columns < 64 * GROUPS, LARGER, 1.0)[None, :]
    sums = sums * gl.convert_layout(share, SUM_HEADS)[:, None]
    if out.dtype.element_ty == gl.float32:
        put_half(out, sums, line, first_head, first, H, SUMS)
    else:
        tile.store(sums.to(gl.bfloat16))  # read again by threads that lie along the columns
        put_half(out, tile.load(COPY), line, first_head, first, H, COPY)


@gluon.jit
def put_half(out, half, line, first_head, first: gl.constexpr, H: gl.constexpr,
             LAYOUT: gl.constexpr):  # fmt: skip
    heads = first_head + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    columns = first + gl.arange(0, 256, gl.SliceLayout(0, LAYOUT))
    at = ((line * H + heads) * 512)[:, None] + columns[None, :]
    gl.store(out + at, half, mask=(heads < H)[:, None])


@gluon.jit
def decode_word(words, scale):
    """Four e4m3 of each word, times a scale that two bf16 hold: two words of two bf16. A byte goes
    to the top of its half, below copies of its sign, so that one shift has sign, exponent and
    mantissa where bf16 has them."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 t;
        prmt.b32 t, $2, 0, 0x1804;
        shr.s32 t, t, 4;
        and.b32 t, t, 0x87f087f0;
        mul.rn.bf16x2 $0, t, $3;
        prmt.b32 t, $2, 0, 0x3a24;
        shr.s32 t, t, 4;
        and.b32 t, t, 0x87f087f0;
        mul.rn.bf16x2 $1, t, $3;
        }""",
        "=r,=r,r,r", [words, scale], dtype=(gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def decode_group(words, scales, g: gl.constexpr):
    """64 columns, two bf16 a word; see _few_heads_v4.py."""
    exponent = ((scales >> (8 * g)) & 0xFF).to(gl.int32) + MISSING
    both = gl.where(exponent > 254, 0x7FC07FC0, exponent * 0x00800080)
    both, words = gl.broadcast(both[:, None], words)
    low, high = decode_word(words, both)
    return gl.reshape(gl.join(low, high), [64, 32])


@gluon.jit
def beside(left, right, COLUMNS: gl.constexpr):
    """Two tiles as one of twice the columns; nothing moves."""
    return gl.reshape(gl.permute(gl.join(left, right), (0, 2, 1)), [64, COLUMNS])


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
    async_copy.async_copy_global_to_shared(tile.slice(192, 64, 1), at, mask=there)
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
    left0 = k0_left._reinterpret(gl.int32, [64, 128], WORD_TILE)
    right0 = k0_right._reinterpret(gl.int32, [64, 128], WORD_TILE)
    left1 = k1_left._reinterpret(gl.int32, [64, 128], WORD_TILE)
    right1 = k1_right._reinterpret(gl.int32, [64, 128], WORD_TILE)
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


@gluon.jit
def halves():
    """A tile of 64 rows: columns 0 to 255 and 256 to 511, so that one can be filled again alone."""
    left = gl.allocate_shared_memory(gl.bfloat16, [64, 256], TILE)
    return left, gl.allocate_shared_memory(gl.bfloat16, [64, 256], TILE)


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
    p = (p0, p1)
    largest = (lines[0], lines[1])
    totals = (lines[2], lines[3])
    ends = (qk_scale * LARGER, out, lse, sink, line, first_head)
    rows = (
        names, n_1, newest, table_1, M_1, table_2, M_2, words_1, page_1, N_1, page_2, N_2, apart,
    )  # fmt: skip
    # constants stay constants only inside this very call
    gl.warp_specialize(
        [
            (even_partition, (
                queries, k0, k1[0], p, bias, largest, totals, rope0_copied, queries_there,
                sums_there, q, q_head, last_head, ends, steps, H, SINK,
            )),
            (odd_partition, (
                queries, k0[1], k1, p, bias, largest, totals, rope1_copied, queries_there,
                sums_there, ends, steps, H, SINK,
            )),
            (load_partition, (
                k0, k1, bias, row_line, scale_line, (rope0_copied, rope1_copied), rows, lo, hi,
                steps, LISTED, BS_1, BS_2,
            )),
        ],
        [4, 4],
        [ODD_REGISTERS, LOAD_REGISTERS],
    )  # fmt: skip
