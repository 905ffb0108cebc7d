"""Indexer scores of a tile of keys for a few tokens; index_logits, index_select and the ragged one.

Keys are the rows of a product and (token, head) its columns, so that most of the sum over heads
stays inside one thread. A key affects only its own column of the logits: keys that no token may
see, NaN or not, are overwritten with -inf, so loads of keys may read any valid address instead of
being masked.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from openmla.backends.triton._primitives import PLAIN, decode_e4m3, dot, load_float32


class Queries(NamedTuple):
    """Queries and weights of T tokens; a program's own are those from `first` on."""

    q: Any
    q_token: Any
    q_head: Any
    w: Any
    w_token: Any
    first: Any
    T: Any


class Chunk(NamedTuple):
    """Queries and weights of a chunk of heads, loaded."""

    q: Any
    w: Any


class Pages(NamedTuple):
    """A cache of N pages, `page` numbers apart, and a request's row of the block table."""

    cache: Any
    N: Any
    page: Any
    row_stride: Any
    blocks: Any


class Stored(NamedTuple):
    """Constants: how a paged cache stores keys, and whether a tile of BLOCK_N lies in one block."""

    BS: Any
    FORMAT: Any
    ONE_BLOCK: Any
    BLOCK_N: Any


class Scoring(NamedTuple):
    """Constants: HI heads of DI columns, these in slices; SCALES of a key; tiles; products. With
    HOLD weights of the first heads stay in registers."""

    HI: Any
    DI: Any
    SLICE: Any
    SCALES: Any
    ALIGNED: Any
    BLOCK_Q: Any
    BLOCK_H: Any
    BLOCK_D: Any
    PRECISION: Any
    HOLD: Any
    ASM: Any
    UPCAST: Any
    dtype: Any


@triton.jit
def load_queries(queries, HEAD_CHUNK: tl.constexpr, FIRST: tl.constexpr, SCORING: tl.constexpr):
    """Columns FIRST .. FIRST + SLICE - 1 of a chunk of heads of the program's tokens, [BLOCK_D,
    BLOCK_Q * BLOCK_H], zero-padded. Transposed here, before the loop over keys: inside it, Triton
    3.9 would keep queries in registers and store them to shared memory in every iteration."""
    BLOCK_H: tl.constexpr = SCORING.BLOCK_H
    row = tl.arange(0, SCORING.BLOCK_Q * BLOCK_H)
    d = tl.arange(0, SCORING.BLOCK_D)
    token = queries.first + row // BLOCK_H
    head = HEAD_CHUNK * BLOCK_H + row % BLOCK_H
    at = queries.q + token.to(tl.int64) * queries.q_token + head * queries.q_head + FIRST
    mask = ((token < queries.T) & (head < SCORING.HI))[:, None] & (d < SCORING.SLICE)[None, :]
    tile = tl.load(at[:, None] + d[None, :], mask=mask, other=0.0)
    if tile.dtype == tl.uint8:
        tile = decode_e4m3(tile, SCORING.dtype, SCORING.ASM)
    return tl.trans(tile.to(SCORING.dtype))


@triton.jit
def load_weights(queries, HEAD_CHUNK: tl.constexpr, SCORING: tl.constexpr):
    """Weights of the same heads, [BLOCK_Q * BLOCK_H]."""
    BLOCK_H: tl.constexpr = SCORING.BLOCK_H
    row = tl.arange(0, SCORING.BLOCK_Q * BLOCK_H)
    token = queries.first + row // BLOCK_H
    head = HEAD_CHUNK * BLOCK_H + row % BLOCK_H
    at = queries.w + token.to(tl.int64) * queries.w_token + head
    return tl.load(at, mask=(token < queries.T) & (head < SCORING.HI), other=0.0)


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
def score_keys(keys_at, scales, offset, queries, chunk, SCORING: tl.constexpr):
    """Scores of the keys at keys_at for the program's tokens, [BLOCK_N, BLOCK_Q]: heads in chunks
    of BLOCK_H, columns in slices, the first of both at hand. Several scales of a key are applied
    here, to products; one alone is the caller's."""
    BLOCK_H: tl.constexpr = SCORING.BLOCK_H
    SLICE: tl.constexpr = SCORING.SLICE
    SCALES: tl.constexpr = SCORING.SCALES
    HEAD_CHUNKS: tl.constexpr = (SCORING.HI + BLOCK_H - 1) // BLOCK_H
    SLICES: tl.constexpr = SCORING.DI // SLICE
    for c in tl.static_range(HEAD_CHUNKS):
        for i in tl.static_range(SLICES):
            if c == 0 and i == 0:
                q = chunk.q
            else:
                q = load_queries(queries, c, i * SLICE, SCORING)
            keys = load_keys(keys_at, i * SLICE, SLICE, SCORING.BLOCK_D, SCORING.ASM, SCORING.dtype)
            part = multiply(keys, q, SCORING.PRECISION, SCORING.UPCAST)
            if SCALES > 1:
                n = offset * SCALES + i * SCALES // SLICES
                part = part * load_float32(scales, n, None, SCORING.ALIGNED)[:, None]
            if i == 0:
                products = part
            else:
                products += part
        if c == 0 and SCORING.HOLD:
            weights = chunk.w
        else:
            weights = load_weights(queries, c, SCORING)
        summed = add_heads(products, weights, SCORING.BLOCK_Q, BLOCK_H)
        if c == 0:
            scores = summed
        else:
            scores += summed
    return scores


@triton.jit
def score_paged_keys(
    pages, start, j, stop, queries, chunk, STORED: tl.constexpr, SCORING: tl.constexpr
):
    """The same for keys j = start, start + 1, ... of one request; arbitrary from `stop` on."""
    BS: tl.constexpr = STORED.BS
    DI: tl.constexpr = SCORING.DI
    if STORED.ONE_BLOCK:  # looked up once
        block = tl.load(pages.blocks + start // BS)
        offset = start % BS + tl.arange(0, STORED.BLOCK_N)
    else:
        block = tl.load(pages.blocks + j // BS, mask=j < stop, other=0)
        offset = j % BS
    block = tl.where((block >= 0) & (block < pages.N), block, 0)
    values = pages.cache + block.to(tl.int64) * pages.page
    scales = values + BS * DI
    if STORED.FORMAT == PLAIN:
        keys_at = values + offset.to(tl.int64) * pages.row_stride
    else:
        keys_at = values + offset * DI
    scores = score_keys(keys_at, scales, offset, queries, chunk, SCORING)
    if STORED.FORMAT != PLAIN and SCORING.SCALES == 1:  # not negative: they commute with relu
        scores *= load_float32(scales, offset, None, SCORING.ALIGNED)[:, None]
    return scores
