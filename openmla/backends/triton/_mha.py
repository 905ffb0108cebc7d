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
def attend(
    q_a, q_b, running_max, running_sum, acc, first, last, qk_scale, k, k_pe, v, S,
    last_key, mask_at, row_valid, tiles, K_TOKEN: tl.constexpr, PE_TOKEN: tl.constexpr,
    V_TOKEN: tl.constexpr, V_COLUMN: tl.constexpr, KEYS: tl.constexpr, EIGHT: tl.constexpr,
    FULL: tl.constexpr, E: tl.constexpr, V: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_A: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
    UPCAST: tl.constexpr, STAGES: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Accumulate key tiles first .. last-1 (with BITS, of those listed) into an online softmax."""
    TWO_TILES: tl.constexpr = E > BLOCK_A
    USED: tl.constexpr = BLOCK_A if TWO_TILES else E
    k_step = tl.full([], BLOCK_N, tl.int64) * K_TOKEN
    pe_step = tl.full([], BLOCK_N, tl.int64) * PE_TOKEN
    v_step = tl.full([], BLOCK_N, tl.int64) * V_TOKEN
    c = tl.arange(0, BLOCK_N)
    tile = first
    if KEYS == BITS:  # tile numbers are prefetched, so that loads of keys need not wait for them
        tile = tl.load(tiles + first, mask=first < last, other=0)
    for i in tl.range(first, last, num_stages=STAGES):
        left = S - tile * BLOCK_N
        k_at = k + tile * k_step
        keys = load_tile(k_at, K_TOKEN, left, 0, USED, BLOCK_N, BLOCK_A, FULL)
        scores = tl.zeros([q_a.shape[0], BLOCK_N], tl.float32)
        if EIGHT:
            scores = product_of(q_a, tl.trans(keys), scores, UPCAST)
        else:
            scores = dot(q_a, tl.trans(keys), scores, PRECISION, UPCAST)
        if TWO_TILES:
            pe_at = k_pe + tile * pe_step
            rest = load_tile(pe_at, PE_TOKEN, left, 0, E - BLOCK_A, BLOCK_N, BLOCK_B, FULL)
            if EIGHT:
                scores = product_of(q_b, tl.trans(rest), scores, UPCAST)
            else:
                scores = dot(q_b, tl.trans(rest), scores, PRECISION, UPCAST)
        if KEYS == EDGE:
            visible = (tile * BLOCK_N + c)[None, :] <= last_key[:, None]
            scores = tl.where(visible, scores, float("-inf"))
        if KEYS == BITS:
            ceilings = load_ceilings(mask_at, tile, left, row_valid, BLOCK_N, FULL)
            scores = tl.minimum(scores, ceilings)
        new_max = tl.maximum(running_max, tl.max(scores, 1) * qk_scale)
        safe_max = new_max
        if KEYS != ALL:
            safe_max = finite_max(new_max)
        rescale = tl.exp2(running_max - safe_max)
        if EIGHT:
            weights = tl.exp2(scores * qk_scale[:, None] - safe_max[:, None])
            v_at = v + tile * v_step
            stored = load_values(v_at, left, V_TOKEN, V_COLUMN, V, BLOCK_N, BLOCK_V, FULL)
            values = decoded(stored, UPCAST)
        else:
            weights = tl.exp2(scores * qk_scale - safe_max[:, None])
            values = load_tile(v + tile * v_step, V_TOKEN, left, 0, V, BLOCK_N, BLOCK_V, FULL)
        running_sum = running_sum * rescale + tl.sum(weights, 1)
        if not UPCAST:
            weights = weights.to(values.dtype)
        acc = dot(weights, values, acc * rescale[:, None], PRECISION, UPCAST)
        running_max = new_max
        tile = i + 1
        if KEYS == BITS:
            tile = tl.load(tiles + i + 1, mask=i + 1 < last, other=0)
    return running_max, running_sum, acc


@triton.jit(
    do_not_specialize=DO_NOT_SPECIALIZE,
    do_not_specialize_on_alignment=DO_NOT_SPECIALIZE_ON_ALIGNMENT,
)
def _mha_kernel(
    q, k, k_pe, v, q_scale, k_scale, v_scale, query_start_loc, key_start_loc, mask, tiles,
    num_tiles, out, lse, T, B, qk_scale, q_token, q_head, k_head, v_head, scale_token, scale_head,
    mask_token, tiles_stride, K_TOKEN: tl.constexpr, PE_TOKEN: tl.constexpr, APART: tl.constexpr,
    V_TOKEN: tl.constexpr, V_COLUMN: tl.constexpr, EIGHT: tl.constexpr,
    H: tl.constexpr, E: tl.constexpr, V: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_B: tl.constexpr,
    BLOCK_V: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr, STAGES: tl.constexpr,
    dtype: tl.constexpr,
):  # fmt: skip
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
    running_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    running_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
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
    running_max, running_sum, acc = attend(
        q_a, q_b, running_max, running_sum, acc, 0, num_full, qk_scale, k, k_pe, v, S,
        last_key, mask_at, row_valid, tiles, K_TOKEN, PE_TOKEN, V_TOKEN, V_COLUMN,
        BITS if MASKED else ALL, EIGHT, True, E, V, BLOCK_N, BLOCK_A, BLOCK_B, BLOCK_V,
        PRECISION, UPCAST, STAGES, dtype,
    )  # fmt: skip
    running_max, running_sum, acc = attend(
        q_a, q_b, running_max, running_sum, acc, num_full, count, qk_scale, k, k_pe, v,
        S, last_key, mask_at, row_valid, tiles, K_TOKEN, PE_TOKEN, V_TOKEN, V_COLUMN,
        BITS if MASKED else EDGE, EIGHT, False, E, V, BLOCK_N, BLOCK_A, BLOCK_B, BLOCK_V,
        PRECISION, UPCAST, STAGES, dtype,
    )  # fmt: skip
    _, normalizer, row_lse = finish_softmax(running_max, running_sum)
    if EIGHT:
        normalizer *= tl.load(v_scale + b * H + h, mask=b < B, other=1.0)
    row = (first + m).to(tl.int64) * H + h
    tl.store(lse + row, row_lse, mask=row_valid)
    values = (acc * normalizer[:, None]).to(out.dtype.element_ty)
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
