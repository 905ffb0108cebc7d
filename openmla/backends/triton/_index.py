"""Indexer scores of a tile of keys for a few tokens; index_logits, index_select and the ragged one.

Keys are the rows of a product and (token, head) its columns, so that most of the sum over heads
stays inside one thread. A key affects only its own column of the logits: keys that no token may
see, NaN or not, are overwritten with -inf, so loads of keys may read any valid address instead of
being masked.
"""

import triton
import triton.language as tl

from openmla.backends.triton._primitives import PLAIN, decode_e4m3, dot, load_float32


@triton.jit
def load_queries(
    q, t, T, q_token, q_head, HEAD_CHUNK: tl.constexpr, FIRST: tl.constexpr, USED: tl.constexpr,
    HI: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
    ASM: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Columns FIRST .. FIRST + USED - 1 of a chunk of heads of the tokens from t on, [BLOCK_D,
    BLOCK_Q * BLOCK_H], zero-padded. Transposed here, before the loop over keys: inside it, Triton
    3.9 would keep queries in registers and store them to shared memory in every iteration."""
    row = tl.arange(0, BLOCK_Q * BLOCK_H)
    d = tl.arange(0, BLOCK_D)
    token = t + row // BLOCK_H
    head = HEAD_CHUNK * BLOCK_H + row % BLOCK_H
    at = q + token.to(tl.int64) * q_token + head * q_head + FIRST
    mask = ((token < T) & (head < HI))[:, None] & (d < USED)[None, :]
    tile = tl.load(at[:, None] + d[None, :], mask=mask, other=0.0)
    if tile.dtype == tl.uint8:
        tile = decode_e4m3(tile, dtype, ASM)
    return tl.trans(tile.to(dtype))


@triton.jit
def load_weights(
    w, t, T, w_token, HEAD_CHUNK: tl.constexpr, HI: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Weights of the same heads, [BLOCK_Q * BLOCK_H]."""
    row = tl.arange(0, BLOCK_Q * BLOCK_H)
    token = t + row // BLOCK_H
    head = HEAD_CHUNK * BLOCK_H + row % BLOCK_H
    at = w + token.to(tl.int64) * w_token + head
    return tl.load(at, mask=(token < T) & (head < HI), other=0.0)


@triton.jit
def load_keys(
    at, FIRST: tl.constexpr, USED: tl.constexpr, BLOCK_D: tl.constexpr, ASM: tl.constexpr,
    dtype: tl.constexpr,
):  # fmt: skip
    """Columns FIRST .. FIRST + USED - 1 of the keys at `at`, [BLOCK_N, BLOCK_D]."""
    d = tl.arange(0, BLOCK_D)
    if USED < BLOCK_D:
        tile = tl.load(at[:, None] + (FIRST + d)[None, :], mask=(d < USED)[None, :], other=0.0)
    else:
        tile = tl.load(at[:, None] + (FIRST + d)[None, :])
    if tile.dtype == tl.uint8:
        tile = decode_e4m3(tile, dtype, ASM)
    return tile.to(dtype)


@triton.jit
def add_heads(products, weights, BLOCK_Q: tl.constexpr, BLOCK_H: tl.constexpr):
    """Sum over heads of weight * relu(product), [BLOCK_N, BLOCK_Q]; NaN stays NaN."""
    weighted = tl.maximum(products, 0.0, propagate_nan=tl.PropagateNan.ALL) * weights[None, :]
    return tl.sum(tl.reshape(weighted, [products.shape[0], BLOCK_Q, BLOCK_H]), 2)


@triton.jit
def multiply(keys, queries, PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    """[BLOCK_N, BLOCK_Q * BLOCK_H] dot products, in float32."""
    zero = tl.zeros([keys.shape[0], queries.shape[1]], tl.float32)
    return dot(keys, queries, zero, PRECISION, UPCAST)


@triton.jit
def fill_columns(
    out, t, T, begin, end, width, BLOCK_Q: tl.constexpr, FILL: tl.constexpr
):  # fmt: skip
    """-inf into columns begin[i] .. end-1 of the rows t [BLOCK_Q] of out."""
    WIDE: tl.constexpr = FILL // BLOCK_Q
    row = out + t.to(tl.int64) * width
    empty = tl.full([BLOCK_Q, WIDE], float("-inf"), tl.float32)
    for start in range(tl.min(begin, 0), end, WIDE):
        j = start + tl.arange(0, WIDE)
        mask = (t < T)[:, None] & (j[None, :] >= begin[:, None]) & (j < end)[None, :]
        tl.store(row[:, None] + j[None, :], empty, mask=mask)


@triton.jit
def score_keys(
    keys_at, scales, offset, q, q_first, q_token, q_head, w, w_first, w_token, first, T,
    HI: tl.constexpr, DI: tl.constexpr, SLICE: tl.constexpr, SCALES: tl.constexpr,
    ALIGNED: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr, HOLD: tl.constexpr, ASM: tl.constexpr, UPCAST: tl.constexpr,
    dtype: tl.constexpr,
):  # fmt: skip
    """Scores of the keys at keys_at for the tokens from `first` on, [BLOCK_N, BLOCK_Q]: heads in
    chunks of BLOCK_H, columns in slices, the first of both at hand as q_first and w_first. Several
    scales of a key are applied here, to products; one alone is the caller's."""
    HEAD_CHUNKS: tl.constexpr = (HI + BLOCK_H - 1) // BLOCK_H
    SLICES: tl.constexpr = DI // SLICE
    for c in tl.static_range(HEAD_CHUNKS):
        for i in tl.static_range(SLICES):
            if c == 0 and i == 0:
                queries = q_first
            else:
                queries = load_queries(
                    q, first, T, q_token, q_head, c, i * SLICE, SLICE, HI, BLOCK_Q, BLOCK_H,
                    BLOCK_D, ASM, dtype,
                )  # fmt: skip
            keys = load_keys(keys_at, i * SLICE, SLICE, BLOCK_D, ASM, dtype)
            part = multiply(keys, queries, PRECISION, UPCAST)
            if SCALES > 1:
                n = offset * SCALES + i * SCALES // SLICES
                part = part * load_float32(scales, n, None, ALIGNED)[:, None]
            if i == 0:
                products = part
            else:
                products += part
        if c == 0 and HOLD:
            weights = w_first
        else:
            weights = load_weights(w, first, T, w_token, c, HI, BLOCK_Q, BLOCK_H)
        summed = add_heads(products, weights, BLOCK_Q, BLOCK_H)
        if c == 0:
            scores = summed
        else:
            scores += summed
    return scores


@triton.jit
def score_paged_keys(
    cache, blocks, start, j, stop, N, page, row_stride, q, q_first, q_token, q_head, w, w_first,
    w_token, first, T,
    HI: tl.constexpr, DI: tl.constexpr, BS: tl.constexpr, FORMAT: tl.constexpr,
    SLICE: tl.constexpr, SCALES: tl.constexpr, ALIGNED: tl.constexpr, ONE_BLOCK: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr, HOLD: tl.constexpr, ASM: tl.constexpr, UPCAST: tl.constexpr,
    dtype: tl.constexpr,
):  # fmt: skip
    """The same for keys j = start, start + 1, ... of one request; arbitrary from `stop` on."""
    if ONE_BLOCK:  # looked up once
        block = tl.load(blocks + start // BS)
        offset = start % BS + tl.arange(0, BLOCK_N)
    else:
        block = tl.load(blocks + j // BS, mask=j < stop, other=0)
        offset = j % BS
    block = tl.where((block >= 0) & (block < N), block, 0)
    values = cache + block.to(tl.int64) * page
    scales = values + BS * DI
    if FORMAT == PLAIN:
        keys_at = values + offset.to(tl.int64) * row_stride
    else:
        keys_at = values + offset * DI
    scores = score_keys(
        keys_at, scales, offset, q, q_first, q_token, q_head, w, w_first, w_token, first, T, HI, DI,
        SLICE, SCALES, ALIGNED, BLOCK_Q, BLOCK_H, BLOCK_D, PRECISION, HOLD, ASM, UPCAST, dtype,
    )  # fmt: skip
    if FORMAT != PLAIN and SCALES == 1:  # scales are not negative, so they commute with relu
        scores *= load_float32(scales, offset, None, ALIGNED)[:, None]
    return scores
