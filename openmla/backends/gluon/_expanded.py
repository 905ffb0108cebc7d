"""Attention over packed, expanded keys and values, 128 query rows of a head at a time; SM90.

Computes  what ops/mha_ragged.py says
Grid      persistent programs that take tiles of 128 queries from a counter: heads one after the
          other, so that tiles of a head share its keys in L2, and each head's longest tiles first
Reads     q [T, H, E], k [S, H, E] or its OWN first columns and the rest, v [S, H, V], through TMA
          descriptors in boxes of 128 bytes; query_start_loc, key_start_loc; where q and k are e4m3
          q_scale [T, H], k_scale [B, H], v_scale [B, H]
Writes    out [T, H, V], lse [T, H]

Three warp groups. The producer finds tiles and issues copies, STAGES of each tile of keys and
values in flight. Two consumers own 64 query rows each and issue the product of the next scores
before that of these values: softmax of one runs while the other's are computed. Taking turns at it
gained nothing (H200, 1 x 8192, 128 heads: 1 % slower in 16 bits and in eight).

Scores of e4m3 are eight-bit products, both operands as they lie. Values and probabilities have 16
bits then, too: docs/fp8-prefill.md says why.

A request's last values may be followed by another's, or by anything: the producer overwrites
what is behind them with zeros, since 0 * NaN is NaN.
"""

from typing import Any, NamedTuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from openmla.backends.gluon import _barriers as named
from openmla.backends.gluon import _parts as parts
from openmla.backends.gluon._primitives import INITIAL_MAX, LINE, LN2, LOG2E
from openmla.backends.triton._versions import bulk_load

BLOCK_M = gl.constexpr(128)  # query rows of a program
ROWS = gl.constexpr(64)  # of a warp group
BOX = gl.constexpr(128)  # bytes of a row in a bulk copy: one swizzle span
GROUPS = gl.constexpr(2)  # consumers
VALUES = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
COPY = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
ONE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))  # a number, in every thread
INFO = gl.constexpr(8)  # numbers that describe a tile, and room to a power of two
THREADS = gl.constexpr("384")  # of all groups


class Inputs(NamedTuple):
    """Descriptors, and how far apart heads are in their columns. k_rest has the columns of keys
    that k has not: from rest_first on."""

    q: Any
    q_rest: Any
    k: Any
    k_rest: Any
    v: Any
    q_head: Any
    k_head: Any
    rest_head: Any
    rest_first: Any
    v_head: Any


class Scales(NamedTuple):
    """Of e4m3 queries and keys, and what is left to values."""

    q: Any
    k: Any
    v: Any
    q_token: Any
    q_head: Any


class Tiles(NamedTuple):
    """Shared memory: queries of both consumers, and the stages of keys and values."""

    q: Any
    q_rest: Any
    k: Any
    k_rest: Any
    v: Any


class Signals(NamedTuple):
    """mbarriers: copies in flight; queries_read also frees what describes a tile."""

    queries: Any
    queries_read: Any
    k_filled: Any
    v_filled: Any
    last_values: Any


@gluon.jit
def tile_owner(tile, query_start_loc, B):
    """The request a tile of queries belongs to, B for rows past all of them; as triton/_mha.py
    numbers tiles."""
    owner = 0
    for first in range(0, B, parts.LANES):
        b = first + gl.arange(0, parts.LANES, parts.LAYOUT)
        ends = gl.load(query_start_loc + 1 + b, mask=b < B, other=0)
        owner += gl.sum(((ends // BLOCK_M + b + 1 <= tile) & (b < B)).to(gl.int32), 0)
    return owner


@gluon.jit
def describe(info, first, end, h, visible, S, scaled):
    """Write what the consumers have to know about a tile; `first` is -1 past the last.
    `scaled`: where k_scale and v_scale have its request and head."""
    i = gl.arange(0, INFO, ONE)
    numbers = gl.where(i == 0, first, gl.where(i == 1, end, h))
    others = gl.where(i == 3, visible, gl.where(i == 4, S, scaled))
    info.store(gl.where(i < 3, numbers, others))


@gluon.jit
def described(info, i: gl.constexpr):
    return gl.max(info.slice(i, 1, 0).load(ONE), 0)


@gluon.jit
def num_steps(visible, S, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr):
    """Tiles of keys that any row sees; the first row sees `visible` keys."""
    if CAUSAL:
        S = gl.maximum(gl.minimum(visible + BLOCK_M - 1, S), 0)
    return (S + BLOCK_N - 1) // BLOCK_N


@gluon.jit
def load_columns(
    tile, source, row, column, FIRST: gl.constexpr, LAST: gl.constexpr, WIDTH: gl.constexpr, filled
):
    """Columns FIRST to LAST - 1 of a tile, from `column` on, WIDTH at a time."""
    for c in gl.static_range(FIRST, LAST, WIDTH):
        bulk_load(source, [row, column + c - FIRST], filled, tile.slice(c, WIDTH, 1))


@gluon.jit
def zero_rows(tile, num, COLUMNS: gl.constexpr, BLOCK_N: gl.constexpr):
    """Rows from num on."""
    row = gl.arange(0, BLOCK_N, gl.SliceLayout(1, COPY))
    WIDTH: gl.constexpr = BOX // 2
    for c in gl.static_range(COLUMNS // WIDTH):
        columns = tile.slice(WIDTH * c, WIDTH, 1)
        valid, values = gl.broadcast((row < num)[:, None], columns.load(COPY))
        columns.store(gl.where(valid, values, 0.0))


@gluon.jit
def load_partition(
    inputs, tiles, signals, info, query_start_loc, key_start_loc, counter, T, B, H: gl.constexpr,
    A: gl.constexpr, REST: gl.constexpr, OWN: gl.constexpr, V: gl.constexpr, BLOCK_N: gl.constexpr,
    CAUSAL: gl.constexpr, EIGHT_BITS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The producer: find tiles and copy what they need."""
    SIZE: gl.constexpr = 1 if EIGHT_BITS else 2
    WIDTH: gl.constexpr = min(BOX // SIZE, A)  # columns of a box of queries or keys
    VALUES_READ: gl.constexpr = named.KEYS_READ + STAGES
    num_tiles = T // BLOCK_M + B + 1
    count = 0  # tiles so far
    step = 0
    lasts = 0
    item = gl.program_id(0)
    while item < num_tiles * H:
        h = item // num_tiles
        tile = num_tiles - 1 - item % num_tiles
        item = gl.atomic_add(counter, 1)
        b = tile_owner(tile, query_start_loc, B)
        begin = gl.load(query_start_loc + b)
        end = gl.where(b < B, gl.load(query_start_loc + gl.minimum(b + 1, B)), T)
        first = begin + (tile - begin // BLOCK_M - b) * BLOCK_M
        if first < end:
            first_key = gl.load(key_start_loc + b)
            S = gl.load(key_start_loc + gl.minimum(b + 1, B)) - first_key
            visible = S
            if CAUSAL:  # the request's last query sees its last key
                visible = S - end + first + 1
            steps = num_steps(visible, S, BLOCK_N, CAUSAL)
            if count > 0:
                mbarrier.wait(signals.queries_read, (count - 1) & 1)
            # rows past all requests see no key, whatever the scale
            describe(info, first, end, h, visible, S, gl.minimum(b, B - 1) * H + h)
            mbarrier.arrive(signals.queries, count=1)
            mbarrier.expect(signals.queries, SIZE * BLOCK_M * (A + REST))
            for g in gl.static_range(GROUPS):
                row = first + ROWS * g
                column = h * inputs.q_head
                load_columns(tiles.q.index(g), inputs.q, row, column, 0, A, WIDTH, signals.queries)
                if REST > 0:
                    at = [row, column + A]
                    bulk_load(inputs.q_rest, at, signals.queries, tiles.q_rest.index(g))
            for j in range(0, steps):
                stage = step % STAGES
                row = first_key + j * BLOCK_N
                if step >= STAGES:
                    named.wait_at(named.KEYS_READ + stage, THREADS)
                filled = signals.k_filled.index(stage)
                mbarrier.expect(filled, SIZE * BLOCK_N * (A + REST))
                keys = tiles.k.index(stage)
                load_columns(keys, inputs.k, row, h * inputs.k_head, 0, OWN, WIDTH, filled)
                column = inputs.rest_first + h * inputs.rest_head
                load_columns(keys, inputs.k_rest, row, column, OWN, A, WIDTH, filled)
                if REST > 0:
                    at = [row, column + A - OWN]
                    bulk_load(inputs.k_rest, at, filled, tiles.k_rest.index(stage))
                if step >= STAGES:
                    named.wait_at(VALUES_READ + stage, THREADS)
                values = tiles.v.index(stage)
                filled = signals.v_filled.index(stage)
                left = S - j * BLOCK_N
                if left >= BLOCK_N:
                    mbarrier.expect(filled, 2 * BLOCK_N * V)
                    load_columns(values, inputs.v, row, h * inputs.v_head, 0, V, BOX // 2, filled)
                else:
                    mbarrier.expect(signals.last_values, 2 * BLOCK_N * V)
                    last = signals.last_values
                    load_columns(values, inputs.v, row, h * inputs.v_head, 0, V, BOX // 2, last)
                    mbarrier.wait(signals.last_values, lasts & 1)
                    lasts += 1
                    zero_rows(values, left, V, BLOCK_N)
                    fence_async_shared()
                    mbarrier.arrive(filled, count=1)
                step += 1
            count += 1
    if count > 0:
        mbarrier.wait(signals.queries_read, (count - 1) & 1)
    describe(info, -1, 0, 0, 0, 0, 0)
    mbarrier.arrive(signals.queries, count=2)
    # what was announced last is waited for, too
    for i in gl.static_range(STAGES):
        if step > i:
            named.wait_at(named.KEYS_READ + (step - 1 - i) % STAGES, THREADS)
            named.wait_at(VALUES_READ + (step - 1 - i) % STAGES, THREADS)


@gluon.jit
def issue_scores(q, q_rest, k, k_rest, zeros, REST: gl.constexpr):
    scores = warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
    if REST > 0:
        scores = warpgroup_mma(q_rest, k_rest.permute((1, 0)), scores, is_async=True)
    return scores


@gluon.jit
def mask_keys(scores, first_key, visible, S, BLOCK_N: gl.constexpr, SCORES: gl.constexpr):
    """-inf for keys a row does not see; most tiles have none. `visible`: keys the group's first row
    sees."""
    if first_key + BLOCK_N > gl.minimum(visible, S):
        key = first_key + gl.arange(0, BLOCK_N, gl.SliceLayout(0, SCORES))
        row = gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))
        seen = key[None, :] < gl.minimum(visible + row, S)[:, None]
        scores = gl.where(seen, scores, float("-inf"))
    return scores


@gluon.jit
def softmax(
    scores, running_max, running_sum, row_scale, scale, dtype: gl.constexpr, PROBS: gl.constexpr
):
    """Probabilities at the new running max, and what earlier ones are rescaled with. `row_scale` is
    of each row and `scale` of all its scores: the same number, or a column."""
    new_max = gl.maximum(running_max, gl.max(scores, 1) * row_scale)
    rescale = gl.exp2(running_max - new_max)
    probs = gl.exp2(scores * scale - new_max[:, None])
    running_sum = running_sum * rescale + gl.sum(probs, 1)
    return gl.convert_layout(probs.to(dtype), PROBS), rescale, new_max, running_sum


@gluon.jit
def attend_partition(
    tiles, signals, info, scales, out, lse, qk_scale, GROUP: gl.constexpr, H: gl.constexpr,
    REST: gl.constexpr, V: gl.constexpr, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr,
    EIGHT_BITS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    K: gl.constexpr = 32 if EIGHT_BITS else 16  # columns of a product of WGMMA
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, K])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V, 16])
    PROBS: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    ACC_ROWS: gl.constexpr = gl.SliceLayout(1, ACC)
    LINES: gl.constexpr = gl.SliceLayout(1, SCORES)
    VALUES_READ: gl.constexpr = named.KEYS_READ + STAGES
    dtype: gl.constexpr = tiles.v.dtype
    q = tiles.q.index(GROUP)
    q_rest = tiles.q_rest.index(GROUP)
    count = 0
    step = 0
    mbarrier.wait(signals.queries, 0)
    first = described(info, 0)
    while first >= 0:
        first += ROWS * GROUP
        end = described(info, 1)
        h = described(info, 2)
        visible = described(info, 3)
        S = described(info, 4)
        steps = num_steps(visible, S, BLOCK_N, CAUSAL)
        if CAUSAL:
            visible += ROWS * GROUP
        zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, SCORES)
        acc = gl.zeros([ROWS, V], gl.float32, ACC)
        running_max = gl.full([ROWS], INITIAL_MAX, gl.float32, LINES)
        running_sum = gl.zeros([ROWS], gl.float32, LINES)
        row = first + gl.arange(0, ROWS, LINES)
        row_scale = qk_scale
        scale = qk_scale
        left = 1.0
        if EIGHT_BITS:
            scaled = described(info, 5)
            left = gl.load(scales.v + scaled)
            at = scales.q + row.to(gl.int64) * scales.q_token + h * scales.q_head
            k_scale = gl.load(scales.k + scaled) * qk_scale
            row_scale = gl.load(at, mask=row < end, other=1.0) * k_scale
            scale = row_scale[:, None]
        if steps > 0:
            stage = step % STAGES
            mbarrier.wait(signals.k_filled.index(stage), (step // STAGES) & 1)
            scores = issue_scores(
                q, q_rest, tiles.k.index(stage), tiles.k_rest.index(stage), zeros, REST
            )
            scores = warpgroup_mma_wait(0, deps=(scores,))
            named.arrive_at(named.KEYS_READ + stage, THREADS)
            scores = mask_keys(scores, 0, visible, S, BLOCK_N, SCORES)
            probs, _, running_max, running_sum = softmax(
                scores, running_max, running_sum, row_scale, scale, dtype, PROBS
            )
            for j in tl.range(1, steps, disable_licm=True):
                stage = (step + j) % STAGES
                before = (step + j - 1) % STAGES
                mbarrier.wait(signals.k_filled.index(stage), ((step + j) // STAGES) & 1)
                next_scores = issue_scores(
                    q, q_rest, tiles.k.index(stage), tiles.k_rest.index(stage), zeros, REST
                )
                mbarrier.wait(signals.v_filled.index(before), ((step + j - 1) // STAGES) & 1)
                acc_next = warpgroup_mma(probs, tiles.v.index(before), acc, is_async=True)
                scores = warpgroup_mma_wait(1, deps=(next_scores,))
                named.arrive_at(named.KEYS_READ + stage, THREADS)
                scores = mask_keys(scores, j * BLOCK_N, visible, S, BLOCK_N, SCORES)
                next_probs, rescale, running_max, running_sum = softmax(
                    scores, running_max, running_sum, row_scale, scale, dtype, PROBS
                )
                acc = warpgroup_mma_wait(0, deps=(acc_next,))
                named.arrive_at(VALUES_READ + before, THREADS)
                acc = acc * gl.convert_layout(rescale, ACC_ROWS)[:, None]
                probs = next_probs
            step += steps
            mbarrier.arrive(signals.queries_read, count=1)
            stage = (step - 1) % STAGES
            mbarrier.wait(signals.v_filled.index(stage), ((step - 1) // STAGES) & 1)
            acc_last = warpgroup_mma(probs, tiles.v.index(stage), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=(acc_last,))
            named.arrive_at(VALUES_READ + stage, THREADS)
        else:
            mbarrier.arrive(signals.queries_read, count=1)
        # stored from registers, so that the next tile's queries may already come in
        seen = running_sum != 0  # NaN stays NaN
        row_lse = gl.where(seen, (running_max + gl.log2(running_sum)) * LN2, float("-inf"))
        normalizer = gl.where(seen, left / running_sum, 0.0)
        gl.store(lse + row.to(gl.int64) * H + h, row_lse, mask=row < end)
        row = first + gl.arange(0, ROWS, ACC_ROWS)
        column = gl.arange(0, V, gl.SliceLayout(0, ACC))
        at = out + ((row.to(gl.int64) * H + h) * V)[:, None] + column[None, :]
        values = acc * gl.convert_layout(normalizer, ACC_ROWS)[:, None]
        gl.store(at, values.to(out.dtype.element_ty), mask=(row < end)[:, None])
        count += 1
        mbarrier.wait(signals.queries, count & 1)
        first = described(info, 0)


@gluon.jit(
    do_not_specialize=["T", "B"],
    do_not_specialize_on_alignment=["query_start_loc", "key_start_loc"],
)
def _expanded_kernel(
    q, q_rest, k, k_rest, v, q_scale, k_scale, v_scale, query_start_loc, key_start_loc, out, lse,
    counter, T, B, qk_scale, q_head, k_head, rest_head, rest_first, v_head, scale_token, scale_head,
    H: gl.constexpr, A: gl.constexpr, REST: gl.constexpr, OWN: gl.constexpr, V: gl.constexpr,
    BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr, EIGHT_BITS: gl.constexpr, STAGES: gl.constexpr,
    ATTEND_REGISTERS: gl.constexpr, LOAD_REGISTERS: gl.constexpr,
):  # fmt: skip
    qk_scale = qk_scale.to(gl.float32) * LOG2E  # inside a compiled graph it may arrive as fp64
    SIZE: gl.constexpr = 1 if EIGHT_BITS else 2
    TILE: gl.constexpr = gl.NVMMASharedLayout(min(BOX, A * SIZE), 8 * SIZE, 2)
    q_tile = gl.allocate_shared_memory(q.dtype, [GROUPS, ROWS, A], TILE)
    k_tile = gl.allocate_shared_memory(q.dtype, [STAGES, BLOCK_N, A], TILE)
    v_tile = gl.allocate_shared_memory(v.dtype, [STAGES, BLOCK_N, V], VALUES)
    q_rest_tile = q_tile
    k_rest_tile = k_tile
    if REST > 0:
        REST_TILE: gl.constexpr = gl.NVMMASharedLayout(REST * SIZE, 8 * SIZE, 2)
        q_rest_tile = gl.allocate_shared_memory(q.dtype, [GROUPS, ROWS, REST], REST_TILE)
        k_rest_tile = gl.allocate_shared_memory(q.dtype, [STAGES, BLOCK_N, REST], REST_TILE)
    info = gl.allocate_shared_memory(gl.int32, [INFO], LINE)
    queries = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    queries_read = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    last_values = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    keys = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    values = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(queries, count=2)  # what describes the tile, and its copies
    mbarrier.init(queries_read, count=2)
    mbarrier.init(last_values, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(keys.index(i), count=1)
        mbarrier.init(values.index(i), count=1)
    fence_async_shared()
    tiles = Tiles(q_tile, q_rest_tile, k_tile, k_rest_tile, v_tile)
    signals = Signals(queries, queries_read, keys, values, last_values)
    inputs = Inputs(q, q_rest, k, k_rest, v, q_head, k_head, rest_head, rest_first, v_head)
    scales = Scales(q_scale, k_scale, v_scale, scale_token, scale_head)
    gl.warp_specialize(
        [
            (attend_partition, (
                tiles, signals, info, scales, out, lse, qk_scale, 0, H, REST, V, BLOCK_N, CAUSAL,
                EIGHT_BITS, STAGES,
            )),
            (attend_partition, (
                tiles, signals, info, scales, out, lse, qk_scale, 1, H, REST, V, BLOCK_N, CAUSAL,
                EIGHT_BITS, STAGES,
            )),
            (load_partition, (
                inputs, tiles, signals, info, query_start_loc, key_start_loc, counter, T, B, H, A,
                REST, OWN, V, BLOCK_N, CAUSAL, EIGHT_BITS, STAGES,
            )),
        ],
        [4, 4],
        [ATTEND_REGISTERS, LOAD_REGISTERS],
    )  # fmt: skip
