"""Attention over packed, expanded queries and keys in e4m3, 128 query rows at a time; SM90.

Computes  what ops/mha_ragged.py says of e4m3 queries and keys, with values of 16 bits
Grid      as _expanded.py, whose tiles and signals these are
Reads     q [T, H, E], k [S, H, E], through TMA descriptors in boxes of 128 columns, v [S, H, V] in
          boxes of 64; q_scale [T, H], k_scale [H], v_scale [H]; query_start_loc, key_start_loc
Writes    out [T, H, V], lse [T, H]

Scores are eight-bit products, both operands as they lie. Probabilities and values are 16 bits: the
product of e4m3 probabilities, which WGMMA takes from registers, with transposed values came out a
fifth off on an H200, and 16 bits err less.
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

from openmla.backends.gluon._expanded import (
    BLOCK_M,
    GROUPS,
    INFO,
    ROWS,
    THREADS,
    Signals,
    Tiles,
    arrive,
    describe,
    described,
    issue_scores,
    load_columns,
    mask_keys,
    num_steps,
    tile_owner,
    wait,
    zero_rows,
)
from openmla.backends.gluon._expanded import TILE as VALUES_TILE
from openmla.backends.gluon._primitives import INITIAL_MAX, LINE, LN2, LOG2E
from openmla.backends.triton._versions import bulk_load

BOX = gl.constexpr(128)  # columns of a bulk copy: 128 bytes, one swizzle span
BLOCK_N = gl.constexpr(128)  # keys of a tile
STAGES = gl.constexpr(3)
TILE = gl.constexpr(gl.NVMMASharedLayout(128, 8, 2))
PAIR = gl.constexpr("256")  # threads of the two groups that attend
# Named barriers, one per stage. Triton takes the first four itself.
KEYS_READ = gl.constexpr(4)
VALUES_READ = gl.constexpr(7)
TURN = gl.constexpr(10)


class Inputs(NamedTuple):
    """Descriptors, and how far apart heads are in their columns."""

    q: Any
    q_rest: Any
    k: Any
    k_rest: Any
    v: Any
    q_head: Any
    k_head: Any
    v_head: Any


class Scales(NamedTuple):
    q: Any
    k: Any
    v: Any
    q_token: Any
    q_head: Any


@gluon.jit
def load_partition(
    inputs, tiles, signals, info, query_start_loc, key_start_loc, counter, T, B, H: gl.constexpr,
    A: gl.constexpr, REST: gl.constexpr, V: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """Find tiles and copy what they need."""
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
            describe(info, first, end, h, visible, S)
            mbarrier.arrive(signals.queries, count=1)
            mbarrier.expect(signals.queries, BLOCK_M * (A + REST))
            for g in gl.static_range(GROUPS):
                at = [first + ROWS * g, h * inputs.q_head]
                bulk_load(inputs.q, at, signals.queries, tiles.q.index(g))
                if REST > 0:
                    at = [first + ROWS * g, h * inputs.q_head + A]
                    bulk_load(inputs.q_rest, at, signals.queries, tiles.q_rest.index(g))
            for j in range(0, steps):
                stage = step % STAGES
                row = first_key + j * BLOCK_N
                if step >= STAGES:
                    wait(KEYS_READ + stage, THREADS)
                filled = signals.k_filled.index(stage)
                mbarrier.expect(filled, BLOCK_N * (A + REST))
                at = [row, h * inputs.k_head]
                bulk_load(inputs.k, at, filled, tiles.k.index(stage))
                if REST > 0:
                    at = [row, h * inputs.k_head + A]
                    bulk_load(inputs.k_rest, at, filled, tiles.k_rest.index(stage))
                if step >= STAGES:
                    wait(VALUES_READ + stage, THREADS)
                values = tiles.v.index(stage)
                filled = signals.v_filled.index(stage)
                left = S - j * BLOCK_N
                if left >= BLOCK_N:
                    mbarrier.expect(filled, 2 * BLOCK_N * V)
                    load_columns(values, inputs.v, row, h * inputs.v_head, 0, V, filled)
                else:
                    mbarrier.expect(signals.last_values, 2 * BLOCK_N * V)
                    load_columns(
                        values, inputs.v, row, h * inputs.v_head, 0, V, signals.last_values
                    )
                    mbarrier.wait(signals.last_values, lasts & 1)
                    lasts += 1
                    zero_rows(values, left, V, BLOCK_N)
                    fence_async_shared()
                    mbarrier.arrive(filled, count=1)
                step += 1
            count += 1
    if count > 0:
        mbarrier.wait(signals.queries_read, (count - 1) & 1)
    describe(info, -1, 0, 0, 0, 0)
    mbarrier.arrive(signals.queries, count=2)
    # what was announced last is waited for, too
    for i in gl.static_range(STAGES):
        if step > i:
            wait(KEYS_READ + (step - 1 - i) % STAGES, THREADS)
            wait(VALUES_READ + (step - 1 - i) % STAGES, THREADS)


@gluon.jit
def softmax(scores, running_max, running_sum, qk_scale, dtype: gl.constexpr, PROBS: gl.constexpr):
    """Probabilities at the new running max, and what earlier ones are rescaled with; qk_scale is of
    each row."""
    new_max = gl.maximum(running_max, gl.max(scores, 1) * qk_scale)
    rescale = gl.exp2(running_max - new_max)
    probs = gl.exp2(scores * qk_scale[:, None] - new_max[:, None])
    running_sum = running_sum * rescale + gl.sum(probs, 1)
    return gl.convert_layout(probs.to(dtype), PROBS), rescale, new_max, running_sum


@gluon.jit
def attend_partition(
    tiles, signals, info, scales, out, lse, qk_scale, GROUP: gl.constexpr, H: gl.constexpr,
    REST: gl.constexpr, V: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 32])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V, 16])
    PROBS: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    ACC_ROWS: gl.constexpr = gl.SliceLayout(1, ACC)
    LINES: gl.constexpr = gl.SliceLayout(1, SCORES)
    dtype: gl.constexpr = tiles.v.dtype
    q = tiles.q.index(GROUP)
    q_rest = tiles.q_rest.index(GROUP)
    count = 0
    step = 0
    if GROUP == 1:
        arrive(TURN, PAIR)
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
        at = scales.q + row.to(gl.int64) * scales.q_token + h * scales.q_head
        row_scale = gl.load(at, mask=row < end, other=1.0) * (gl.load(scales.k + h) * qk_scale)
        if steps > 0:
            stage = step % STAGES
            mbarrier.wait(signals.k_filled.index(stage), (step // STAGES) & 1)
            wait(TURN + GROUP, PAIR)
            scores = issue_scores(
                q, q_rest, tiles.k.index(stage), tiles.k_rest.index(stage), zeros, REST
            )
            arrive(TURN + 1 - GROUP, PAIR)
            scores = warpgroup_mma_wait(0, deps=(scores,))
            arrive(KEYS_READ + stage, THREADS)
            scores = mask_keys(scores, 0, visible, S, BLOCK_N, SCORES)
            probs, _, running_max, running_sum = softmax(
                scores, running_max, running_sum, row_scale, dtype, PROBS
            )
            for j in tl.range(1, steps, disable_licm=True):
                stage = (step + j) % STAGES
                before = (step + j - 1) % STAGES
                mbarrier.wait(signals.k_filled.index(stage), ((step + j) // STAGES) & 1)
                wait(TURN + GROUP, PAIR)
                next_scores = issue_scores(
                    q, q_rest, tiles.k.index(stage), tiles.k_rest.index(stage), zeros, REST
                )
                mbarrier.wait(signals.v_filled.index(before), ((step + j - 1) // STAGES) & 1)
                acc_next = warpgroup_mma(probs, tiles.v.index(before), acc, is_async=True)
                arrive(TURN + 1 - GROUP, PAIR)
                scores = warpgroup_mma_wait(1, deps=(next_scores,))
                arrive(KEYS_READ + stage, THREADS)
                scores = mask_keys(scores, j * BLOCK_N, visible, S, BLOCK_N, SCORES)
                next_probs, rescale, running_max, running_sum = softmax(
                    scores, running_max, running_sum, row_scale, dtype, PROBS
                )
                acc = warpgroup_mma_wait(0, deps=(acc_next,))
                arrive(VALUES_READ + before, THREADS)
                acc = acc * gl.convert_layout(rescale, ACC_ROWS)[:, None]
                probs = next_probs
            step += steps
            mbarrier.arrive(signals.queries_read, count=1)
            stage = (step - 1) % STAGES
            mbarrier.wait(signals.v_filled.index(stage), ((step - 1) // STAGES) & 1)
            acc_last = warpgroup_mma(probs, tiles.v.index(stage), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=(acc_last,))
            arrive(VALUES_READ + stage, THREADS)
        else:
            mbarrier.arrive(signals.queries_read, count=1)
        # stored from registers, so that the next tile's queries may already come in
        seen = running_sum != 0  # NaN stays NaN
        row_lse = gl.where(seen, (running_max + gl.log2(running_sum)) * LN2, float("-inf"))
        normaliser = gl.where(seen, gl.load(scales.v + h) / running_sum, 0.0)
        gl.store(lse + row.to(gl.int64) * H + h, row_lse, mask=row < end)
        row = first + gl.arange(0, ROWS, ACC_ROWS)
        column = gl.arange(0, V, gl.SliceLayout(0, ACC))
        at = out + ((row.to(gl.int64) * H + h) * V)[:, None] + column[None, :]
        values = acc * gl.convert_layout(normaliser, ACC_ROWS)[:, None]
        gl.store(at, values.to(out.dtype.element_ty), mask=(row < end)[:, None])
        count += 1
        mbarrier.wait(signals.queries, count & 1)
        first = described(info, 0)
    if GROUP == 0:
        wait(TURN, PAIR)


@gluon.jit(
    do_not_specialize=["T", "B"],
    do_not_specialize_on_alignment=["query_start_loc", "key_start_loc"],
)
def _expanded_fp8_kernel(
    q, q_rest, k, k_rest, v, q_scale, k_scale, v_scale, query_start_loc, key_start_loc, out, lse,
    counter, T, B, qk_scale, q_head, k_head, v_head, scale_token, scale_head, H: gl.constexpr,
    A: gl.constexpr, REST: gl.constexpr, V: gl.constexpr, CAUSAL: gl.constexpr,
    ATTEND_REGISTERS: gl.constexpr, LOAD_REGISTERS: gl.constexpr,
):  # fmt: skip
    qk_scale = qk_scale.to(gl.float32) * LOG2E  # inside a compiled graph it may arrive as fp64
    dtype: gl.constexpr = gl.float8e4nv
    q_tile = gl.allocate_shared_memory(dtype, [GROUPS, ROWS, A], TILE)
    k_tile = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, A], TILE)
    v_tile = gl.allocate_shared_memory(v.dtype, [STAGES, BLOCK_N, V], VALUES_TILE)
    q_rest_tile = q_tile
    k_rest_tile = k_tile
    if REST > 0:
        REST_TILE: gl.constexpr = gl.NVMMASharedLayout(REST, 8, 2)
        q_rest_tile = gl.allocate_shared_memory(dtype, [GROUPS, ROWS, REST], REST_TILE)
        k_rest_tile = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, REST], REST_TILE)
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
    inputs = Inputs(q, q_rest, k, k_rest, v, q_head, k_head, v_head)
    scales = Scales(q_scale, k_scale, v_scale, scale_token, scale_head)
    gl.warp_specialize(
        [
            (attend_partition, (
                tiles, signals, info, scales, out, lse, qk_scale, 0, H, REST, V, CAUSAL,
            )),
            (attend_partition, (
                tiles, signals, info, scales, out, lse, qk_scale, 1, H, REST, V, CAUSAL,
            )),
            (load_partition, (
                inputs, tiles, signals, info, query_start_loc, key_start_loc, counter, T, B, H, A,
                REST, V, CAUSAL,
            )),
        ],
        [4, 4],
        [ATTEND_REGISTERS, LOAD_REGISTERS],
    )  # fmt: skip
