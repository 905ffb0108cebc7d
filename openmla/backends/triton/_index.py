"""Indexer scores of a tile of keys for a few tokens; index_logits and index_logits_ragged.

Keys are the rows of a product and (token, head) its columns, so that most of a sum over heads stays
inside one thread. A key decides about its own column of the logits and no other: rows of memory
nobody may see, NaN or not, are overwritten with -inf, so that any address of a key will do there.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from openmla.backends import Problem
from openmla.backends.triton._build import (
    TYPES,
    assembly,
    cdiv,
    interpreted,
    nearest_target,
    next_power_of_2,
)
from openmla.backends.triton._latent import decode_e4m3, dot
from openmla.hardware import multiprocessors

FP8 = torch.float8_e4m3fn
# Targets whose fp8 queries and keys are multiplied as they are; elsewhere they become 16-bit
# numbers, which hold them exactly. SM89 and SM90 add such products up with some 13 bits only, as
# the contract allows: scores of a V3.2 layer are off by 5e-5 of themselves on an H200.
FP8_PRODUCTS = (89, 90, 100, 120)
FP8_CONVERTED = (89, 90, 100, 120)  # targets that know the type, and turn two into fp16 at a time
HEADS = 128  # of one product, at most
TOKENS = 8  # of one product, at most
KEYS = 64  # of one product
FILL = 2048  # logits of a tile that are set to -inf together


@triton.jit
def load_queries(
    q, t, T, q_token, q_head, CHUNK: tl.constexpr, FIRST: tl.constexpr, USED: tl.constexpr,
    HI: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
    ASM: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Some columns of some heads of the tokens from t on, [BLOCK_D, BLOCK_Q * BLOCK_H], zeros
    around. Transposed here, ahead of the loop over keys: Triton 3.9 would keep what is transposed
    inside one in registers and store it to shared memory with every tile of keys."""
    row = tl.arange(0, BLOCK_Q * BLOCK_H)
    d = tl.arange(0, BLOCK_D)
    token = t + row // BLOCK_H
    head = CHUNK * BLOCK_H + row % BLOCK_H
    at = q + token.to(tl.int64) * q_token + head * q_head + FIRST
    mask = ((token < T) & (head < HI))[:, None] & (d < USED)[None, :]
    tile = tl.load(at[:, None] + d[None, :], mask=mask, other=0.0)
    if tile.dtype == tl.uint8:
        tile = decode_e4m3(tile, dtype, ASM)
    return tl.trans(tile.to(dtype))


@triton.jit
def load_weights(
    w, t, T, w_token, CHUNK: tl.constexpr, HI: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_H: tl.constexpr,
):  # fmt: skip
    """The weights of these heads, [BLOCK_Q * BLOCK_H]."""
    row = tl.arange(0, BLOCK_Q * BLOCK_H)
    token = t + row // BLOCK_H
    head = CHUNK * BLOCK_H + row % BLOCK_H
    at = w + token.to(tl.int64) * w_token + head
    return tl.load(at, mask=(token < T) & (head < HI), other=0.0)


@triton.jit
def load_keys(
    at, FIRST: tl.constexpr, USED: tl.constexpr, BLOCK_D: tl.constexpr, ASM: tl.constexpr,
    dtype: tl.constexpr,
):  # fmt: skip
    """Some columns of the keys at `at`, [BLOCK_N, BLOCK_D]."""
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
    """Sums over heads of weight * relu(product), [BLOCK_N, BLOCK_Q]; NaN stays NaN."""
    liked = tl.maximum(products, 0.0, propagate_nan=tl.PropagateNan.ALL) * weights[None, :]
    return tl.sum(tl.reshape(liked, [products.shape[0], BLOCK_Q, BLOCK_H]), 2)


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
    nothing = tl.full([BLOCK_Q, WIDE], float("-inf"), tl.float32)
    for start in range(tl.min(begin, 0), end, WIDE):
        j = start + tl.arange(0, WIDE)
        mask = (t < T)[:, None] & (j[None, :] >= begin[:, None]) & (j < end)[None, :]
        tl.store(row[:, None] + j[None, :], nothing, mask=mask)


class Config(NamedTuple):
    block_n: int
    columns: int  # tokens times heads of one product, at most
    num_warps: int
    depth: int  # tiles of keys on their way


class Shape(NamedTuple):
    """What a kernel is compiled for, beside where its keys lie."""

    HI: int
    DI: int
    GROUP: int  # columns of one product
    SCALES: int  # of a key
    products: torch.dtype
    PRECISION: str
    native: bool  # whether fp8 is a type to the kernel, not bytes


def why_not_index(problem: Problem) -> str | None:
    if problem.dtype == torch.float64:
        return "takes queries of up to 32 bits, this is torch.float64"
    if problem.H == 0 or problem.D == 0:
        return f"needs heads, this is {problem.H} of {problem.D} values"
    if problem.D > 256:
        return f"takes heads of up to 256 values, this is {problem.D}"
    return None


def shape_of(
    q: torch.dtype, keys: torch.dtype, HI: int, DI: int, SCALES: int, capability: int
) -> Shape:
    """Products in the narrowest type that holds both sides exactly; tf32 holds all 16-bit ones."""
    pair = {q, keys}
    target = 0 if interpreted() else nearest_target(capability)
    native = target in FP8_CONVERTED
    precision = "tf32"
    if pair == {FP8} and target in FP8_PRODUCTS:
        products = FP8
    elif pair <= {FP8, torch.float16} and (native or pair != {FP8}):
        products = torch.float16
    elif pair <= {FP8, torch.bfloat16}:
        products = torch.bfloat16
    else:
        products = torch.float32
        precision = "ieee" if torch.float32 in pair else "tf32"
    native = native and products in (FP8, torch.float16)
    # float32 without tensor cores holds whole rows in registers: short ones
    most = 16 if precision == "ieee" else 512
    group = DI // SCALES
    while group > most and group % 2 == 0:
        group //= 2
    return Shape(HI, DI, group, SCALES, products, precision, native)


def config_of(shape: Shape, tokens: int, gathered: bool, capability: int) -> Config:
    """The tile for so many tokens of a request; keys looked up one by one take registers.

    256 columns let one tile of keys serve four tokens of 64 heads, two programs on a multiprocessor
    take turns with the tensor cores. H200: other rows were swept and lost (.., 128, 4, ..) by 3 %
    at 65536 keys, eight warps by 20 %.
    """
    if shape.products == torch.float32:
        return Config(16, 64, 4, 0) if shape.PRECISION == "ieee" else Config(KEYS, 64, 4, 1)
    if shape.SCALES > 1:
        return Config(KEYS, 64, 4, 1)
    large = nearest_target(capability) in (90, 100) and shape.GROUP <= 128
    if tokens == 1:
        return Config(KEYS, 64, 4, 2 if gathered or not large else 3)
    decoded = shape.products != FP8
    deep = 3 if large else 2
    return Config(KEYS, 256 if large else 128, 4, 1 if gathered or decoded else deep)


def tile_of(
    shape: Shape, tokens: int, *, chain: int, gathered: bool, capability: int
) -> tuple[Config, dict[str, Any]]:
    """The tile and what follows from it. A key is the last of `chain` loads that wait for one
    another, each of which takes its stages."""
    config = config_of(shape, tokens, gathered, capability)
    heads = min(next_power_of_2(max(shape.HI, 16)), HEADS)
    if shape.products == torch.float32:
        heads = min(heads, config.columns)
    ours = min(next_power_of_2(tokens), max(config.columns // heads, 1), TOKENS)
    if heads < shape.HI:  # queries are loaded again and again
        ours = 1
    fp8 = shape.products == FP8
    return config, {
        "HI": shape.HI,
        "DI": shape.DI,
        "GROUP": shape.GROUP,
        "BLOCK_Q": ours,
        "BLOCK_H": heads,
        "BLOCK_N": config.block_n,
        "BLOCK_D": max(next_power_of_2(shape.GROUP), 32 if fp8 else 16),
        "FILL": FILL,
        "PRECISION": shape.PRECISION,
        # weights of all columns beside decoded keys, or tensor memory's, would not fit
        "HOLD": ours * heads < 256 or (fp8 and nearest_target(capability) == 90),
        "ASM": assembly(),
        "UPCAST": interpreted(),
        "STAGES": 1 + chain * config.depth,
        "dtype": tl.float8e4nv if fp8 else getattr(tl, str(shape.products)[6:]),
    }


def as_stored(values: Tensor, shape: Shape) -> Tensor:
    """fp8 as the kernel takes it: bytes where they are decoded."""
    if values.dtype in (FP8, torch.uint8):
        return values.view(FP8 if shape.native else torch.uint8)
    return values


def stored_type(dtype: torch.dtype, shape: Shape) -> str:
    """Triton's name of as_stored()'s type."""
    fp8 = "fp8e4nv" if shape.native else "u8"
    return fp8 if dtype in (FP8, torch.uint8) else TYPES[dtype]


def run_length(num_keys: int, tiles: int, config: Config, device: torch.device) -> int:
    """Keys of one program: so few that the machine is filled several times, as rows have many
    lengths, and enough to pay for loading queries."""
    programs = 8 if config.columns == 256 else 16
    wanted = cdiv(programs * max(multiprocessors(device), 1), tiles)
    blocks = cdiv(num_keys, config.block_n)
    return max(cdiv(blocks, wanted), min(blocks, 4)) * config.block_n
