"""Latent attention of many heads, 64 a program: all but how rows are stored; Gluon, SM90.

Three warp groups. One loads rows, and decodes them where they are packed, into an even and an odd
tile of 64 keys, in halves of 256 columns (and one of 64 for a rope that is not a value too). The
other two each own half of the output's columns; one scores the even tile, one the odd, and they
exchange probs. The running max goes from the one to the other and back, so that both accumulate at
one scale. WGMMA of one group hides the softmax of the other: FlashMLA's published schedule (MIT
licence).

Groups wait for one another at named barriers. mbarriers are for copies in flight, so that threads
that issue them need not wait, and for what happens once.
"""

from typing import Any, NamedTuple

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

from openmla.backends.gluon import _barriers as named
from openmla.backends.gluon._primitives import (
    INITIAL_MAX,
    LINE,
    C,
    normalise,
    run_bounds,
    scale_at,
    thread_barrier,
)
from openmla.backends.triton._versions import async_load, reinterpret

BLOCK_H = gl.constexpr(64)
BLOCK_N = gl.constexpr(64)
STEP = gl.constexpr(128)  # rows of an even and an odd tile
HALF = gl.constexpr(256)  # columns
ROPE_COLUMNS = gl.constexpr(64)
GROUP_THREADS = gl.constexpr(128)
TILE = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
WORD_TILE = gl.constexpr(gl.NVMMASharedLayout(128, 32, 2))
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
ACC = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
PROBS = gl.constexpr(gl.DotOperandLayout(0, ACC, 2))
HEADS = gl.constexpr(gl.SliceLayout(1, SCORES))
KEYS = gl.constexpr(gl.SliceLayout(0, SCORES))
ACC_HEADS = gl.constexpr(gl.SliceLayout(1, ACC))
ROW_PER_THREAD = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
COPY = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
COPY_ROWS = gl.constexpr(gl.SliceLayout(1, COPY))
COPY_BYTES = gl.constexpr(gl.BlockedLayout([1, 16], [8, 4], [4, 1], [1, 0]))


class Tile(NamedTuple):
    """64 queries or keys: columns 0 to 255 and 256 to 511, so that one half can be refilled while
    the other is in use, and the rope."""

    left: Any
    right: Any
    rope: Any


class Exchange(NamedTuple):
    """Shared memory that the two softmax groups write for one another, and the loading group for
    both: key_bias, of two steps, is -inf where a row is not valid."""

    even_probs: Any
    odd_probs: Any
    key_bias: Any
    even_max: Any
    odd_max: Any
    even_sum: Any
    odd_sum: Any


class Epilogue(NamedTuple):
    """Where the epilogue writes, and the sink."""

    out: Any
    lse: Any
    sink: Any
    line: Any
    first_head: Any


@gluon.jit
def allocate_halves(dtype: gl.constexpr = gl.bfloat16):
    left = gl.allocate_shared_memory(dtype, [BLOCK_N, HALF], TILE)
    return left, gl.allocate_shared_memory(dtype, [BLOCK_N, HALF], TILE)


@gluon.jit
def allocate_tiles(dtype: gl.constexpr = gl.bfloat16):
    """Both halves of queries, of the even and of the odd tile of keys."""
    queries = allocate_halves(dtype)
    even = allocate_halves(dtype)
    return queries, even, allocate_halves(dtype)


@gluon.jit
def allocate_head_lines():
    """One number per head: running max and running sum of even and odd tiles."""
    lines = ()
    for _ in gl.static_range(4):
        lines += (gl.allocate_shared_memory(gl.float32, [BLOCK_H], LINE),)
    return lines


@gluon.jit
def allocate_mbarriers(COPIES: gl.constexpr):
    """queries_ready, sums_ready, then COPIES that all threads of the loading group arrive at. Each
    is an allocation of its own: of one array the compiler assumes every use to touch all."""
    barriers = ()
    for _ in gl.static_range(2 + COPIES):
        barriers += (gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout()),)
    mbarrier.init(barriers[0], count=1)
    mbarrier.init(barriers[1], count=2)
    for i in gl.static_range(COPIES):
        mbarrier.init(barriers[2 + i], count=GROUP_THREADS)
    fence_async_shared()
    return barriers


@gluon.jit
def run_steps(n, x, X, run_length):
    """Bounds of a run and its steps; without rows, one step of none."""
    lo, hi = run_bounds(n, x, X, run_length, STEP)
    return lo, hi, gl.maximum((hi - lo + STEP - 1) // STEP, 1)


@gluon.jit
def wait_filled(BARRIER: gl.constexpr, copied, phase, COPIED: gl.constexpr):
    """Wait for half a tile: for copies, or for the group that decodes."""
    if COPIED:
        mbarrier.wait(copied, phase)
    else:
        named.wait(BARRIER, 1)


@gluon.jit
def wait_scores(scores, more, TWO_CHAINS: gl.constexpr):
    """WGMMA truncates accumulators; two chains halve the error. Where rows are decoded there are no
    registers for the second."""
    if TWO_CHAINS:
        scores, more = warpgroup_mma_wait(0, deps=(scores, more))
        return scores + more
    return warpgroup_mma_wait(0, deps=(more,))


@gluon.jit
def load_e4m3(q, heads, q_head, last_head, first: gl.constexpr, COLUMNS: gl.constexpr):
    at = q + first + (heads * q_head)[:, None]
    at += gl.arange(0, COLUMNS, gl.SliceLayout(0, COPY_BYTES))[None, :]
    return gl.load(at, mask=(heads < last_head)[:, None], other=0.0)


@gluon.jit
def widen_queries(queries, q, first_head, q_head, last_head, DECODE_SCALE: gl.constexpr):
    """e4m3 queries as bf16, which holds them exactly."""
    heads = first_head + gl.arange(0, BLOCK_H, gl.SliceLayout(1, COPY_BYTES))
    left = load_e4m3(q, heads, q_head, last_head, 0, HALF)
    right = load_e4m3(q, heads, q_head, last_head, HALF, HALF)
    rope = load_e4m3(q, heads, q_head, last_head, C, ROPE_COLUMNS)
    queries.left.store(left.to(gl.bfloat16))
    queries.right.store(right.to(gl.bfloat16))
    queries.rope.store((rope.to(gl.float32) * DECODE_SCALE).to(gl.bfloat16))
    fence_async_shared()


@gluon.jit
def load_scales(qk_scale, q_scale, first_head, last_head, Q_SCALES: gl.constexpr):
    """What scores of e4m3 queries are multiplied with. Heads past the last have none: where there
    are no rows, that is all of them, and NaN would not be theirs."""
    heads = first_head + gl.arange(0, BLOCK_H, HEADS)
    at = q_scale + scale_at(heads, Q_SCALES)
    return qk_scale * gl.load(at, mask=heads < last_head, other=0.0)


@gluon.jit
def load_queries(
    queries, q, first_head, q_head, last_head, ROPE_TILE: gl.constexpr, DECODE_SCALE: gl.constexpr
):
    """Heads past the last are zeros; rope columns are scaled as decoded ones are. Without a tile of
    its own the rope is the end of the right half."""
    heads = first_head + gl.arange(0, BLOCK_H, COPY_ROWS)
    at = q + (heads * q_head)[:, None] + gl.arange(0, HALF, gl.SliceLayout(0, COPY))[None, :]
    valid, at = gl.broadcast((heads < last_head)[:, None], at)
    async_load(queries.left, at, mask=valid)
    async_load(queries.right, at + HALF, mask=valid)
    rope = queries.right.slice(HALF - ROPE_COLUMNS, ROPE_COLUMNS, 1)
    if ROPE_TILE:
        rope = queries.rope
        at = q + C + (heads * q_head)[:, None]
        at += gl.arange(0, ROPE_COLUMNS, gl.SliceLayout(0, COPY))[None, :]
        valid, at = gl.broadcast((heads < last_head)[:, None], at)
        async_load(rope, at, mask=valid)
    async_copy.commit_group()
    async_copy.wait_group(0)
    thread_barrier()
    if DECODE_SCALE != 1.0:
        rope.store((rope.load(COPY).to(gl.float32) * DECODE_SCALE).to(gl.bfloat16))
    fence_async_shared()


@gluon.jit
def initial_state():
    """Zeros for scores to start from, accumulator, running max, running sum."""
    zeros = gl.zeros([BLOCK_H, BLOCK_N], gl.float32, SCORES)
    acc = gl.zeros([BLOCK_H, HALF], gl.float32, ACC)
    running_max = gl.full([BLOCK_H], INITIAL_MAX, gl.float32, HEADS)
    return zeros, acc, running_max, gl.zeros([BLOCK_H], gl.float32, HEADS)


@gluon.jit
def even_scores(
    queries, even, zeros, left_filled, right_filled, phase, ROPE_TILE: gl.constexpr,
    COPIED: gl.constexpr, TWO_CHAINS: gl.constexpr,
):  # fmt: skip
    """Issue the products of queries and an even tile; wait_scores() ends them."""
    wait_filled(named.EVEN_LEFT_FILLED, left_filled, phase, COPIED)
    scores = warpgroup_mma(
        queries.left, even.left.permute((1, 0)), zeros, use_acc=False, is_async=True
    )
    wait_filled(named.EVEN_RIGHT_FILLED, right_filled, phase, COPIED)
    if not (ROPE_TILE or COPIED):
        mbarrier.wait(right_filled, phase)
    more = zeros if TWO_CHAINS else scores
    more = warpgroup_mma(
        queries.right, even.right.permute((1, 0)), more, use_acc=not TWO_CHAINS, is_async=True
    )
    if ROPE_TILE:
        if not COPIED:
            mbarrier.wait(right_filled, phase)
        more = warpgroup_mma(queries.rope, even.rope.permute((1, 0)), more, is_async=True)
    return scores, more


@gluon.jit
def odd_scores(
    queries, odd, zeros, left_filled, right_filled, phase, ROPE_TILE: gl.constexpr,
    COPIED: gl.constexpr, TWO_CHAINS: gl.constexpr,
):  # fmt: skip
    """The same of an odd tile, whose right half is filled first."""
    wait_filled(named.ODD_RIGHT_FILLED, right_filled, phase, COPIED)
    if not (ROPE_TILE or COPIED):
        mbarrier.wait(right_filled, phase)
    scores = warpgroup_mma(
        queries.right, odd.right.permute((1, 0)), zeros, use_acc=False, is_async=True
    )
    if ROPE_TILE:
        if not COPIED:
            mbarrier.wait(right_filled, phase)
        scores = warpgroup_mma(queries.rope, odd.rope.permute((1, 0)), scores, is_async=True)
    wait_filled(named.ODD_LEFT_FILLED, left_filled, phase, COPIED)
    more = zeros if TWO_CHAINS else scores
    more = warpgroup_mma(
        queries.left, odd.left.permute((1, 0)), more, use_acc=not TWO_CHAINS, is_async=True
    )
    return scores, more


@gluon.jit
def even_update(logits, acc, running_max, running_sum, even_left, odd_left, exchange, refill):
    """Softmax of an even tile, and the left halves of both tiles times their probs. `refill` is 0
    where nobody waits for the tiles to be read."""
    new_max = gl.maximum(running_max, gl.max(logits, 1))
    exchange.even_max.store(new_max)
    named.arrive(named.EVEN_MAX, 1)
    rescale = gl.exp2(running_max - new_max)
    probs = gl.exp2(logits - new_max[:, None])
    acc = acc * gl.convert_layout(rescale, ACC_HEADS)[:, None]
    operand = gl.convert_layout(probs.to(exchange.even_probs.dtype), PROBS)
    acc = warpgroup_mma(operand, even_left, acc, is_async=True)
    running_sum = running_sum * rescale + gl.sum(probs, 1)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    named.arrive(named.EVEN_LEFT_READ, refill)
    named.wait(named.ODD_MAX, 1)
    running_max = exchange.odd_max.load(HEADS)
    rescale = gl.exp2(new_max - running_max)
    exchange.even_probs.store((probs * rescale[:, None]).to(exchange.even_probs.dtype))
    fence_async_shared()
    named.arrive(named.EVEN_PROBS, 1)
    running_sum = running_sum * rescale
    acc = acc * gl.convert_layout(rescale, ACC_HEADS)[:, None]
    named.wait(named.ODD_PROBS, 1)
    acc = warpgroup_mma(exchange.odd_probs, odd_left, acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    named.arrive(named.ODD_LEFT_READ, refill)
    return acc, running_max, running_sum


@gluon.jit
def odd_update(logits, acc, running_max, running_sum, even_right, odd_right, exchange, refill):
    """The same of an odd tile, and the right halves."""
    tile_max = gl.max(logits, 1)
    named.wait(named.EVEN_MAX, 1)
    new_max = gl.maximum(exchange.even_max.load(HEADS), tile_max)
    exchange.odd_max.store(new_max)
    named.arrive(named.ODD_MAX, 1)
    rescale = gl.exp2(running_max - new_max)
    running_max = new_max
    probs = gl.exp2(logits - new_max[:, None])
    acc = acc * gl.convert_layout(rescale, ACC_HEADS)[:, None]
    rounded = probs.to(exchange.odd_probs.dtype)
    operand = gl.convert_layout(rounded, PROBS)
    acc = warpgroup_mma(operand, odd_right, acc, is_async=True)
    exchange.odd_probs.store(rounded)
    fence_async_shared()
    named.arrive(named.ODD_PROBS, 1)
    running_sum = running_sum * rescale + gl.sum(probs, 1)
    named.wait(named.EVEN_PROBS, 1)
    acc = warpgroup_mma(exchange.even_probs, even_right, acc, is_async=True)
    acc = warpgroup_mma_wait(1, deps=(acc,))
    named.arrive(named.ODD_RIGHT_READ, refill)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    named.arrive(named.EVEN_RIGHT_READ, refill)
    return acc, running_max, running_sum


@gluon.jit
def even_partition(
    queries, even, odd_left, exchange, filled, queries_ready, sums_ready, q, q_head, last_head,
    qk_scale, epilogue, steps, H: gl.constexpr, SINK: gl.constexpr, ROPE_TILE: gl.constexpr,
    COPIED: gl.constexpr, DECODE_SCALE: gl.constexpr, DECODED: gl.constexpr, q_scale=None,
    Q_SCALES: gl.constexpr = 0,
):  # fmt: skip
    """Scores of even tiles, output columns 0 to 255."""
    left_filled, right_filled = filled
    zeros, acc, running_max, running_sum = initial_state()
    if Q_SCALES:  # two registers more would spill: the line that will hold sums has the scales
        scales = load_scales(qk_scale, q_scale, epilogue.first_head, last_head, Q_SCALES)
        widen_queries(queries, q, epilogue.first_head, q_head, last_head, DECODE_SCALE)
        exchange.even_sum.store(scales)
        thread_barrier()
    else:
        load_queries(queries, q, epilogue.first_head, q_head, last_head, ROPE_TILE, DECODE_SCALE)
    mbarrier.arrive(queries_ready, count=1)
    for i in tl.range(0, steps, disable_licm=True):
        phase = i & 1
        scores, more = even_scores(
            queries, even, zeros, left_filled, right_filled, phase, ROPE_TILE, COPIED, COPIED
        )
        key_bias = exchange.key_bias.index(phase).slice(0, BLOCK_N).load(KEYS)
        scale = qk_scale
        if Q_SCALES:
            scale = exchange.even_sum.load(HEADS)[:, None]
        scores = wait_scores(scores, more, COPIED)
        logits = scores * scale + key_bias[None, :]
        acc, running_max, running_sum = even_update(
            logits, acc, running_max, running_sum, even.left, odd_left, exchange, steps - 1 - i
        )
    exchange.even_sum.store(running_sum)
    mbarrier.arrive(sums_ready, count=1)
    mbarrier.wait(sums_ready, 0)
    running_sum += exchange.odd_sum.load(HEADS)
    store_output(
        acc, running_sum, running_max, queries.left, epilogue, 0, H, SINK, DECODE_SCALE, DECODED
    )


@gluon.jit
def odd_partition(
    queries, even_right, odd, exchange, filled, queries_ready, sums_ready, last_head, qk_scale,
    epilogue, steps, H: gl.constexpr, SINK: gl.constexpr, ROPE_TILE: gl.constexpr,
    COPIED: gl.constexpr, DECODE_SCALE: gl.constexpr, DECODED: gl.constexpr, q_scale=None,
    Q_SCALES: gl.constexpr = 0,
):  # fmt: skip
    """Scores of odd tiles, output columns 256 to 511."""
    left_filled, right_filled = filled
    zeros, acc, running_max, running_sum = initial_state()
    if Q_SCALES:
        scales = load_scales(qk_scale, q_scale, epilogue.first_head, last_head, Q_SCALES)
        exchange.odd_sum.store(scales)
        thread_barrier()
    mbarrier.wait(queries_ready, 0)
    for i in tl.range(0, steps, disable_licm=True):
        phase = i & 1
        scores, more = odd_scores(
            queries, odd, zeros, left_filled, right_filled, phase, ROPE_TILE, COPIED, COPIED
        )
        key_bias = exchange.key_bias.index(phase).slice(BLOCK_N, BLOCK_N).load(KEYS)
        scale = qk_scale
        if Q_SCALES:
            scale = exchange.odd_sum.load(HEADS)[:, None]
        scores = wait_scores(scores, more, COPIED)
        logits = scores * scale + key_bias[None, :]
        acc, running_max, running_sum = odd_update(
            logits, acc, running_max, running_sum, even_right, odd.right, exchange, steps - 1 - i
        )
    exchange.odd_sum.store(running_sum)
    mbarrier.arrive(sums_ready, count=1)
    mbarrier.wait(sums_ready, 0)
    running_sum += exchange.even_sum.load(HEADS)
    store_output(
        acc, running_sum, running_max, queries.right, epilogue, HALF, H, SINK, DECODE_SCALE, DECODED
    )


@gluon.jit
def store_output(
    acc, running_sum, running_max, tile, epilogue, first: gl.constexpr, H: gl.constexpr,
    SINK: gl.constexpr, DECODE_SCALE: gl.constexpr, DECODED: gl.constexpr,
):  # fmt: skip
    """Half of the output's columns, and from one of the halves lse. The first DECODED columns carry
    DECODE_SCALE. `tile` held queries, which are done with."""
    heads, lse, normaliser = normalise(
        running_max, running_sum, epilogue.sink, epilogue.first_head, 1.0, H, SINK
    )
    if first == 0:
        gl.store(epilogue.lse + epilogue.line * H + heads, lse, mask=heads < H)
    if first + HALF <= DECODED:
        normaliser *= 1.0 / DECODE_SCALE
    else:
        columns = first + gl.arange(0, HALF, gl.SliceLayout(0, ACC))
        acc = acc * gl.where(columns < DECODED, 1.0 / DECODE_SCALE, 1.0)[None, :]
    acc = acc * gl.convert_layout(normaliser, ACC_HEADS)[:, None]
    if epilogue.out.dtype.element_ty == gl.float32:
        store_half(epilogue, acc, first, H, ACC)
    else:
        tile.store(acc.to(gl.bfloat16))  # through shared memory: coalesced stores
        store_half(epilogue, tile.load(COPY), first, H, COPY)


@gluon.jit
def store_half(epilogue, half, first: gl.constexpr, H: gl.constexpr, LAYOUT: gl.constexpr):
    heads = epilogue.first_head + gl.arange(0, BLOCK_H, gl.SliceLayout(1, LAYOUT))
    columns = first + gl.arange(0, HALF, gl.SliceLayout(0, LAYOUT))
    at = ((epilogue.line * H + heads) * C)[:, None] + columns[None, :]
    gl.store(epilogue.out + at, half, mask=(heads < H)[:, None])


@gluon.jit
def concat_columns(left, right, COLUMNS: gl.constexpr):
    """Two tiles as one of twice the columns; no data moves."""
    return gl.reshape(gl.permute(gl.join(left, right), (0, 2, 1)), [BLOCK_N, COLUMNS])


@gluon.jit
def as_words(half):
    """Half a tile as the decoder's pairs of bf16."""
    return reinterpret(half, gl.int32, [BLOCK_N, HALF // 2], WORD_TILE)


@gluon.jit
def of_tile(line, odd: gl.constexpr):
    """What a line that holds one entry per row of a step has for the even or the odd tile."""
    return line.slice(BLOCK_N * odd, BLOCK_N)
