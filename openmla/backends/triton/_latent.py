"""Latent attention of one token over the rows its segments name; mqa_sparse.

Computes  for each token t, head h: rows = the cached rows its segments name, decoded
          s = scale * q[t, h] @ rows.T;  lse = log(sum(exp(s)));  out = exp(s - lse) @ rows[:, :C]
          (specification: ops/mqa_sparse.py; numbers: backends/reference)
Grid      (cdiv(H, BLOCK_H), T, X): one program owns one token, BLOCK_H heads, one run of its rows;
          a grid holds 65535 tokens, more take several launches
Reads     q [T, H, D], caches [N, BS, W], row ids, query_start_loc [B+1]
Writes    out [T, H, C] and lse [T, H]; with X > 1 runs part [T, X, H, C] and part_lse [T, X, H],
          merged by a second kernel
Limits    see why_not_latent()

MAIN columns, as one or two tiles, and ROPE columns of a row are keys. Its values are the MAIN
columns, and the ROPE ones where C reaches that far. All of V4's columns are MAIN, though the last
are stored differently. Invalid rows are zeros with a score of -inf.

e4m3 queries meet fp8 rows as they are stored; over others they are widened, which is exact. Probs
and values stay 16 bits wide. qk_scale is a column then, with a number for each query row.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from openmla.backends.triton._build import DO_NOT_SPECIALIZE_ON_ALIGNMENT
from openmla.backends.triton._latent_rows import (
    PACKED_GROUP,
    POSITIONS,
    SLOTS,
    V4_ROPE,
    Columns,
    Options,
    Rows,
    Segment,
    count_rows,
    find_rows,
    find_slots,
    load_main,
    load_rope,
    load_row_ids,
    load_stored,
)
from openmla.backends.triton._primitives import (
    FP8,
    LN2,
    LOG2E,
    PACKED,
    PLAIN,
    V4,
    decode_e4m3,
    dot,
    finish_softmax,
    finite_max,
    request_of,
    sink_factor,
    softmax_probs,
    store_columns,
)

# Integers that change from step to step and must not recompile the kernel.
DO_NOT_SPECIALIZE = (
    "B", "first_token", "X", "N_1", "M_1", "K_1", "table_stride_1", "N_2", "M_2", "K_2",
    "table_stride_2",
)  # fmt: skip


@triton.jit
def add_product(
    scores, q, tile, PRECISION: tl.constexpr, SEPARATE: tl.constexpr, UPCAST: tl.constexpr
):  # fmt: skip
    """scores + q @ tile.T; SEPARATE, as a product of its own and an addition that the compiler does
    not fold into its accumulator."""
    if SEPARATE:
        product = dot(q, tl.trans(tile), tl.zeros(scores.shape, tl.float32), PRECISION, UPCAST)
        scores = tl.fma(product, 1.0, scores)
    else:
        scores = dot(q, tl.trans(tile), scores, PRECISION, UPCAST)
    return scores


@triton.jit
def dot_e4m3(q, stored, scores):
    """scores + q @ rows.T of e4m3 queries and rows that are still bytes."""
    return tl.dot(q, tl.trans(stored.to(tl.float8e4nv, bitcast=True)), scores)


@triton.jit
def unchain(weights, rescale):
    """The same values through an opaque move; call it under a condition the compiler cannot prove.

    Triton lays out a dot whose result feeds another one with all warps along its rows. With fewer
    rows than 16 per warp, several warps then compute the same. It looks for the second dot through
    any operation, but not past the end of a branch.
    """
    PACK: tl.constexpr = 32 // weights.dtype.primitive_bitwidth
    weights = tl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [weights], dtype=weights.dtype, is_pure=False, pack=PACK
    )
    rescale = tl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [rescale], dtype=tl.float32, is_pure=False, pack=1
    )
    return weights, rescale


class Queries(NamedTuple):
    """Some rows of queries, their columns cut as those of keys are."""

    a: Any
    b: Any
    rope: Any


class State(NamedTuple):
    """An online softmax and the accumulators of the output's columns, cut as those of keys are."""

    running_max: Any
    running_sum: Any
    a: Any
    b: Any
    rope: Any


@triton.jit
def initial_state(BLOCK_H: tl.constexpr, COLUMNS: tl.constexpr):
    return State(
        tl.full([BLOCK_H], float("-inf"), tl.float32),
        tl.zeros([BLOCK_H], tl.float32),
        tl.zeros([BLOCK_H, COLUMNS.BLOCK_A], tl.float32),
        tl.zeros([BLOCK_H, COLUMNS.BLOCK_B], tl.float32),
        tl.zeros([BLOCK_H, COLUMNS.BLOCK_R], tl.float32),
    )


@triton.jit
def attend(
    queries, qk_scale, visible, state, rows, lo, hi, FOLDED: tl.constexpr, SEGMENT: tl.constexpr,
    COLUMNS: tl.constexpr, OPTIONS: tl.constexpr,
):  # fmt: skip
    """Accumulate rows lo .. hi-1 of one segment into an online softmax. With FOLDED queries are of
    several tokens, and each sees its first `visible` rows only."""
    running_max, running_sum, acc_a, acc_b, acc_rope = state
    FORMAT: tl.constexpr = SEGMENT.FORMAT
    KIND: tl.constexpr = SEGMENT.KIND
    BS: tl.constexpr = SEGMENT.BS
    MAIN: tl.constexpr = COLUMNS.MAIN
    ROPE: tl.constexpr = COLUMNS.ROPE
    ROPE_VALUED: tl.constexpr = COLUMNS.C > MAIN
    BLOCK_N: tl.constexpr = OPTIONS.BLOCK_N
    BLOCK_A: tl.constexpr = COLUMNS.BLOCK_A
    BLOCK_B: tl.constexpr = COLUMNS.BLOCK_B
    BLOCK_R: tl.constexpr = COLUMNS.BLOCK_R
    PRECISION: tl.constexpr = OPTIONS.PRECISION
    UPCAST: tl.constexpr = OPTIONS.UPCAST
    ASM: tl.constexpr = OPTIONS.ASM
    dtype: tl.constexpr = OPTIONS.dtype
    if FORMAT == FP8:  # scale logits and accumulators, not rows: the largest prob stays exactly 1
        qk_scale *= rows.kv_scale
        acc_a = acc_a / rows.kv_scale
        acc_b = acc_b / rows.kv_scale
        acc_rope = acc_rope / rows.kv_scale
    TWO_TILES: tl.constexpr = MAIN > BLOCK_A
    USED: tl.constexpr = BLOCK_A if TWO_TILES else MAIN
    # Tensor cores truncate what they add to an accumulator. Over all columns of a row in one chain
    # that shows in lse, where keys are few. Decoded rows leave no registers for a second one.
    SEPARATE: tl.constexpr = OPTIONS.UNCHAINED or FORMAT == PLAIN
    EIGHT_BITS: tl.constexpr = queries.a.dtype == tl.float8e4nv
    BLOCK_H: tl.constexpr = queries.a.shape[0]
    offs_n = tl.arange(0, BLOCK_N)
    begin = lo
    # Prefetch what V4's rows are looked up by, given enough warps to hold it: blocks one tile
    # ahead, positions, which lead to blocks, two. In other formats it was slower.
    PREFETCH: tl.constexpr = (
        FORMAT == V4 and KIND != SLOTS and not SEGMENT.ONE_BLOCK and BLOCK_H > 16
    )
    if SEGMENT.ONE_BLOCK:
        begin = lo - lo % BLOCK_N
    if PREFETCH:
        row_ids = load_row_ids(rows, begin + offs_n, hi, SEGMENT)
        slots = find_slots(rows, row_ids, BS)
        if KIND == POSITIONS:
            row_ids = load_row_ids(rows, begin + BLOCK_N + offs_n, hi, SEGMENT)
    for start in tl.range(
        begin, hi, BLOCK_N, num_stages=OPTIONS.STAGES, disable_licm=not OPTIONS.HOIST
    ):
        # which rows, and where they lie
        j = start + offs_n
        if PREFETCH:
            valid = slots >= 0
            block = (slots // BS).to(OPTIONS.OFFSET)
            offset = slots % BS
            if KIND == POSITIONS:
                slots = find_slots(rows, row_ids, BS)
                row_ids = load_row_ids(rows, j + 2 * BLOCK_N, hi, SEGMENT)
            else:
                next_ids = load_row_ids(rows, j + BLOCK_N, hi, SEGMENT)
                slots = find_slots(rows, next_ids, BS)
        else:
            block, offset, valid = find_rows(rows, start, j, lo, hi, SEGMENT, OPTIONS.OFFSET)
        if FORMAT == V4:
            row = block * rows.page + offset * (MAIN + V4_ROPE)
            scales_at = block * rows.page + BS * (MAIN + V4_ROPE)
            scales_at += offset * (rows.W - MAIN - V4_ROPE)
            rope_at = row
        else:
            row = block * rows.page + offset * rows.stride
            scales_at = row + MAIN
            rope_at = row + MAIN
            if FORMAT == PACKED:  # behind a float32 scale per group
                rope_at = row + MAIN + 4 * (MAIN // PACKED_GROUP)
        # scores: keys are loaded as they are needed, and kept as values
        scores = tl.zeros([BLOCK_H, BLOCK_N], tl.float32)
        if EIGHT_BITS:
            tile_a = load_stored(rows.cache, row, valid, 0, USED, BLOCK_A)
            scores = dot_e4m3(queries.a, tile_a, scores)
            tile_a = decode_e4m3(tile_a, dtype, ASM)
        else:
            tile_a = load_main(
                rows.cache, row, scales_at, valid, 0, USED, BLOCK_A, MAIN, FORMAT, OPTIONS
            )
            scores = dot(queries.a, tl.trans(tile_a), scores, PRECISION, UPCAST)
        if TWO_TILES and EIGHT_BITS:
            tile_b = load_stored(rows.cache, row, valid, BLOCK_A, MAIN - BLOCK_A, BLOCK_B)
            scores = dot_e4m3(queries.b, tile_b, scores)
            tile_b = decode_e4m3(tile_b, dtype, ASM)
        elif TWO_TILES:
            tile_b = load_main(
                rows.cache, row, scales_at, valid, BLOCK_A, MAIN - BLOCK_A, BLOCK_B, MAIN, FORMAT,
                OPTIONS,
            )  # fmt: skip
            scores = add_product(scores, queries.b, tile_b, PRECISION, SEPARATE, UPCAST)
        if ROPE > 0 and EIGHT_BITS:
            rope = load_stored(rows.cache, rope_at, valid, 0, ROPE, BLOCK_R)
            scores = dot_e4m3(queries.rope, rope, scores)
            if ROPE_VALUED:
                rope = decode_e4m3(rope, dtype, ASM)
        elif ROPE > 0:
            rope = load_rope(
                rows.cache, rope_at, valid, ROPE, BLOCK_R, FORMAT, OPTIONS.ALIGNED, ASM, dtype
            )
            scores = add_product(scores, queries.rope, rope, PRECISION, SEPARATE, UPCAST)
        seen = valid[None, :]
        if FOLDED:
            seen = seen & (j[None, :] < visible[:, None])
        scores = tl.where(seen, scores * qk_scale, float("-inf"))
        # online softmax
        new_max = tl.maximum(running_max, tl.max(scores, 1))
        probs, rescale = softmax_probs(scores, running_max, new_max)
        running_sum = running_sum * rescale + tl.sum(probs, 1)
        if not UPCAST:
            probs = probs.to(dtype)
        if OPTIONS.UNCHAINED and start < hi:
            probs, rescale = unchain(probs, rescale)
        acc_a = dot(probs, tile_a, acc_a * rescale[:, None], PRECISION, UPCAST)
        if TWO_TILES:
            acc_b = dot(probs, tile_b, acc_b * rescale[:, None], PRECISION, UPCAST)
        if ROPE_VALUED:
            acc_rope = dot(probs, rope, acc_rope * rescale[:, None], PRECISION, UPCAST)
        running_max = new_max
    if FORMAT == FP8:
        acc_a = acc_a * rows.kv_scale
        acc_b = acc_b * rows.kv_scale
        acc_rope = acc_rope * rows.kv_scale
    return State(running_max, running_sum, acc_a, acc_b, acc_rope)


@triton.jit
def load_columns(
    q_at, mask, FIRST: tl.constexpr, USED: tl.constexpr, BLOCK: tl.constexpr,
    EIGHT_BITS: tl.constexpr, ASM: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Columns FIRST .. FIRST + USED - 1 of queries, zero-padded, in the dtype of the products.
    Bytes are e4m3; those of EIGHT_BITS stay so, but in the interpreter, which has none."""
    c = tl.arange(0, BLOCK)
    mask = mask[:, None] & (c < USED)[None, :]
    values = tl.load(q_at[:, None] + (c + FIRST)[None, :], mask=mask, other=0)
    if values.dtype == tl.uint8 and EIGHT_BITS and ASM:
        values = values.to(tl.float8e4nv, bitcast=True)
    elif values.dtype == tl.uint8:
        values = decode_e4m3(values, dtype, ASM)
    else:
        values = values.to(dtype)
    return values


@triton.jit
def load_queries(
    q_at, mask, EIGHT_BITS: tl.constexpr, COLUMNS: tl.constexpr, OPTIONS: tl.constexpr
):
    MAIN: tl.constexpr = COLUMNS.MAIN
    BLOCK_A: tl.constexpr = COLUMNS.BLOCK_A
    A: tl.constexpr = BLOCK_A if MAIN > BLOCK_A else MAIN
    B: tl.constexpr = MAIN - BLOCK_A
    ASM: tl.constexpr = OPTIONS.ASM
    dtype: tl.constexpr = OPTIONS.dtype
    return Queries(
        load_columns(q_at, mask, 0, A, BLOCK_A, EIGHT_BITS, ASM, dtype),
        load_columns(q_at, mask, BLOCK_A, B, COLUMNS.BLOCK_B, EIGHT_BITS, ASM, dtype),
        load_columns(q_at, mask, MAIN, COLUMNS.ROPE, COLUMNS.BLOCK_R, EIGHT_BITS, ASM, dtype),
    )


@triton.jit
def query_scales(qk_scale, q_scale, line, mask, Q_SCALES: tl.constexpr):
    """What scores are multiplied with: of e4m3 queries a column, from one scale or one per row."""
    if Q_SCALES == 1:
        qk_scale = (qk_scale * tl.load(q_scale) + tl.zeros(mask.shape, tl.float32))[:, None]
    elif Q_SCALES == 2:
        qk_scale = qk_scale * tl.load(q_scale + line, mask=mask, other=0.0)[:, None]
    return qk_scale


@triton.jit(
    do_not_specialize=DO_NOT_SPECIALIZE,
    do_not_specialize_on_alignment=DO_NOT_SPECIALIZE_ON_ALIGNMENT,
)
def _latent_kernel(
    q, q_scale, query_start_loc, positions, sink,
    # both segments; a call with one passes it twice
    cache_1, kv_scale_1, rows_1, row_lens_1, table_1,
    cache_2, kv_scale_2, rows_2, row_lens_2, table_2,
    # results, or partial ones
    out, lse,
    B, first_token, qk_scale, q_token, q_head,
    # X runs of a token's rows, each of run_length if that is not 0
    X, run_length,
    # sizes and strides of both segments
    page_1, row_1, W_1, N_1, M_1, K_1, span_1, rows_stride_1, table_stride_1,
    page_2, row_2, W_2, N_2, M_2, K_2, span_2, rows_stride_2, table_stride_2,
    # what is computed
    H: tl.constexpr, C: tl.constexpr, MAIN: tl.constexpr, ROPE: tl.constexpr,
    KIND_1: tl.constexpr, FORMAT_1: tl.constexpr, BS_1: tl.constexpr, ONE_BLOCK_1: tl.constexpr,
    KIND_2: tl.constexpr, FORMAT_2: tl.constexpr, BS_2: tl.constexpr, ONE_BLOCK_2: tl.constexpr,
    SECOND: tl.constexpr, SINK: tl.constexpr, SPLIT: tl.constexpr,
    # and how
    ALIGNED: tl.constexpr, ASM: tl.constexpr, OFFSET: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_B: tl.constexpr,
    BLOCK_R: tl.constexpr, PRECISION: tl.constexpr, UNCHAINED: tl.constexpr, UPCAST: tl.constexpr,
    STAGES: tl.constexpr, HOIST: tl.constexpr, dtype: tl.constexpr, EIGHT_BITS: tl.constexpr,
    Q_SCALES: tl.constexpr,
):  # fmt: skip
    # constants of both segments, of a row's columns, and of the kernel
    SEGMENT_1: tl.constexpr = Segment(KIND_1, FORMAT_1, BS_1, ONE_BLOCK_1)
    SEGMENT_2: tl.constexpr = Segment(KIND_2, FORMAT_2, BS_2, ONE_BLOCK_2)
    COLUMNS: tl.constexpr = Columns(C, MAIN, ROPE, BLOCK_A, BLOCK_B, BLOCK_R)
    OPTIONS: tl.constexpr = Options(
        BLOCK_N, ALIGNED, ASM, OFFSET, STAGES, HOIST, dtype, PRECISION, UPCAST, UNCHAINED
    )
    USED: tl.constexpr = BLOCK_A if MAIN > BLOCK_A else MAIN
    head_tile, t, x = tl.program_id(0), first_token + tl.program_id(1), tl.program_id(2)
    if not UPCAST:  # fp64 from a compiled graph; in the interpreter a Python float
        qk_scale = qk_scale.to(tl.float32)
    qk_scale = qk_scale * LOG2E
    # how many rows the token has, and which of them are this program's
    if KIND_1 == SLOTS and (not SECOND or KIND_2 == SLOTS):  # slots need no request
        b = tl.where(t < tl.load(query_start_loc + B), 0, B)
    else:
        b = request_of(t, query_start_loc, B)
    t64 = t.to(tl.int64)
    n_2 = 0
    position = tl.load(positions + t)
    n_1 = count_rows(t, b, position, B, row_lens_1, K_1, M_1, span_1, KIND_1, BS_1)
    if SECOND:
        n_2 = count_rows(t, b, position, B, row_lens_2, K_2, M_2, span_2, KIND_2, BS_2)
    owner = tl.minimum(b, B - 1).to(tl.int64)
    lo = 0
    hi = n_1 + n_2
    if SPLIT:
        run = tl.cdiv(tl.cdiv(hi, BLOCK_N), X) * BLOCK_N
        run = tl.where(run_length > 0, run_length, run)
        lo = x * run
        hi = tl.minimum(hi, lo + run)

    heads = head_tile * BLOCK_H + tl.arange(0, BLOCK_H)
    mask_h = heads < H
    q_at = q + t64 * q_token + heads * q_head
    queries = load_queries(q_at, mask_h, EIGHT_BITS, COLUMNS, OPTIONS)
    qk_scale = query_scales(qk_scale, q_scale, t64 * H + heads, mask_h, Q_SCALES)
    state = initial_state(BLOCK_H, COLUMNS)
    first_hi = tl.minimum(hi, n_1)
    rows = Rows(
        cache_1, page_1, row_1, W_1, N_1, tl.load(kv_scale_1), rows_1 + t64 * rows_stride_1,
        position, table_1 + owner * table_stride_1, M_1,
    )  # fmt: skip
    state = attend(
        queries, qk_scale, 0, state, rows, lo, first_hi, False, SEGMENT_1, COLUMNS, OPTIONS
    )
    if SECOND:
        second_lo, second_hi = tl.maximum(lo - n_1, 0), hi - n_1
        rows = Rows(
            cache_2, page_2, row_2, W_2, N_2, tl.load(kv_scale_2), rows_2 + t64 * rows_stride_2,
            position, table_2 + owner * table_stride_2, M_2,
        )  # fmt: skip
        state = attend(
            queries, qk_scale, 0, state, rows, second_lo, second_hi, False, SEGMENT_2, COLUMNS,
            OPTIONS,
        )  # fmt: skip
    any_valid, normalizer, row_lse = finish_softmax(state.running_max, state.running_sum)
    if SPLIT:
        line = (t64 * X + x) * H + heads
    else:
        line = t64 * H + heads
        if SINK:
            logit = tl.load(sink + heads, mask=mask_h, other=0.0).to(tl.float32)
            normalizer *= sink_factor(logit, row_lse, any_valid)
    tl.store(lse + line, row_lse, mask=mask_h)
    at = out + line * C
    store_columns(at, mask_h, state.a * normalizer[:, None], 0, USED, BLOCK_A)
    if MAIN > BLOCK_A:
        b_columns = state.b * normalizer[:, None]
        store_columns(at, mask_h, b_columns, BLOCK_A, MAIN - BLOCK_A, BLOCK_B)
    if C > MAIN:
        store_columns(at, mask_h, state.rope * normalizer[:, None], MAIN, C - MAIN, BLOCK_R)


@triton.jit(do_not_specialize=["X"])
def _merge_runs_kernel(
    part, part_lse, sink, out, lse, X,
    H: tl.constexpr, C: tl.constexpr, SINK: tl.constexpr, BLOCK_X: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    """One token and head: its runs weighted by exp(lse); the sink counts once, here."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    t, h = row // H, row % H
    c = tile * BLOCK_C + tl.arange(0, BLOCK_C)
    offs_x = tl.arange(0, BLOCK_X)
    acc = tl.zeros([BLOCK_C], tl.float32)
    running_sum = 0.0
    running_max = float("-inf")
    for start in range(0, X, BLOCK_X):
        x = start + offs_x
        runs = (t * X + x) * H + h
        run_lse = tl.load(part_lse + runs, mask=x < X, other=float("-inf"))
        new_max = tl.maximum(running_max, tl.max(run_lse, 0))
        safe_max = finite_max(new_max)
        weights = tl.exp2((run_lse - safe_max) * LOG2E)
        rescale = tl.exp2((running_max - safe_max) * LOG2E)
        values = tl.load(
            part + runs[:, None] * C + c[None, :],
            mask=(run_lse != float("-inf"))[:, None] & (c < C)[None, :],
            other=0.0,
        )
        acc = acc * rescale + tl.sum(values * weights[:, None], 0)
        running_sum = running_sum * rescale + tl.sum(weights, 0)
        running_max = new_max
    any_valid = running_sum != 0  # NaN stays NaN
    merged_lse = tl.where(any_valid, running_max + tl.log2(running_sum) * LN2, float("-inf"))
    normalizer = tl.where(any_valid, 1.0 / running_sum, 0.0)
    if SINK:
        logit = tl.load(sink + h).to(tl.float32)
        normalizer *= sink_factor(logit, merged_lse, any_valid)
    tl.store(out + row * C + c, (acc * normalizer).to(out.dtype.element_ty), mask=c < C)
    if tile == 0:
        tl.store(lse + row, merged_lse)
