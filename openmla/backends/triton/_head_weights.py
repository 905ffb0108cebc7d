"""A tile of tokens times one head's weights: device code and tiles that the projecting ops share.

Weights are read as they lie, contiguous along rows or columns, and e4m3 becomes x's dtype in
registers, exactly. Where rows of several blocks meet, each block's sum is scaled before it is
added; where all rows share a scale, the finished sum is.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from openmla.backends import Problem
from openmla.backends.triton._build import assembly, cdiv, interpreted, next_power_of_2
from openmla.backends.triton._prepare import Piece
from openmla.backends.triton._primitives import decode_e4m3, dot

PRODUCTS = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
E4M3 = torch.float8_e4m3fn
LEAST_ROWS = 16  # of a product
FEW_TOKENS, FEW_OF_FIXED = 16, 64  # one tile of them: what is left to do is reading weights
ROOM = 64 << 10  # bytes of shared memory that every target has
PROGRAMS = 128  # of one tile of tokens, about one a multiprocessor, where heads are few
WIDE_ROOM = 200 << 10  # from SM90 on: elsewhere sums of 128 x 256 spill, on SM100 in float32
ENOUGH_PROGRAMS = 96  # with up to 8 loads in flight each


class Config(NamedTuple):
    block_m: int  # tokens
    block_n: int  # columns
    block_k: int  # rows
    num_warps: int
    num_stages: int


@lru_cache(maxsize=1024)
def config_of(
    dtype: torch.dtype, few: bool, H: int, K: int, N: int, KB: int, *, eight_bits: bool,
    least_n: int = 16, room: int = ROOM,
) -> Config:  # fmt: skip
    """The tile: for few tokens as narrow as it takes to have all multiprocessors read weights, but
    no narrower than least_n; as many loads in flight as shared memory has room for. Of the rows
    that share a scale it takes a part that divides them, where there is one: one number of tokens
    has one order of sums, however wide the tile."""
    wide = dtype == torch.float32
    block_m = FEW_TOKENS if few or wide else 64
    block = K // KB
    part = block & -block
    if part < LEAST_ROWS:  # of all rows: the last tile is not full
        part = next_power_of_2(block)
    block_k = max(min(part, 16 if wide else 128 if few and eight_bits else 64), LEAST_ROWS)
    block_n = min(max(next_power_of_2(N), 16), 64 if few or wide else 128)
    least_n, tiles = max(least_n, 16 if few else 32), 1 if few else 2
    while block_n > least_n and tiles * H * cdiv(N, block_n) < PROGRAMS:
        block_n //= 2
    block_n = max(block_n, least_n)
    warps, stages = 2 if block_n == 16 else 4, 3
    if eight_bits:
        stages = 4 if block_n == 16 else 3
    elif not wide:
        tile_bytes = 2 * block_k * (block_m + block_n)
        most = 8 if few else 4 if block_n == 128 else 5
        if few and block_n == 128 and K % 128 == 0 and room >= 8 * tile_bytes:
            block_k, tile_bytes, most = 128, 2 * tile_bytes, 4
        stages = max(min(most, room // tile_bytes, cdiv(K, block_k)), 3)
        warps = 8 if block_m == 64 and block_n == 128 and stages > 3 else warps
    return Config(block_m, block_n, block_k, warps, stages)


@lru_cache(maxsize=1024)
def fixed_config(
    dtype: torch.dtype, few: bool, H: int, K: int, N: int, KB: int, *, eight_bits: bool, room: int,
    float32_out: bool = False,
) -> Config:  # fmt: skip
    """Tiles for a product whose bits must not depend on how many tokens there are: however many,
    the same instruction (64 tokens are WGMMA's least) sums the same rows in the same order. What
    may differ is how wide a tile is, narrow for few tokens, so that all multiprocessors read
    weights, and how many loads are in flight in `room`. `float32_out`: of 16-bit inputs."""
    config = config_of(dtype, False, H, K, N, KB, eight_bits=eight_bits)
    if dtype == torch.float32:
        return config
    block_k, block_n = config.block_k, min(max(next_power_of_2(N), 16), 128)
    if not few and H == 1 and block_n == 128:
        wide = N >= 256 and room >= WIDE_ROOM and not float32_out
        return Config(128, 256 if wide else 128, block_k, 8, 3)
    if few and H == 1:
        block_n = min(block_n, 64)
    while few and block_n > 16 and H * cdiv(N, block_n) < ENOUGH_PROGRAMS:
        block_n //= 2
    room, most = (ROOM, 5) if eight_bits or not few else (room, 8)
    stages = max(min(most, room // (2 * block_k * (64 + block_n)), cdiv(K, block_k)), 3)
    return Config(64, block_n, block_k, 4, stages)


def why_not_weights(problem: Problem) -> str | None:
    if problem.dtype not in PRODUCTS:
        return f"takes 16- and 32-bit activations, these are {problem.dtype}"
    if problem.BS % LEAST_ROWS and max(problem.C, problem.E) > problem.BS:
        return f"takes scales of {LEAST_ROWS} rows or multiples, these are of {problem.BS}"
    return None


class Weights(NamedTuple):
    """A weight [H, K, N] as a kernel takes it."""

    pointers: tuple[Any, ...]  # w, w_scale
    strides: tuple[int, ...]  # w_head, w_line, scale_head, scale_k, scale_n


def weights_of(w: Tensor, w_scale: Tensor | None) -> Weights:
    line = w.stride(1) if w.stride(2) == 1 else w.stride(2)
    if w_scale is None:
        return Weights((w, w), (w.stride(0), line, 0, 0, 0))
    return Weights((Piece(w, 0, torch.uint8), w_scale), (w.stride(0), line, *w_scale.stride()))


def weight_constants(
    dtype: torch.dtype, K: int, N: int, KB: int, NB: int, *, eight_bits: bool, by_columns: bool
) -> dict[str, Any]:
    """`by_columns`: contiguous along columns, as w_uk is; else along rows."""
    return {
        "K": K,
        "N": N,
        "SCALED_K": K // KB,
        "SCALED_N": N // NB,
        "EIGHT_BITS": eight_bits,
        "BY_COLUMNS": by_columns,
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
        "ASM": assembly(),
        "UPCAST": interpreted(),
    }


def tile_constants(config: Config) -> dict[str, int]:
    return {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k}


class HeadWeights(NamedTuple):
    """One head's weights and scales in device code."""

    w: Any
    w_scale: Any
    line: Any
    scale_k: Any
    scale_n: Any


class Product(NamedTuple):
    """Constants of the product: those of weight_constants(), the tile, and whether tokens past the
    end are masked."""

    K: Any
    N: Any
    SCALED_K: Any
    SCALED_N: Any
    EIGHT_BITS: Any
    BY_COLUMNS: Any
    PRECISION: Any
    ASM: Any
    UPCAST: Any
    MASKED: Any
    BLOCK_M: Any
    BLOCK_N: Any
    BLOCK_K: Any


@triton.jit
def load_weights(weights, k, n, dtype: tl.constexpr, PRODUCT: tl.constexpr):
    """Rows k and columns n of one head's weights in x's dtype, [BLOCK_K, BLOCK_N], unscaled."""
    K: tl.constexpr = PRODUCT.K
    N: tl.constexpr = PRODUCT.N
    if PRODUCT.BY_COLUMNS:
        at = weights.w + k.to(tl.int64)[:, None] * weights.line + n[None, :]
    else:
        at = weights.w + k[:, None] + n.to(tl.int64)[None, :] * weights.line
    if K % PRODUCT.BLOCK_K == 0 and N % PRODUCT.BLOCK_N == 0:
        stored = tl.load(at)
    else:
        stored = tl.load(at, mask=(k < K)[:, None] & (n < N)[None, :], other=0)
    if PRODUCT.EIGHT_BITS:
        stored = decode_e4m3(stored, dtype, PRODUCT.ASM)
        if PRODUCT.ASM and (PRODUCT.BY_COLUMNS or dtype == tl.float32):
            stored = settle(stored)
    return stored


@triton.jit
def settle(values):
    """Values as they are, computed before they change places between threads: the compiler would
    rather move bytes, one by one where a product's rows are not contiguous; and Triton 3.6 cannot
    place bytes for a product of float64."""
    PACK: tl.constexpr = 32 // values.dtype.primitive_bitwidth
    return tl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [values], dtype=values.dtype, is_pure=False, pack=PACK
    )


@triton.jit
def project_tile(x, x_token_at, mask_m, weights, n, PRODUCT: tl.constexpr):
    """Tokens at x + x_token_at [BLOCK_M], all of which can be read, times columns n of a head:
    float32 [BLOCK_M, BLOCK_N]. x and weights are the head's own. With MASKED only tokens of mask_m
    are read."""
    K: tl.constexpr = PRODUCT.K
    N: tl.constexpr = PRODUCT.N
    BLOCK_M: tl.constexpr = PRODUCT.BLOCK_M
    BLOCK_N: tl.constexpr = PRODUCT.BLOCK_N
    BLOCK_K: tl.constexpr = PRODUCT.BLOCK_K
    PRECISION: tl.constexpr = PRODUCT.PRECISION
    dtype: tl.constexpr = x.dtype.element_ty
    scales_at = weights.w_scale + (n // PRODUCT.SCALED_N) * weights.scale_n
    # float32 is summed in float64: no order of sums has more bits to lose than another
    sums: tl.constexpr = tl.float64 if PRECISION == "ieee" else tl.float32
    acc = tl.zeros([BLOCK_M, BLOCK_N], sums)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        w = load_weights(weights, k, n, dtype, PRODUCT)
        at = x + x_token_at[:, None] + k[None, :]
        if PRODUCT.MASKED:
            tokens = tl.load(at, mask=mask_m[:, None] & (k < K)[None, :], other=0.0)
        elif K % BLOCK_K == 0:
            tokens = tl.load(at)
        else:
            tokens = tl.load(at, mask=(k < K)[None, :], other=0.0)
        if PRODUCT.EIGHT_BITS and PRODUCT.SCALED_K < K:
            mask_n = n < N
            row_at = scales_at + (start // PRODUCT.SCALED_K) * weights.scale_k
            scales = tl.load(row_at, mask=mask_n, other=0.0)
            part = tl.zeros([BLOCK_M, BLOCK_N], sums)
            part = multiply(tokens, w, part, PRECISION, PRODUCT.UPCAST)
            acc += part * scales[None, :].to(sums)
        else:
            acc = multiply(tokens, w, acc, PRECISION, PRODUCT.UPCAST)
    if PRODUCT.EIGHT_BITS and PRODUCT.SCALED_K >= K:
        acc *= tl.load(scales_at, mask=n < N, other=0.0)[None, :].to(sums)
    return acc.to(tl.float32)


@triton.jit
def multiply(a, b, acc, PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    """acc + a @ b, in float64 where acc is."""
    if PRECISION == "ieee":
        acc = tl.dot(a.to(tl.float64), b.to(tl.float64), acc, out_dtype=tl.float64)
    else:
        acc = dot(a, b, acc, PRECISION, UPCAST)
    return acc
