"""Latent attention of e4m3 queries over packed rows: products in fp8, a group of columns at a time.

A packed row has a scale per 128 columns, so each group is a product of its own, of queries and rows
as they are stored, that its keys' scales are multiplied with before it joins the scores. Rope
columns are bf16 and meet queries widened exactly; values are decoded as in _latent.py.
"""

import triton
import triton.language as tl

from openmla.backends.triton._build import DO_NOT_SPECIALIZE_ON_ALIGNMENT
from openmla.backends.triton._latent import (
    DO_NOT_SPECIALIZE,
    dot_e4m3,
    load_query,
    query_scales,
    unchain,
)
from openmla.backends.triton._latent_rows import (
    PACKED_GROUP,
    SLOTS,
    count_rows,
    find_rows,
    load_rope,
    load_stored,
)
from openmla.backends.triton._primitives import (
    LOG2E,
    PACKED,
    decode_e4m3,
    dot,
    finish_softmax,
    load_float32,
    request_of,
    sink_factor,
    softmax_weights,
    store_columns,
)


@triton.jit
def load_query_group(
    q_at, mask, g: tl.constexpr, GROUPS: tl.constexpr, ASM: tl.constexpr, dtype: tl.constexpr
):  # fmt: skip
    """Those of a group that a row does not have are never multiplied."""
    FIRST: tl.constexpr = PACKED_GROUP * g if g < GROUPS else 0
    return load_query(q_at, mask, FIRST, PACKED_GROUP, PACKED_GROUP, ASM, dtype)


@triton.jit
def load_query_rope(
    q_at, mask, MAIN: tl.constexpr, ROPE: tl.constexpr, BLOCK_R: tl.constexpr, ASM: tl.constexpr,
    dtype: tl.constexpr,
):  # fmt: skip
    """Widened."""
    r = tl.arange(0, BLOCK_R)
    valid = mask[:, None] & (r < ROPE)[None, :]
    stored = tl.load(q_at[:, None] + (MAIN + r)[None, :], mask=valid, other=0)
    return decode_e4m3(stored, dtype, ASM)


@triton.jit
def score_group(
    scores, q, cache, row, scales_at, valid, g: tl.constexpr, ALIGNED: tl.constexpr,
    ASM: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Scores with the products of a group, and its values, decoded."""
    # e4m3 times a power of two is exact in bf16; the interpreter multiplies in float32 only
    EXACT: tl.constexpr = dtype if ASM else tl.float32
    stored = load_stored(cache, row, valid, PACKED_GROUP * g, PACKED_GROUP, PACKED_GROUP)
    scale = load_float32(cache + scales_at, g, valid, ALIGNED)
    none = tl.zeros(scores.shape, tl.float32)
    if ASM:
        product = dot_e4m3(q, stored, none)
    else:  # queries are widened, too
        product = dot(q, tl.trans(decode_e4m3(stored, dtype, ASM)), none, PRECISION, UPCAST)
    value = decode_e4m3(stored, EXACT, ASM) * scale.to(EXACT)[:, None]
    return scores + product * scale[None, :], value.to(dtype)


@triton.jit
def attend_groups(
    q_at, mask, lo, hi, position, visible, qk_scale, cache, page, row_stride, rows, table, M, N,
    BS: tl.constexpr, ONE_BLOCK: tl.constexpr, KIND: tl.constexpr, FOLDED: tl.constexpr,
    ALIGNED: tl.constexpr, ASM: tl.constexpr, OFFSET: tl.constexpr, MAIN: tl.constexpr,
    ROPE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
    PRECISION: tl.constexpr, UNCHAINED: tl.constexpr, UPCAST: tl.constexpr, STAGES: tl.constexpr,
    HOIST: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Running max, running sum and an accumulator per group, of rows lo .. hi-1."""
    GROUPS: tl.constexpr = MAIN // PACKED_GROUP
    q_0 = load_query_group(q_at, mask, 0, GROUPS, ASM, dtype)
    q_1 = load_query_group(q_at, mask, 1, GROUPS, ASM, dtype)
    q_2 = load_query_group(q_at, mask, 2, GROUPS, ASM, dtype)
    q_3 = load_query_group(q_at, mask, 3, GROUPS, ASM, dtype)
    q_rope = load_query_rope(q_at, mask, MAIN, ROPE, BLOCK_R, ASM, dtype)
    running_max = tl.full([BLOCK_H], float("-inf"), tl.float32)
    running_sum = tl.zeros([BLOCK_H], tl.float32)
    acc_0 = tl.zeros([BLOCK_H, PACKED_GROUP], tl.float32)
    acc_1 = tl.zeros([BLOCK_H, PACKED_GROUP], tl.float32)
    acc_2 = tl.zeros([BLOCK_H, PACKED_GROUP], tl.float32)
    acc_3 = tl.zeros([BLOCK_H, PACKED_GROUP], tl.float32)
    offs_n = tl.arange(0, BLOCK_N)
    begin = lo
    if ONE_BLOCK:
        begin = lo - lo % BLOCK_N
    for start in tl.range(begin, hi, BLOCK_N, num_stages=STAGES, disable_licm=not HOIST):
        j = start + offs_n
        block, offset, valid = find_rows(
            start, j, lo, hi, position, rows, table, M, N, KIND, BS, ONE_BLOCK, OFFSET
        )
        row = block * page + offset * row_stride
        scales_at = row + MAIN
        scores = tl.zeros([BLOCK_H, BLOCK_N], tl.float32)
        if ROPE > 0:
            rope_at = scales_at + 4 * GROUPS
            rope = load_rope(cache, rope_at, valid, ROPE, BLOCK_R, PACKED, ALIGNED, ASM, dtype)
            scores = dot(q_rope, tl.trans(rope), scores, PRECISION, UPCAST)
        scores, v_0 = score_group(
            scores, q_0, cache, row, scales_at, valid, 0, ALIGNED, ASM, PRECISION, UPCAST, dtype
        )
        if GROUPS > 1:
            scores, v_1 = score_group(
                scores, q_1, cache, row, scales_at, valid, 1, ALIGNED, ASM, PRECISION, UPCAST, dtype
            )
        if GROUPS > 2:
            scores, v_2 = score_group(
                scores, q_2, cache, row, scales_at, valid, 2, ALIGNED, ASM, PRECISION, UPCAST, dtype
            )
        if GROUPS > 3:
            scores, v_3 = score_group(
                scores, q_3, cache, row, scales_at, valid, 3, ALIGNED, ASM, PRECISION, UPCAST, dtype
            )
        seen = valid[None, :]
        if FOLDED:
            seen = seen & (j[None, :] < visible[:, None])
        scores = tl.where(seen, scores * qk_scale, float("-inf"))
        new_max = tl.maximum(running_max, tl.max(scores, 1))
        weights, rescale = softmax_weights(scores, running_max, new_max)
        running_sum = running_sum * rescale + tl.sum(weights, 1)
        if not UPCAST:
            weights = weights.to(dtype)
        if UNCHAINED and start < hi:
            weights, rescale = unchain(weights, rescale)
        acc_0 = dot(weights, v_0, acc_0 * rescale[:, None], PRECISION, UPCAST)
        if GROUPS > 1:
            acc_1 = dot(weights, v_1, acc_1 * rescale[:, None], PRECISION, UPCAST)
        if GROUPS > 2:
            acc_2 = dot(weights, v_2, acc_2 * rescale[:, None], PRECISION, UPCAST)
        if GROUPS > 3:
            acc_3 = dot(weights, v_3, acc_3 * rescale[:, None], PRECISION, UPCAST)
        running_max = new_max
    return running_max, running_sum, acc_0, acc_1, acc_2, acc_3


@triton.jit
def store_groups(at, mask, acc_0, acc_1, acc_2, acc_3, normalizer, MAIN: tl.constexpr):
    WIDTH: tl.constexpr = PACKED_GROUP
    store_columns(at, mask, acc_0 * normalizer[:, None], 0, WIDTH, WIDTH)
    if MAIN > WIDTH:
        store_columns(at, mask, acc_1 * normalizer[:, None], WIDTH, WIDTH, WIDTH)
    if MAIN > 2 * WIDTH:
        store_columns(at, mask, acc_2 * normalizer[:, None], 2 * WIDTH, WIDTH, WIDTH)
    if MAIN > 3 * WIDTH:
        store_columns(at, mask, acc_3 * normalizer[:, None], 3 * WIDTH, WIDTH, WIDTH)


@triton.jit(
    do_not_specialize=DO_NOT_SPECIALIZE,
    do_not_specialize_on_alignment=DO_NOT_SPECIALIZE_ON_ALIGNMENT,
)
def _latent_groups_kernel(
    q, q_scale, query_start_loc, positions, sink,
    cache_1, kv_scale_1, rows_1, row_lens_1, table_1,
    cache_2, kv_scale_2, rows_2, row_lens_2, table_2,
    out, lse,
    B, first_token, qk_scale, q_token, q_head, X, run_length,
    page_1, row_1, W_1, N_1, M_1, K_1, span_1, rows_stride_1, table_stride_1,
    page_2, row_2, W_2, N_2, M_2, K_2, span_2, rows_stride_2, table_stride_2,
    H: tl.constexpr, C: tl.constexpr, MAIN: tl.constexpr, ROPE: tl.constexpr,
    KIND_1: tl.constexpr, FORMAT_1: tl.constexpr, BS_1: tl.constexpr, ONE_BLOCK_1: tl.constexpr,
    KIND_2: tl.constexpr, FORMAT_2: tl.constexpr, BS_2: tl.constexpr, ONE_BLOCK_2: tl.constexpr,
    SECOND: tl.constexpr, SINK: tl.constexpr, SPLIT: tl.constexpr,
    ALIGNED: tl.constexpr, ASM: tl.constexpr, OFFSET: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_B: tl.constexpr,
    BLOCK_R: tl.constexpr, PRECISION: tl.constexpr, UNCHAINED: tl.constexpr, UPCAST: tl.constexpr,
    STAGES: tl.constexpr, HOIST: tl.constexpr, dtype: tl.constexpr, Q_SCALES: tl.constexpr,
):  # fmt: skip
    """Arguments, grid and results are _latent_kernel's; the second segment is not looked at."""
    head_tile, t, x = tl.program_id(0), first_token + tl.program_id(1), tl.program_id(2)
    if not UPCAST:  # fp64 from a compiled graph; in the interpreter a Python float
        qk_scale = qk_scale.to(tl.float32)
    qk_scale = qk_scale * LOG2E
    if KIND_1 == SLOTS:  # slots need no request
        b = tl.where(t < tl.load(query_start_loc + B), 0, B)
    else:
        b = request_of(t, query_start_loc, B)
    t64 = t.to(tl.int64)
    position = tl.load(positions + t)
    lo = 0
    hi = count_rows(t, b, position, B, row_lens_1, K_1, M_1, span_1, KIND_1, BS_1)
    owner = tl.minimum(b, B - 1).to(tl.int64)
    if SPLIT:
        run = tl.cdiv(tl.cdiv(hi, BLOCK_N), X) * BLOCK_N
        run = tl.where(run_length > 0, run_length, run)
        lo = x * run
        hi = tl.minimum(hi, lo + run)
    heads = head_tile * BLOCK_H + tl.arange(0, BLOCK_H)
    mask_h = heads < H
    q_at = q + t64 * q_token + heads * q_head
    qk_scale = query_scales(qk_scale, q_scale, t64 * H + heads, mask_h, Q_SCALES)
    running_max, running_sum, acc_0, acc_1, acc_2, acc_3 = attend_groups(
        q_at, mask_h, lo, hi, position, 0, qk_scale, cache_1, page_1, row_1,
        rows_1 + t64 * rows_stride_1, table_1 + owner * table_stride_1, M_1, N_1, BS_1, ONE_BLOCK_1,
        KIND_1, False, ALIGNED, ASM, OFFSET, MAIN, ROPE, BLOCK_H, BLOCK_N, BLOCK_R, PRECISION,
        UNCHAINED, UPCAST, STAGES, HOIST, dtype,
    )  # fmt: skip
    any_valid, normalizer, row_lse = finish_softmax(running_max, running_sum)
    if SPLIT:
        row = (t64 * X + x) * H + heads
    else:
        row = t64 * H + heads
        if SINK:
            logit = tl.load(sink + heads, mask=mask_h, other=0.0).to(tl.float32)
            normalizer *= sink_factor(logit, row_lse, any_valid)
    tl.store(lse + row, row_lse, mask=mask_h)
    store_groups(out + row * C, mask_h, acc_0, acc_1, acc_2, acc_3, normalizer, MAIN)
