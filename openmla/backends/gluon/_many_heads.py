"""Latent attention of many heads, 64 a program: all but how rows are stored; Gluon, SM90.

Three groups of four warps. One loads rows, and decodes them where they are packed, into tiles of 64
keys, two at a time, in halves of 256 columns (and one of 64 for a rope that is not a value too).
The other two each own one half of the output's columns; one scores the even tile of a pair, one the
odd, and they exchange weights. The running maximum goes from the one to the other and back, so both
sums stay in one scale. So products of one group hide the softmax of the other: the schedule is the
one FlashMLA published (MIT licence).

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

from openmla.backends.gluon._few_heads import LN2, LOG2E, thread_barrier
from openmla.backends.triton._versions import async_load

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
def wait_filled(NAME: gl.constexpr, barrier, phase, COPIED: gl.constexpr):
    """Wait for half a tile: for copies, or for warps that decode."""
    if COPIED:
        mbarrier.wait(barrier, phase)
    else:
        wait_for(NAME, 1)


@gluon.jit
def wait_scores(scores, more, APART: gl.constexpr):
    """Scores of all columns. Matrix products cut what they add up short at every step: 16 bits of
    rows and queries are added up in two chains, half as long, where there are registers for it."""
    if APART:
        scores, more = warpgroup_mma_wait(0, deps=(scores, more))
        return scores + more
    return warpgroup_mma_wait(0, deps=(more,))


@gluon.jit
def load_queries(
    queries, q, first_head, q_head, last_head, ROPE: gl.constexpr, SMALLER: gl.constexpr
):
    """Heads past the last are zeros; the rope's columns are made as small as decoded ones. Without
    a tile of its own the rope is the end of the right half."""
    q_left, q_right, q_rope = queries
    heads = first_head + gl.arange(0, 64, gl.SliceLayout(1, COPY))
    at = q + (heads * q_head)[:, None] + gl.arange(0, 256, gl.SliceLayout(0, COPY))[None, :]
    there, at = gl.broadcast((heads < last_head)[:, None], at)
    async_load(q_left, at, mask=there)
    async_load(q_right, at + 256, mask=there)
    rope = q_right.slice(192, 64, 1)
    if ROPE:
        rope = q_rope
        at = q + 512 + (heads * q_head)[:, None]
        at += gl.arange(0, 64, gl.SliceLayout(0, COPY))[None, :]
        there, at = gl.broadcast((heads < last_head)[:, None], at)
        async_load(rope, at, mask=there)
    async_copy.commit_group()
    async_copy.wait_group(0)
    thread_barrier()
    if SMALLER != 1.0:
        rope.store((rope.load(COPY).to(gl.float32) * SMALLER).to(gl.bfloat16))
    fence_async_shared()


@gluon.jit
def even_partition(
    queries, k0, k1_left, weight_tiles, bias, largest_lines, total_lines, filled, queries_there,
    sums_there, q, q_head, last_head, ends, steps, H: gl.constexpr, SINK: gl.constexpr,
    ROPE: gl.constexpr, COPIED: gl.constexpr, SMALLER: gl.constexpr, WIDTH: gl.constexpr,
):  # fmt: skip
    """Scores of even tiles, output columns 0 to 255."""
    q_left, q_right, q_rope = queries
    k0_left, k0_right, k0_rope = k0
    left_filled, right_filled = filled
    p0, p1 = weight_tiles
    largest0, largest1 = largest_lines
    total0, total1 = total_lines
    qk_scale = ends[0]
    nothing = gl.zeros([64, 64], gl.float32, SCORES)
    sums = gl.zeros([64, 256], gl.float32, SUMS)
    largest = gl.full([64], -1e30, gl.float32, HEADS)
    total = gl.zeros([64], gl.float32, HEADS)
    load_queries(queries, q, ends[5], q_head, last_head, ROPE, SMALLER)
    mbarrier.arrive(queries_there, count=1)
    for i in tl.range(0, steps, disable_licm=True):
        phase = i & 1
        wait_filled(EVEN_LEFT_FILLED, left_filled, phase, COPIED)
        scores = warpgroup_mma(
            q_left, k0_left.permute((1, 0)), nothing, use_acc=False, is_async=True
        )
        wait_filled(EVEN_RIGHT_FILLED, right_filled, phase, COPIED)
        if not (ROPE or COPIED):
            mbarrier.wait(right_filled, phase)
        more = nothing if COPIED else scores
        more = warpgroup_mma(
            q_right, k0_right.permute((1, 0)), more, use_acc=not COPIED, is_async=True
        )
        if ROPE:
            if not COPIED:
                mbarrier.wait(right_filled, phase)
            more = warpgroup_mma(q_rope, k0_rope.permute((1, 0)), more, is_async=True)
        counted = bias.index(phase).slice(0, 64).load(KEYS)
        scores = wait_scores(scores, more, COPIED)
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
    put_results(sums, total, largest, q_left, ends, 0, H, SINK, SMALLER, WIDTH)


@gluon.jit
def odd_partition(
    queries, k0_right, k1, weight_tiles, bias, largest_lines, total_lines, filled, queries_there,
    sums_there, ends, steps, H: gl.constexpr, SINK: gl.constexpr, ROPE: gl.constexpr,
    COPIED: gl.constexpr, SMALLER: gl.constexpr, WIDTH: gl.constexpr,
):  # fmt: skip
    """Scores of odd tiles, output columns 256 to 511."""
    q_left, q_right, q_rope = queries
    k1_left, k1_right, k1_rope = k1
    left_filled, right_filled = filled
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
        wait_filled(ODD_RIGHT_FILLED, right_filled, phase, COPIED)
        if not (ROPE or COPIED):
            mbarrier.wait(right_filled, phase)
        scores = warpgroup_mma(
            q_right, k1_right.permute((1, 0)), nothing, use_acc=False, is_async=True
        )
        if ROPE:
            if not COPIED:
                mbarrier.wait(right_filled, phase)
            scores = warpgroup_mma(q_rope, k1_rope.permute((1, 0)), scores, is_async=True)
        wait_filled(ODD_LEFT_FILLED, left_filled, phase, COPIED)
        more = nothing if COPIED else scores
        more = warpgroup_mma(
            q_left, k1_left.permute((1, 0)), more, use_acc=not COPIED, is_async=True
        )
        counted = bias.index(phase).slice(64, 64).load(KEYS)
        scores = wait_scores(scores, more, COPIED)
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
    put_results(sums, total, largest, q_right, ends, 256, H, SINK, SMALLER, WIDTH)


@gluon.jit
def put_results(
    sums, total, largest, tile, ends, first: gl.constexpr, H: gl.constexpr, SINK: gl.constexpr,
    SMALLER: gl.constexpr, WIDTH: gl.constexpr,
):  # fmt: skip
    """Half of the output's columns, of which the first WIDTH were kept SMALLER, and from one of the
    halves lse; queries are not needed now."""
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
    if first + 256 <= WIDTH:
        share *= 1.0 / SMALLER
    else:
        columns = first + gl.arange(0, 256, gl.SliceLayout(0, SUMS))
        sums = sums * gl.where(columns < WIDTH, 1.0 / SMALLER, 1.0)[None, :]
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
def beside(left, right, COLUMNS: gl.constexpr):
    """Two tiles as one of twice the columns; nothing moves."""
    return gl.reshape(gl.permute(gl.join(left, right), (0, 2, 1)), [64, COLUMNS])


@gluon.jit
def halves():
    """A tile of 64 rows: columns 0 to 255 and 256 to 511, so that one can be filled again alone."""
    left = gl.allocate_shared_memory(gl.bfloat16, [64, 256], TILE)
    return left, gl.allocate_shared_memory(gl.bfloat16, [64, 256], TILE)
