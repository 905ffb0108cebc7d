"""Attention over packed, expanded keys and values; mha_ragged and mha_masked.

Computes  s = scale * q @ k.T per head, over the keys that causality or a row's mask bits leave
          lse = log(sum(exp(s)));  out = exp(s - lse) @ v
          (specification: ops/mha_ragged.py, ops/mha_masked.py; numbers: backends/reference)
Grid      (T // BLOCK_M + B + 1, H): one program owns BLOCK_M queries of one request, one head.
          Tiles of request b are numbered from query_start_loc[b] // BLOCK_M + b on: enough numbers
          for any length, without the host knowing it. Request B is the rows that belong to none.
          The last tiles, the longest if causal, start first; a head's run side by side and share
          its keys in L2.
Reads     q [T, H, E], k [S, H, E], or [S, H, BLOCK_A] and k_pe [S, E - BLOCK_A], v [S, H, V],
          of e4m3 heads q_scale [T, H], k_scale [B, H], v_scale [B, H];
          query_start_loc [B+1], key_start_loc [B+1]; with bits mask [T, words] and, listed from
          it by _list_tiles_kernel, key tiles that have any
Writes    out [T, H, V], lse [T, H]
Limits    see why_not_mha()

E is cut into a power of two and the rest, so that 192 columns are 128 and 64. Full key tiles, which
all queries of a tile see, come first and are not masked; tiles at the edge come last. Keys past a
request's are zeros with a score of -inf: nothing of unused memory gets into a result.

With EIGHT, queries and keys are e4m3: scores are eight-bit products. Probabilities are 16 bits, and
so are values, decoded to fp16 where they are e4m3: on an H200, products of e4m3 probabilities gave
NaN with Triton 3.6 where interpreter and reference agree.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from openmla.backends.triton._primitives import (
    BOUNDS,
    LOG2E,
    decode_e4m3,
    dot,
    finish_softmax,
    finite_max,
    store_columns,
)

ALL, EDGE, BITS = (tl.constexpr(i) for i in range(3))  # which keys of a tile a query sees
WORD = tl.constexpr(32)  # bits of a mask word
SIGN_BIT = tl.constexpr(-2147483648)
MINUS_INF_BITS = tl.constexpr(-8388608)
# Integers that change from step to step, and pointers into slices: neither may recompile a kernel.
DO_NOT_SPECIALIZE = ("T", "B", "mask_token", "tiles_stride")
DO_NOT_SPECIALIZE_ON_ALIGNMENT = ("query_start_loc", "key_start_loc", "mask")


class Keys(NamedTuple):
    """A request's keys and values of one head, S of them; k_pe has the last columns of keys."""

    k: Any
    k_pe: Any
    v: Any
    S: Any


class Visible(NamedTuple):
    """Which keys each query sees: those up to its last, or those whose bits its mask row has, in
    the key tiles that are listed. Rows past the tile's last query are not valid."""

    last_key: Any
    mask_at: Any
    row_valid: Any
    tiles: Any


class State(NamedTuple):
    """An online softmax and the accumulator of the output."""

    running_max: Any
    running_sum: Any
    acc: Any


class Strides(NamedTuple):
    """Constants: from token to token, and of values from column to column."""

    K_TOKEN: Any
    PE_TOKEN: Any
    V_TOKEN: Any
    V_COLUMN: Any


class Shape(NamedTuple):
    """Constants: E columns of keys in one or two tiles, of BLOCK_A and BLOCK_B, and V of values in
    one of BLOCK_V; BLOCK_N keys of a tile."""

    E: Any
    V: Any
    BLOCK_N: Any
    BLOCK_A: Any
    BLOCK_B: Any
    BLOCK_V: Any


class Options(NamedTuple):
    """Constants: whether scores are eight-bit products, how others are multiplied, and how many
    tiles are in flight."""

    EIGHT: Any
    PRECISION: Any
    UPCAST: Any
    STAGES: Any


@triton.jit
def tile_owner(tile, query_start_loc, B, BLOCK_M: tl.constexpr):
    """The request that a tile of queries belongs to, B for rows past all of them."""
    bounds = tl.arange(0, BOUNDS)
    owner = 0
    for first in range(0, B, BOUNDS):
        b = first + bounds
        ends = tl.load(query_start_loc + 1 + b, mask=b < B, other=0)
        owner += tl.sum(((ends // BLOCK_M + b + 1 <= tile) & (b < B)).to(tl.int32), 0)
    return owner


@triton.jit
def find_queries(tile, query_start_loc, T, B, BLOCK_M: tl.constexpr):
    """A tile's request, the end of the request's query rows, and the tile's first."""
    b = tile_owner(tile, query_start_loc, B, BLOCK_M)
    begin = tl.load(query_start_loc + b)
    end = tl.where(b < B, tl.load(query_start_loc + tl.minimum(b + 1, B)), T)
    return b, end, begin + (tile - begin // BLOCK_M - b) * BLOCK_M


@triton.jit
def load_tile(
    at, stride, left, FIRST: tl.constexpr, USED: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Columns FIRST .. FIRST + USED - 1 of `left` rows, [ROWS, BLOCK], zero-padded; FULL if there
    are at least ROWS."""
    n = tl.arange(0, ROWS)
    c = tl.arange(0, BLOCK)
    pointers = at + (n.to(tl.int64) * stride)[:, None] + (FIRST + c)[None, :]
    if FULL and USED == BLOCK:
        tile = tl.load(pointers)
    elif FULL:
        tile = tl.load(pointers, mask=(c < USED)[None, :], other=0.0)
    elif USED == BLOCK:
        tile = tl.load(pointers, mask=(n < left)[:, None], other=0.0)
    else:
        tile = tl.load(pointers, mask=(n < left)[:, None] & (c < USED)[None, :], other=0.0)
    return tile


@triton.jit
def load_values(
    at, left, TOKEN: tl.constexpr, COLUMN: tl.constexpr, USED: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Values of `left` keys, [ROWS, BLOCK], zero-padded, of which either stride may be 1; a loop's
    loads of rows are in flight early, those of keys are not: their alignment is not known."""
    if COLUMN == 1:
        tile = load_tile(at, TOKEN, left, 0, USED, ROWS, BLOCK, FULL)
    else:
        n = tl.arange(0, ROWS)
        c = tl.arange(0, BLOCK)
        at += (n.to(tl.int64) * TOKEN)[:, None] + (c.to(tl.int64) * COLUMN)[None, :]
        tile = tl.load(at, mask=(n < left)[:, None] & (c < USED)[None, :], other=0.0)
    return tile


@triton.jit
def product_of(a, b, acc, UPCAST: tl.constexpr):
    """acc + a @ b of e4m3; in the interpreter of bytes, decoded."""
    if UPCAST:
        a = decode_e4m3(a, tl.float32, False)
        b = decode_e4m3(b, tl.float32, False)
        return tl.dot(a, b, acc, input_precision="ieee")
    return tl.dot(a, b, acc)


@triton.jit
def decoded(values, UPCAST: tl.constexpr):
    """e4m3 as fp16, exactly, in the interpreter bytes as float32; 16 bits as they are."""
    if values.dtype == tl.uint8:
        wide = decode_e4m3(values, tl.float32, False)
    elif values.dtype == tl.float8e4nv:
        wide = values.to(tl.float16)
    else:
        wide = values
    return wide


@triton.jit
def load_ceilings(mask_at, tile, left, row_valid, BLOCK_N: tl.constexpr, FULL: tl.constexpr):
    """+inf where a query's bit is set for a key of a tile, -inf elsewhere, [BLOCK_M, BLOCK_N]: the
    bit, moved to the sign of an infinity. A boolean mask would be packed and unpacked again."""
    WORDS: tl.constexpr = BLOCK_N // WORD
    w = tl.arange(0, WORDS)
    valid = row_valid[:, None]
    if not FULL:
        valid = valid & (w * WORD < left)[None, :]
    words = tl.load((mask_at + tile * WORDS)[:, None] + w[None, :], mask=valid, other=0)
    words = tl.broadcast_to(words[:, :, None], [words.shape[0], WORDS, WORD])
    words = tl.reshape(words, [words.shape[0], BLOCK_N])
    c = tl.arange(0, BLOCK_N)
    signs = (words << (31 - c % WORD)[None, :]) & SIGN_BIT
    ceilings = (signs ^ MINUS_INF_BITS).to(tl.float32, bitcast=True)
    if not FULL:
        ceilings = tl.where((c < left)[None, :], ceilings, float("-inf"))
    return ceilings


@triton.jit
def add_scores(q, keys, scores, OPTIONS: tl.constexpr):
    """scores + q @ keys.T"""
    if OPTIONS.EIGHT:
        scores = product_of(q, tl.trans(keys), scores, OPTIONS.UPCAST)
    else:
        scores = dot(q, tl.trans(keys), scores, OPTIONS.PRECISION, OPTIONS.UPCAST)
    return scores


@triton.jit
def attend(
    queries, qk_scale, state, keys, visible, first, last, SEEN: tl.constexpr, FULL: tl.constexpr,
    STRIDES: tl.constexpr, SHAPE: tl.constexpr, OPTIONS: tl.constexpr,
):  # fmt: skip
    """Accumulate key tiles first .. last-1 (with BITS, of those listed) into an online softmax."""
    q_a, q_b = queries
    running_max, running_sum, acc = state
    E: tl.constexpr = SHAPE.E
    V: tl.constexpr = SHAPE.V
    BLOCK_N: tl.constexpr = SHAPE.BLOCK_N
    BLOCK_A: tl.constexpr = SHAPE.BLOCK_A
    BLOCK_V: tl.constexpr = SHAPE.BLOCK_V
    TWO_TILES: tl.constexpr = E > BLOCK_A
    USED: tl.constexpr = BLOCK_A if TWO_TILES else E
    k_step = tl.full([], BLOCK_N, tl.int64) * STRIDES.K_TOKEN
    pe_step = tl.full([], BLOCK_N, tl.int64) * STRIDES.PE_TOKEN
    v_step = tl.full([], BLOCK_N, tl.int64) * STRIDES.V_TOKEN
    c = tl.arange(0, BLOCK_N)
    tile = first
    if SEEN == BITS:  # tile numbers are prefetched, so that loads of keys need not wait for them
        tile = tl.load(visible.tiles + first, mask=first < last, other=0)
    for i in tl.range(first, last, num_stages=OPTIONS.STAGES):
        left = keys.S - tile * BLOCK_N
        k_at = keys.k + tile * k_step
        k = load_tile(k_at, STRIDES.K_TOKEN, left, 0, USED, BLOCK_N, BLOCK_A, FULL)
        scores = tl.zeros([q_a.shape[0], BLOCK_N], tl.float32)
        scores = add_scores(q_a, k, scores, OPTIONS)
        if TWO_TILES:
            rest_at = keys.k_pe + tile * pe_step
            rest = load_tile(
                rest_at, STRIDES.PE_TOKEN, left, 0, E - BLOCK_A, BLOCK_N, SHAPE.BLOCK_B, FULL
            )
            scores = add_scores(q_b, rest, scores, OPTIONS)
        if SEEN == EDGE:
            seen = (tile * BLOCK_N + c)[None, :] <= visible.last_key[:, None]
            scores = tl.where(seen, scores, float("-inf"))
        if SEEN == BITS:
            ceilings = load_ceilings(visible.mask_at, tile, left, visible.row_valid, BLOCK_N, FULL)
            scores = tl.minimum(scores, ceilings)
        new_max = tl.maximum(running_max, tl.max(scores, 1) * qk_scale)
        safe_max = new_max
        if SEEN != ALL:
            safe_max = finite_max(new_max)
        rescale = tl.exp2(running_max - safe_max)
        if OPTIONS.EIGHT:
            probs = tl.exp2(scores * qk_scale[:, None] - safe_max[:, None])
            v_at = keys.v + tile * v_step
            stored = load_values(
                v_at, left, STRIDES.V_TOKEN, STRIDES.V_COLUMN, V, BLOCK_N, BLOCK_V, FULL
            )
            values = decoded(stored, OPTIONS.UPCAST)
        else:
            probs = tl.exp2(scores * qk_scale - safe_max[:, None])
            v_at = keys.v + tile * v_step
            values = load_tile(v_at, STRIDES.V_TOKEN, left, 0, V, BLOCK_N, BLOCK_V, FULL)
        running_sum = running_sum * rescale + tl.sum(probs, 1)
        if not OPTIONS.UPCAST:
            probs = probs.to(values.dtype)
        acc = dot(probs, values, acc * rescale[:, None], OPTIONS.PRECISION, OPTIONS.UPCAST)
        running_max = new_max
        tile = i + 1
        if SEEN == BITS:
            tile = tl.load(visible.tiles + i + 1, mask=i + 1 < last, other=0)
    return State(running_max, running_sum, acc)


@triton.jit(
    do_not_specialize=DO_NOT_SPECIALIZE,
    do_not_specialize_on_alignment=DO_NOT_SPECIALIZE_ON_ALIGNMENT,
)
def _mha_kernel(
    q, k, k_pe, v, q_scale, k_scale, v_scale, query_start_loc, key_start_loc,
    # with bits: rows of the mask, and the key tiles of each tile of queries
    mask, tiles, num_tiles,
    # results
    out, lse,
    T, B, qk_scale, q_token, q_head, k_head, v_head, scale_token, scale_head, mask_token,
    tiles_stride,
    # how keys and values lie; APART: k_pe is a tensor of its own
    K_TOKEN: tl.constexpr, PE_TOKEN: tl.constexpr, APART: tl.constexpr,
    V_TOKEN: tl.constexpr, V_COLUMN: tl.constexpr, EIGHT: tl.constexpr,
    # what is computed
    H: tl.constexpr, E: tl.constexpr, V: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr,
    # and how
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_B: tl.constexpr,
    BLOCK_V: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr, STAGES: tl.constexpr,
    dtype: tl.constexpr,
):  # fmt: skip
    STRIDES: tl.constexpr = Strides(K_TOKEN, PE_TOKEN, V_TOKEN, V_COLUMN)
    SHAPE: tl.constexpr = Shape(E, V, BLOCK_N, BLOCK_A, BLOCK_B, BLOCK_V)
    OPTIONS: tl.constexpr = Options(EIGHT, PRECISION, UPCAST, STAGES)
    number = tl.num_programs(0) - 1 - tl.program_id(0)
    h = tl.program_id(1).to(tl.int64)
    b, end, first = find_queries(number, query_start_loc, T, B, BLOCK_M)
    if first >= end:
        return
    m = tl.arange(0, BLOCK_M)
    row_valid = m < end - first
    first_key = tl.load(key_start_loc + b)
    S = tl.load(key_start_loc + tl.minimum(b + 1, B)) - first_key
    if not UPCAST:  # fp64 from a compiled graph; in the interpreter a Python float
        qk_scale = qk_scale.to(tl.float32)
    TWO_TILES: tl.constexpr = E > BLOCK_A
    USED: tl.constexpr = BLOCK_A if TWO_TILES else E
    REST: tl.constexpr = E - BLOCK_A if TWO_TILES else 0
    q_at = q + first.to(tl.int64) * q_token + h * q_head
    q_a = load_tile(q_at, q_token, end - first, 0, USED, BLOCK_M, BLOCK_A, False)
    q_b = load_tile(q_at, q_token, end - first, BLOCK_A, REST, BLOCK_M, BLOCK_B, False)
    if UPCAST and not EIGHT:
        q_a = q_a.to(tl.float32)
        q_b = q_b.to(tl.float32)
    qk_scale = qk_scale * LOG2E
    if EIGHT:  # of each row
        scale_at = q_scale + (first + m).to(tl.int64) * scale_token + h * scale_head
        row_scales = tl.load(scale_at, mask=row_valid, other=1.0)
        # rows past all requests have no scale and see no key
        qk_scale = row_scales * (tl.load(k_scale + b * H + h, mask=b < B, other=1.0) * qk_scale)
    k += first_key.to(tl.int64) * K_TOKEN + h * k_head
    if APART:
        k_pe += first_key.to(tl.int64) * PE_TOKEN
    else:  # the last columns of k
        k_pe = k + BLOCK_A
    v += first_key.to(tl.int64) * V_TOKEN + h * v_head
    state = State(
        tl.full([BLOCK_M], float("-inf"), tl.float32),
        tl.zeros([BLOCK_M], tl.float32),
        tl.zeros([BLOCK_M, BLOCK_V], tl.float32),
    )
    mask_at = mask + (first + m).to(tl.int64) * mask_token
    last_key = m * 0 + (S - 1)
    # full tiles: all of their keys exist and, without bits, every query sees them
    if MASKED:
        tiles += number.to(tl.int64) * tiles_stride
        count = tl.load(num_tiles + number)
        last_tile = tl.load(tiles + count - 1, mask=count > 0, other=-1)
        num_full = tl.where(last_tile < S // BLOCK_N, count, count - 1)
    elif CAUSAL:
        last_key = S - end + first + m  # the request's last query sees its last key
        num_full = tl.minimum(tl.maximum(S - end + first + 1, 0), S) // BLOCK_N
        count = tl.cdiv(tl.maximum(tl.minimum(S - end + first + BLOCK_M, S), 0), BLOCK_N)
    else:
        num_full = S // BLOCK_N
        count = tl.cdiv(S, BLOCK_N)
    queries = (q_a, q_b)
    keys = Keys(k, k_pe, v, S)
    visible = Visible(last_key, mask_at, row_valid, tiles)
    state = attend(
        queries, qk_scale, state, keys, visible, 0, num_full, BITS if MASKED else ALL, True,
        STRIDES, SHAPE, OPTIONS,
    )  # fmt: skip
    state = attend(
        queries, qk_scale, state, keys, visible, num_full, count, BITS if MASKED else EDGE, False,
        STRIDES, SHAPE, OPTIONS,
    )  # fmt: skip
    _, normalizer, row_lse = finish_softmax(state.running_max, state.running_sum)
    if EIGHT:
        normalizer *= tl.load(v_scale + b * H + h, mask=b < B, other=1.0)
    row = (first + m).to(tl.int64) * H + h
    tl.store(lse + row, row_lse, mask=row_valid)
    values = (state.acc * normalizer[:, None]).to(out.dtype.element_ty)
    store_columns(out + row * V, row_valid, values, 0, V, BLOCK_V)


@triton.jit(
    do_not_specialize=DO_NOT_SPECIALIZE,
    do_not_specialize_on_alignment=DO_NOT_SPECIALIZE_ON_ALIGNMENT,
)
def _list_tiles_kernel(
    mask, query_start_loc, key_start_loc, tiles, num_tiles, T, B, mask_token, tiles_stride,
    BLOCK_M: tl.constexpr, BLOCK_T: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """List, for one tile of queries, the key tiles of WORDS mask words that have any bit set."""
    number = tl.program_id(0)
    b, end, first = find_queries(number, query_start_loc, T, B, BLOCK_M)
    S = tl.load(key_start_loc + tl.minimum(b + 1, B)) - tl.load(key_start_loc + b)
    words = tl.where(first < end, (S + WORD - 1) // WORD, 0)
    m = tl.arange(0, BLOCK_M)
    t = tl.arange(0, BLOCK_T)
    w = tl.arange(0, BLOCK_T * WORDS)
    mask_at = mask + (first + m).to(tl.int64) * mask_token
    tiles += number.to(tl.int64) * tiles_stride
    count = 0
    for start in range(0, tl.cdiv(words, WORDS), BLOCK_T):
        valid = (m < end - first)[:, None] & (start * WORDS + w < words)[None, :]
        bits = tl.load(mask_at[:, None] + (start * WORDS + w)[None, :], mask=valid, other=0)
        any_set = tl.max((bits != 0).to(tl.int32), 0)
        any_set = tl.max(tl.reshape(any_set, [BLOCK_T, WORDS]), 1)
        rank = count + tl.cumsum(any_set, 0) - 1
        tl.store(tiles + rank, start + t, mask=any_set > 0)
        count += tl.sum(any_set, 0)
    tl.store(num_tiles + number, count)
