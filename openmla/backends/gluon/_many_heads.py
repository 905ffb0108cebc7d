"""Latent attention of many heads, 64 a program: all but how rows are stored; Gluon, SM90.

Three warp groups. The producer loads rows, and decodes them where they are packed, into an even and
an odd tile of 64 keys, in halves of 256 columns (and one of 64 for a rope that is not a value too).
Two consumers each own half of the output's columns; one scores the even tile, one the odd, and they
exchange probs. The running max goes from the one to the other and back, so that both accumulate at
one scale. WGMMA of one consumer hides the softmax of the other: FlashMLA's published schedule (MIT
license).

One step, each column in program order. "+" arrives at a barrier, "?" waits for who arrives:

    producer              even consumer             odd consumer
    --------------------  ------------------------  -------------------------------
    ?EVEN_LEFT_READ
    fill even left
    +EVEN_LEFT_FILLED     ?EVEN_LEFT_FILLED
    ?ODD_RIGHT_READ       issue q @ even left
    fill odd right
    +ODD_RIGHT_FILLED                               ?ODD_RIGHT_FILLED
    ?EVEN_RIGHT_READ                                issue q @ odd right
    fill even right
    +EVEN_RIGHT_FILLED    ?EVEN_RIGHT_FILLED
    ?ODD_LEFT_READ        q @ even right
    fill odd left         running max
    +ODD_LEFT_FILLED      +EVEN_MAX                 ?ODD_LEFT_FILLED
                          probs @ even left         q @ odd left
                          +EVEN_LEFT_READ           ?EVEN_MAX
                                                    running max of both
                          ?ODD_MAX                  +ODD_MAX
                          rescale and store probs   issue probs @ odd right, store probs
                          +EVEN_PROBS               +ODD_PROBS
                          ?ODD_PROBS                ?EVEN_PROBS
                          odd probs @ odd left      issue even probs @ even right
                          +ODD_LEFT_READ            +ODD_RIGHT_READ once the first is done
                                                    +EVEN_RIGHT_READ once both are

The producer waits for no READ in the first step, and for all four after the last. These are named
barriers, but where halves are only copied, mbarriers are in place of FILLED: threads that issue
copies need not wait. Where halves are decoded, copies of the rope have an mbarrier besides, and the
consumer waits for it once the right half is filled. Three mbarriers are for what happens once a
piece: queries_ready goes from the even consumer to the odd, stored back, and sums_ready both ways.
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
    normalize,
    scale_at,
    sink_factor,
    thread_barrier,
)
from openmla.backends.triton import _pieces as pieces
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
    """Shared memory that the two consumers write for one another, and the producer for
    both: key_bias, of two steps, is -inf where a row is not valid. In the end the lines of the
    running maxima hold sums. What scores of e4m3 queries are multiplied with is in `scales`."""

    even_probs: Any
    odd_probs: Any
    key_bias: Any
    even_max: Any
    odd_max: Any
    scales: Any


class Outputs(NamedTuple):
    """Results and the sink; partial results, `slot_rows` to a slot, and what the merge has to know
    about a token: its first and last part."""

    out: Any
    lse: Any
    sink: Any
    part: Any
    part_lse: Any
    spans: Any
    slot_rows: Any


class Signals(NamedTuple):
    """mbarriers of a piece: its queries are loaded, both sums are, the odd consumer has stored."""

    queries_ready: Any
    sums_ready: Any
    stored: Any


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
def allocate_head_lines(NUM: gl.constexpr):
    """Of one number per head."""
    lines = ()
    for _ in gl.static_range(NUM):
        lines += (gl.allocate_shared_memory(gl.float32, [BLOCK_H], LINE),)
    return lines


@gluon.jit
def allocate_mbarriers(COPIES: gl.constexpr):
    """Signals, and COPIES that all threads of the producer arrive at. Each is an allocation of
    its own: of one array the compiler assumes every use to touch all."""
    barriers = ()
    for _ in gl.static_range(3 + COPIES):
        barriers += (gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout()),)
    mbarrier.init(barriers[0], count=1)
    mbarrier.init(barriers[1], count=2)
    mbarrier.init(barriers[2], count=1)
    copied = ()
    for i in gl.static_range(COPIES):
        mbarrier.init(barriers[3 + i], count=GROUP_THREADS)
        copied += (barriers[3 + i],)
    fence_async_shared()
    return Signals(barriers[0], barriers[1], barriers[2]), copied


@gluon.jit
def wait_filled(BARRIER: gl.constexpr, copied, phase, COPIED: gl.constexpr):
    """Wait for half a tile: for copies, or for the producer, which decodes."""
    if COPIED:
        mbarrier.wait(copied, phase)
    else:
        named.wait(BARRIER, 1)


@gluon.jit
def wait_read(step):
    """What was announced last is waited for, too."""
    named.wait(named.EVEN_LEFT_READ, step)
    named.wait(named.ODD_RIGHT_READ, step)
    named.wait(named.EVEN_RIGHT_READ, step)
    named.wait(named.ODD_LEFT_READ, step)


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
    queries, even, odd_left, exchange, filled, signals, q, q_scale, q_token, q_head, tokens, cut,
    run_length, qk_scale, outputs, H: gl.constexpr, SINK: gl.constexpr, ROPE_TILE: gl.constexpr,
    COPIED: gl.constexpr, DECODE_SCALE: gl.constexpr, DECODED: gl.constexpr,
    Q_SCALES: gl.constexpr, KIND: gl.constexpr, FIXED: gl.constexpr,
):  # fmt: skip
    """The even consumer: scores of even tiles, output columns 0 to 255."""
    left_filled, right_filled = filled
    first_head = gl.program_id(0) * BLOCK_H
    step = 0
    for r in tl.range(0, pieces.num_pieces(cut), disable_licm=True):
        piece = pieces.find_piece(tokens, cut, r, run_length, KIND, FIXED)
        t64 = piece.token.to(gl.int64)
        own = q + t64 * q_token
        # NaN queries would make scores of no rows NaN
        last_head = gl.where(piece.hi > piece.lo, H, 0)
        zeros, acc, running_max, running_sum = initial_state()
        if Q_SCALES:  # two registers more would spill: a line in shared memory has the scales
            scale_line = q_scale
            if Q_SCALES == 2:
                scale_line += t64 * H
            scales = load_scales(qk_scale, scale_line, first_head, last_head, Q_SCALES)
            widen_queries(queries, own, first_head, q_head, last_head, DECODE_SCALE)
            exchange.scales.store(scales)
            thread_barrier()
        else:
            load_queries(queries, own, first_head, q_head, last_head, ROPE_TILE, DECODE_SCALE)
        mbarrier.arrive(signals.queries_ready, count=1)
        for _ in tl.range(0, piece.steps, disable_licm=True):
            phase = step & 1
            scores, more = even_scores(
                queries, even, zeros, left_filled, right_filled, phase, ROPE_TILE, COPIED, COPIED
            )
            key_bias = exchange.key_bias.index(phase).slice(0, BLOCK_N).load(KEYS)
            scale = qk_scale
            if Q_SCALES:
                scale = exchange.scales.load(HEADS)[:, None]
            scores = wait_scores(scores, more, COPIED)
            logits = scores * scale + key_bias[None, :]
            acc, running_max, running_sum = even_update(
                logits, acc, running_max, running_sum, even.left, odd_left, exchange, 1
            )
            step += 1
        exchange.even_max.store(running_sum)
        mbarrier.arrive(signals.sums_ready, count=1)
        mbarrier.wait(signals.sums_ready, r & 1)
        running_sum += exchange.odd_max.load(HEADS)
        store_output(
            acc, running_sum, running_max, queries.left, outputs, piece, first_head, 0, H, SINK,
            DECODE_SCALE, DECODED,
        )  # fmt: skip
        if first_head == 0:
            if piece.first:
                gl.store(outputs.spans + 3 * t64, cut.index)
                gl.store(outputs.spans + 3 * t64 + 2, 0)
            if piece.last:
                gl.store(outputs.spans + 3 * t64 + 1, cut.index)
        mbarrier.wait(signals.stored, r & 1)  # through the queries' other half


@gluon.jit
def odd_partition(
    queries, even_right, odd, exchange, filled, signals, tokens, cut, run_length, qk_scale, outputs,
    H: gl.constexpr, SINK: gl.constexpr, ROPE_TILE: gl.constexpr, COPIED: gl.constexpr,
    DECODE_SCALE: gl.constexpr, DECODED: gl.constexpr, Q_SCALES: gl.constexpr, KIND: gl.constexpr,
    FIXED: gl.constexpr,
):  # fmt: skip
    """The odd consumer: scores of odd tiles, output columns 256 to 511."""
    left_filled, right_filled = filled
    first_head = gl.program_id(0) * BLOCK_H
    step = 0
    for r in tl.range(0, pieces.num_pieces(cut), disable_licm=True):
        piece = pieces.find_piece(tokens, cut, r, run_length, KIND, FIXED)
        zeros, acc, running_max, running_sum = initial_state()
        mbarrier.wait(signals.queries_ready, r & 1)
        for _ in tl.range(0, piece.steps, disable_licm=True):
            phase = step & 1
            scores, more = odd_scores(
                queries, odd, zeros, left_filled, right_filled, phase, ROPE_TILE, COPIED, COPIED
            )
            key_bias = exchange.key_bias.index(phase).slice(BLOCK_N, BLOCK_N).load(KEYS)
            scale = qk_scale
            if Q_SCALES:
                scale = exchange.scales.load(HEADS)[:, None]
            scores = wait_scores(scores, more, COPIED)
            logits = scores * scale + key_bias[None, :]
            acc, running_max, running_sum = odd_update(
                logits, acc, running_max, running_sum, even_right, odd.right, exchange, 1
            )
            step += 1
        exchange.odd_max.store(running_sum)
        mbarrier.arrive(signals.sums_ready, count=1)
        mbarrier.wait(signals.sums_ready, r & 1)
        running_sum += exchange.even_max.load(HEADS)
        store_output(
            acc, running_sum, running_max, queries.right, outputs, piece, first_head, HALF, H, SINK,
            DECODE_SCALE, DECODED,
        )  # fmt: skip
        mbarrier.arrive(signals.stored, count=1)


@gluon.jit
def store_output(
    acc, running_sum, running_max, tile, outputs, piece, first_head, first: gl.constexpr,
    H: gl.constexpr, SINK: gl.constexpr, DECODE_SCALE: gl.constexpr, DECODED: gl.constexpr,
):  # fmt: skip
    """Half of the output's columns, and from one of the halves lse: of the token, or of a slot for
    the merge. The first DECODED columns carry DECODE_SCALE. `tile` held queries, which are done
    with."""
    heads, lse, normalizer = normalize(
        running_max, running_sum, outputs.sink, first_head, 1.0, H, False
    )
    line = piece.token.to(gl.int64) * H
    at_lse = outputs.lse + line
    if piece.slot >= 0:
        at_lse = outputs.part_lse + piece.slot.to(gl.int64) * outputs.slot_rows
    elif SINK:
        normalizer *= sink_factor(outputs.sink, heads, lse, running_sum != 0, H)
    if first == 0:
        gl.store(at_lse + heads, lse, mask=heads < H)
    if first + HALF <= DECODED:
        normalizer *= 1.0 / DECODE_SCALE
    else:
        columns = first + gl.arange(0, HALF, gl.SliceLayout(0, ACC))
        acc = acc * gl.where(columns < DECODED, 1.0 / DECODE_SCALE, 1.0)[None, :]
    acc = acc * gl.convert_layout(normalizer, ACC_HEADS)[:, None]
    if piece.slot >= 0:
        line = piece.slot.to(gl.int64) * outputs.slot_rows
        store_half(outputs.part, acc, line, first_head, first, H, ACC)
    else:
        tile.store(acc.to(gl.bfloat16))  # through shared memory: coalesced stores
        store_half(outputs.out, tile.load(COPY), line, first_head, first, H, COPY)


@gluon.jit
def store_half(
    out, half, line, first_head, first: gl.constexpr, H: gl.constexpr, LAYOUT: gl.constexpr
):
    heads = first_head + gl.arange(0, BLOCK_H, gl.SliceLayout(1, LAYOUT))
    columns = first + gl.arange(0, HALF, gl.SliceLayout(0, LAYOUT))
    at = out + ((line + heads) * C)[:, None] + columns[None, :]
    gl.store(at, half, mask=(heads < H)[:, None])


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
