"""Attention over packed, expanded keys and values; mha_ragged and mha_masked.

Computes  s = scale * q @ k.T per head, over the keys that causality or a row's bits leave
          lse = log(sum(exp(s)));  out = exp(s - lse) @ v
          (specification: ops/mha_ragged.py, ops/mha_masked.py; numbers: backends/reference)
Grid      (T // BLOCK_M + B + 1, H): one program owns BLOCK_M queries of one request, one head.
          Tiles of request b are numbered from query_start_loc[b] // BLOCK_M + b on: room for any
          length, and nobody has to know it. Request B is the rows that belong to none. The last
          tiles, where causal the longest, start first; a head's run side by side and share its
          keys in L2.
Reads     q [T, H, E], k [S, H, E], v [S, H, V], query_start_loc [B+1], key_start_loc [B+1]; with
          bits mask [T, words] and, made from it by _list_tiles_kernel, key tiles that have any
Writes    out [T, H, V], lse [T, H]
Limits    see why_not_mha()

E is cut into a power of two and the rest, so that 192 columns are 128 and 64. Keys that all queries
of a tile see are taken without comparing anything; those at the edge come last. Keys past a
request's are zeros with a score of -inf: nothing of unused memory gets into a result.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from openmla.backends import Problem
from openmla.backends.triton._build import (
    GFX942,
    SHARED_MEMORY,
    TARGETS,
    TYPES,
    Build,
    capability_of,
    cdiv,
    interpreted,
    nearest_target,
    next_power_of_2,
)
from openmla.backends.triton._latent import LN2, LOG2E, dot
from openmla.backends.triton._versions import JOINS_BRANCHES

ALL, EDGE, BITS = (tl.constexpr(i) for i in range(3))  # which keys of a tile a query sees
PRODUCTS = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
SMALL = (86, 89, 120)  # targets with 99 KiB of shared memory
# What differs from step to step: no other value or place of these is another kernel.
CHANGING = ("T", "B", "mask_token", "tiles_stride")
SLICED = ("query_start_loc", "key_start_loc", "mask")
WIDEST = 512
FP_FUSION = True


class Config(NamedTuple):
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def blocks_of(E: int, V: int) -> tuple[int, int, int]:
    """Columns of the tiles of keys, the largest power of two in E and the rest, and of values."""
    block_a = min(max(next_power_of_2(E + 1) // 2, 16), 256)
    block_b = max(next_power_of_2(max(E - block_a, 1)), 16)
    return block_a, block_b, max(next_power_of_2(max(V, 1)), 16)


def config_of(dtype: torch.dtype, E: int, V: int, capability: int, *, bits: bool) -> Config:
    """The tile for widths on a target: as many keys as leave room for two tiles on their way while
    one is used. Loads are issued where the loop ends: with fewer tiles they are waited for at once.

    Matrix units of Hopper and later still read a tile while its loop goes on, which takes one more.
    """
    block_a, block_b, block_v = blocks_of(E, V)
    columns = block_a + (block_b if block_a < E else 0)
    target = nearest_target(capability)
    late = target in (90, 100)
    if dtype == torch.float32:  # products of float32 hold whole rows in registers
        return Config(16, 32, 8, 1)
    block_m, num_warps = (128, 8) if late or block_v <= 128 else (64, 4)
    if columns + block_v > 512 or (columns > 256 and not late):
        block_m, num_warps = {**dict.fromkeys(SMALL, 32), GFX942: 16}.get(target, 64), 8
    room = SHARED_MEMORY[target] - 1024 - 2 * block_m * columns
    row = 2 * (columns + block_v) + (block_m // 8 if bits else 0)
    lengths = (128, 64, 32) if late else (64, 32)
    if JOINS_BRANCHES and not late and block_m == 128:
        lengths = (32,)  # or registers spill
    for block_n in lengths:
        weights = 2 * block_m * block_n if num_warps == 4 else 0  # pass through memory there
        tiles = (room - weights) // (block_n * row)
        if tiles >= (3 if late else 2):
            return Config(block_m, block_n, num_warps, 4 if late and bits and tiles > 3 else 3)
        if late and (block_n, tiles) == (64, 2):  # H200: faster than shorter tiles on their way
            return Config(block_m, block_n, num_warps, 2)
    return Config(block_m, 32, num_warps, 2)


@triton.jit
def tile_owner(tile, query_start_loc, B, BLOCK_M: tl.constexpr):
    """Which request a tile of queries belongs to, B for rows past them all."""
    bounds = tl.arange(0, 128)
    owner = 0
    for first in range(0, B, 128):
        b = first + bounds
        ends = tl.load(query_start_loc + 1 + b, mask=b < B, other=0)
        owner += tl.sum(((ends // BLOCK_M + b + 1 <= tile) & (b < B)).to(tl.int32), 0)
    return owner


@triton.jit
def find_rows(tile, query_start_loc, T, B, BLOCK_M: tl.constexpr):
    """A tile's request, where the request's query rows end and where the tile's begin."""
    b = tile_owner(tile, query_start_loc, B, BLOCK_M)
    begin = tl.load(query_start_loc + b)
    end = tl.where(b < B, tl.load(query_start_loc + tl.minimum(b + 1, B)), T)
    return b, end, begin + (tile - begin // BLOCK_M - b) * BLOCK_M


@triton.jit
def load_tile(
    at, stride, left, FIRST: tl.constexpr, USED: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Columns FIRST .. FIRST + USED - 1 of `left` rows, [ROWS, BLOCK], zeros around; WHOLE if there
    are at least ROWS."""
    n = tl.arange(0, ROWS)
    c = tl.arange(0, BLOCK)
    places = at + (n.to(tl.int64) * stride)[:, None] + (FIRST + c)[None, :]
    if WHOLE and USED == BLOCK:
        tile = tl.load(places)
    elif WHOLE:
        tile = tl.load(places, mask=(c < USED)[None, :], other=0.0)
    elif USED == BLOCK:
        tile = tl.load(places, mask=(n < left)[:, None], other=0.0)
    else:
        tile = tl.load(places, mask=(n < left)[:, None] & (c < USED)[None, :], other=0.0)
    return tile


@triton.jit
def load_ceilings(mask_at, tile, left, row_there, BLOCK_N: tl.constexpr, WHOLE: tl.constexpr):
    """+inf where a query's bit is set for a key of a tile, -inf where not, [BLOCK_M, BLOCK_N]: the
    bit moved to a float's sign. Conditions instead are packed and unpacked by the compiler."""
    WORDS: tl.constexpr = BLOCK_N // 32
    w = tl.arange(0, WORDS)
    there = row_there[:, None]
    if not WHOLE:
        there = there & (32 * w < left)[None, :]
    words = tl.load((mask_at + tile * WORDS)[:, None] + w[None, :], mask=there, other=0)
    words = tl.broadcast_to(words[:, :, None], [words.shape[0], WORDS, 32])
    words = tl.reshape(words, [words.shape[0], BLOCK_N])
    c = tl.arange(0, BLOCK_N)
    signs = (words << (31 - c % 32)[None, :]) & -2147483648
    ceilings = (signs ^ -8388608).to(tl.float32, bitcast=True)  # the bits of -inf
    if not WHOLE:
        ceilings = tl.where((c < left)[None, :], ceilings, float("-inf"))
    return ceilings


@triton.jit
def attend(
    q_a, q_b, largest, total, acc, first, last, qk_scale, k, v, S, last_key, mask_at, row_there,
    tiles, K_TOKEN: tl.constexpr, V_TOKEN: tl.constexpr, KEYS: tl.constexpr, WHOLE: tl.constexpr,
    E: tl.constexpr, V: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_A: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
    STAGES: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Key tiles first .. last-1, of those listed with BITS, added to what a softmax has seen."""
    TWO_TILES: tl.constexpr = E > BLOCK_A
    USED: tl.constexpr = BLOCK_A if TWO_TILES else E
    k_step = tl.full([], BLOCK_N, tl.int64) * K_TOKEN
    v_step = tl.full([], BLOCK_N, tl.int64) * V_TOKEN
    c = tl.arange(0, BLOCK_N)
    tile = first
    if KEYS == BITS:  # the next number is read while a tile is worked on: it delays no load
        tile = tl.load(tiles + first, mask=first < last, other=0)
    for i in tl.range(first, last, num_stages=STAGES):
        left = S - tile * BLOCK_N
        k_at = k + tile * k_step
        keys = load_tile(k_at, K_TOKEN, left, 0, USED, BLOCK_N, BLOCK_A, WHOLE)
        scores = tl.zeros([q_a.shape[0], BLOCK_N], tl.float32)
        scores = dot(q_a, tl.trans(keys), scores, PRECISION, UPCAST)
        if TWO_TILES:
            rest = load_tile(k_at, K_TOKEN, left, BLOCK_A, E - BLOCK_A, BLOCK_N, BLOCK_B, WHOLE)
            scores = dot(q_b, tl.trans(rest), scores, PRECISION, UPCAST)
        if KEYS == EDGE:
            seen = (tile * BLOCK_N + c)[None, :] <= last_key[:, None]
            scores = tl.where(seen, scores, float("-inf"))
        if KEYS == BITS:
            ceilings = load_ceilings(mask_at, tile, left, row_there, BLOCK_N, WHOLE)
            scores = tl.minimum(scores, ceilings)
        new_largest = tl.maximum(largest, tl.max(scores, 1) * qk_scale)
        safe = new_largest
        if KEYS != ALL:
            safe = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weights = tl.exp2(scores * qk_scale - safe[:, None])
        shrink = tl.exp2(largest - safe)
        total = total * shrink + tl.sum(weights, 1)
        values = load_tile(v + tile * v_step, V_TOKEN, left, 0, V, BLOCK_N, BLOCK_V, WHOLE)
        if not UPCAST:
            weights = weights.to(dtype)
        acc = dot(weights, values, acc * shrink[:, None], PRECISION, UPCAST)
        largest = new_largest
        tile = i + 1
        if KEYS == BITS:
            tile = tl.load(tiles + i + 1, mask=i + 1 < last, other=0)
    return largest, total, acc


@triton.jit(do_not_specialize=CHANGING, do_not_specialize_on_alignment=SLICED)
def _mha_kernel(
    q, k, v, query_start_loc, key_start_loc, mask, tiles, num_tiles, out, lse,
    T, B, qk_scale, q_token, q_head, k_head, v_head, mask_token, tiles_stride,
    K_TOKEN: tl.constexpr, V_TOKEN: tl.constexpr, H: tl.constexpr, E: tl.constexpr,
    V: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_B: tl.constexpr,
    BLOCK_V: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr, STAGES: tl.constexpr,
    dtype: tl.constexpr,
):  # fmt: skip
    number = tl.num_programs(0) - 1 - tl.program_id(0)
    h = tl.program_id(1).to(tl.int64)
    b, end, first = find_rows(number, query_start_loc, T, B, BLOCK_M)
    if first >= end:
        return
    m = tl.arange(0, BLOCK_M)
    row_there = m < end - first
    first_key = tl.load(key_start_loc + b)
    S = tl.load(key_start_loc + tl.minimum(b + 1, B)) - first_key
    if not UPCAST:  # inside a compiled graph it may arrive as fp64; interpreted, as a Python number
        qk_scale = qk_scale.to(tl.float32)
    TWO_TILES: tl.constexpr = E > BLOCK_A
    USED: tl.constexpr = BLOCK_A if TWO_TILES else E
    REST: tl.constexpr = E - BLOCK_A if TWO_TILES else 0
    q_at = q + first.to(tl.int64) * q_token + h * q_head
    q_a = load_tile(q_at, q_token, end - first, 0, USED, BLOCK_M, BLOCK_A, False)
    q_b = load_tile(q_at, q_token, end - first, BLOCK_A, REST, BLOCK_M, BLOCK_B, False)
    if UPCAST:
        q_a = q_a.to(tl.float32)
        q_b = q_b.to(tl.float32)
    qk_scale = qk_scale * LOG2E
    k += first_key.to(tl.int64) * K_TOKEN + h * k_head
    v += first_key.to(tl.int64) * V_TOKEN + h * v_head
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    mask_at = mask + (first + m).to(tl.int64) * mask_token
    last_key = m * 0 + (S - 1)
    # whole: tiles all of whose keys are there and, without bits, seen by every query
    if MASKED:
        tiles += number.to(tl.int64) * tiles_stride
        count = tl.load(num_tiles + number)
        last_tile = tl.load(tiles + count - 1, mask=count > 0, other=-1)
        whole = tl.where(last_tile < S // BLOCK_N, count, count - 1)
    elif CAUSAL:
        last_key = S - end + first + m  # the request's last query sees its last key
        whole = tl.minimum(tl.maximum(S - end + first + 1, 0), S) // BLOCK_N
        count = tl.cdiv(tl.maximum(tl.minimum(S - end + first + BLOCK_M, S), 0), BLOCK_N)
    else:
        whole = S // BLOCK_N
        count = tl.cdiv(S, BLOCK_N)
    largest, total, acc = attend(
        q_a, q_b, largest, total, acc, 0, whole, qk_scale, k, v, S, last_key, mask_at, row_there,
        tiles, K_TOKEN, V_TOKEN, BITS if MASKED else ALL, True, E, V, BLOCK_N, BLOCK_A, BLOCK_B,
        BLOCK_V, PRECISION, UPCAST, STAGES, dtype,
    )  # fmt: skip
    largest, total, acc = attend(
        q_a, q_b, largest, total, acc, whole, count, qk_scale, k, v, S, last_key, mask_at,
        row_there, tiles, K_TOKEN, V_TOKEN, BITS if MASKED else EDGE, False, E, V, BLOCK_N, BLOCK_A,
        BLOCK_B, BLOCK_V, PRECISION, UPCAST, STAGES, dtype,
    )  # fmt: skip
    seen = total != 0  # NaN stays NaN
    share = tl.where(seen, 1.0 / total, 0.0)
    natural = tl.where(seen, (largest + tl.log2(total)) * LN2, float("-inf"))
    row = (first + m).to(tl.int64) * H + h
    tl.store(lse + row, natural, mask=row_there)
    c = tl.arange(0, BLOCK_V)
    values = (acc * share[:, None]).to(out.dtype.element_ty)
    there = row_there[:, None] & (c < V)[None, :]
    tl.store(out + (row * V)[:, None] + c[None, :], values, mask=there)


@triton.jit(do_not_specialize=CHANGING, do_not_specialize_on_alignment=SLICED)
def _list_tiles_kernel(
    mask, query_start_loc, key_start_loc, tiles, num_tiles, T, B, mask_token, tiles_stride,
    BLOCK_M: tl.constexpr, BLOCK_T: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """For one tile of queries the numbers of the key tiles, WORDS words each, that have any bit."""
    number = tl.program_id(0)
    b, end, first = find_rows(number, query_start_loc, T, B, BLOCK_M)
    S = tl.load(key_start_loc + tl.minimum(b + 1, B)) - tl.load(key_start_loc + b)
    words = tl.where(first < end, (S + 31) // 32, 0)
    m = tl.arange(0, BLOCK_M)
    t = tl.arange(0, BLOCK_T)
    w = tl.arange(0, BLOCK_T * WORDS)
    mask_at = mask + (first + m).to(tl.int64) * mask_token
    tiles += number.to(tl.int64) * tiles_stride
    count = 0
    for start in range(0, tl.cdiv(words, WORDS), BLOCK_T):
        there = (m < end - first)[:, None] & (start * WORDS + w < words)[None, :]
        bits = tl.load(mask_at[:, None] + (start * WORDS + w)[None, :], mask=there, other=0)
        some = tl.max((bits != 0).to(tl.int32), 0)
        some = tl.max(tl.reshape(some, [BLOCK_T, WORDS]), 1)
        place = count + tl.cumsum(some, 0) - 1
        tl.store(tiles + place, start + t, mask=some > 0)
        count += tl.sum(some, 0)
    tl.store(num_tiles + number, count)


def why_not_mha(problem: Problem) -> str | None:
    if problem.dtype not in PRODUCTS:
        return f"takes 16- and 32-bit queries, this is {problem.dtype}"
    if max(problem.E, problem.V) > WIDEST:
        return f"takes heads up to {WIDEST} wide, these are {max(problem.E, problem.V)}"
    return None


def run_mha(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_start_loc: Tensor,
    key_start_loc: Tensor,
    mask: Tensor | None = None,
    *,
    scale: float,
    causal: bool = False,
    max_key_len: int,
    config: Config | None = None,
) -> tuple[Tensor, Tensor]:
    """Launch over all queries; nothing of the launch depends on what start_locs and mask hold."""
    (T, H, E), V = q.shape, v.shape[2]
    # the interpreter cuts short where it should round: torch does it then
    out = q.new_empty((T, H, V), dtype=torch.float32 if interpreted() else q.dtype)
    lse = q.new_empty((T, H), dtype=torch.float32)
    if T * H == 0:
        return out.to(q.dtype), lse
    bits = mask is not None
    config = config or config_of(q.dtype, E, V, capability_of(q.device), bits=bits)
    query_start_loc, key_start_loc = query_start_loc.contiguous(), key_start_loc.contiguous()
    B = query_start_loc.shape[0] - 1
    grid = T // config.block_m + B + 1
    tiles = num_tiles = query_start_loc
    if mask is not None:
        tiles = mask.new_empty((grid, cdiv(max_key_len, config.block_n)))
        num_tiles = mask.new_empty((grid,))
        _list_tiles_kernel[(grid,)](
            mask,
            query_start_loc,
            key_start_loc,
            tiles,
            num_tiles,
            T,
            B,
            mask.stride(0),
            tiles.stride(0),
            **list_constants(config),
            num_warps=8,
            num_stages=1,
            enable_fp_fusion=FP_FUSION,
        )
    constants = constants_of(
        q.dtype, H, E, V, config, (k.stride(0), v.stride(0)), causal=causal, bits=bits,
    )  # fmt: skip
    _mha_kernel[(grid, H)](
        q,
        k,
        v,
        query_start_loc,
        key_start_loc,
        query_start_loc if mask is None else mask,
        tiles,
        num_tiles,
        out,
        lse,
        T,
        B,
        scale,
        q.stride(0),
        q.stride(1),
        k.stride(1),
        v.stride(1),
        0 if mask is None else mask.stride(0),
        0 if mask is None else tiles.stride(0),
        **constants,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        enable_fp_fusion=FP_FUSION,
    )
    return out.to(q.dtype), lse


def list_constants(config: Config) -> dict[str, Any]:
    words = config.block_n // 32
    return {"BLOCK_M": config.block_m, "BLOCK_T": 64 // words, "WORDS": words}


def constants_of(
    dtype: torch.dtype,
    H: int,
    E: int,
    V: int,
    config: Config,
    strides: tuple[int, int],
    *,
    causal: bool,
    bits: bool,
) -> dict[str, Any]:
    block_a, block_b, block_v = blocks_of(E, V)
    return {
        # constant, so that a row's place is an immediate: in registers they make tiles spill
        "K_TOKEN": strides[0],
        "V_TOKEN": strides[1],
        "H": H,
        "E": E,
        "V": V,
        "CAUSAL": causal,
        "MASKED": bits,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_A": block_a,
        "BLOCK_B": block_b,
        "BLOCK_V": block_v,
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
        "UPCAST": interpreted(),
        "STAGES": config.num_stages,
        "dtype": PRODUCTS[dtype],
    }


def mha_build(
    capability: int,
    E: int,
    V: int,
    *,
    bits: bool,
    dtype: torch.dtype = torch.bfloat16,
    causal: bool = True,
    H: int = 128,
    config: Config | None = None,
) -> Build:
    config = config or config_of(dtype, E, V, capability, bits=bits)
    strides = (H * E, H * (E + V))
    constants = constants_of(dtype, H, E, V, config, strides, causal=causal and not bits, bits=bits)
    pointers = {
        **dict.fromkeys(("q", "k", "v", "out"), "*" + TYPES[dtype]),
        **dict.fromkeys(("query_start_loc", "key_start_loc"), "*i32"),
        **dict.fromkeys(("mask", "tiles", "num_tiles"), "*i32"),
        "lse": "*fp32",
        "qk_scale": "fp32",
    }
    signature = {
        name: "constexpr" if name in constants else pointers.get(name, "i32")
        for name in _mha_kernel.arg_names
    }
    name = f"mha-{'bits' if bits else 'causal' if causal else 'all'}-E{E}-V{V}-{TYPES[dtype]}"
    return Build(
        name, _mha_kernel, signature, constants, config.num_warps, config.num_stages, capability,
        FP_FUSION,
    )  # fmt: skip


def list_build(capability: int) -> Build:
    constants = list_constants(config_of(torch.bfloat16, 192, 128, capability, bits=True))
    pointers = dict.fromkeys(
        ("mask", "query_start_loc", "key_start_loc", "tiles", "num_tiles"), "*i32"
    )
    signature = {
        name: "constexpr" if name in constants else pointers.get(name, "i32")
        for name in _list_tiles_kernel.arg_names
    }
    return Build(
        "list-tiles", _list_tiles_kernel, signature, constants, 8, 1, capability, FP_FUSION
    )


# V3 and V3.2, GLM-5: the sparse ones. Mistral 4, MiniCPM3, and one that torch's kernels refuse.
SPARSE_WIDTHS = ((192, 128), (256, 256))
WIDTHS = (*SPARSE_WIDTHS, (128, 128), (96, 64), (160, 128), (512, 512))


def mha_builds(*, bits: bool) -> Iterator[Build]:
    for capability in TARGETS:
        for E, V in SPARSE_WIDTHS if bits else WIDTHS:
            yield mha_build(capability, E, V, bits=bits)
        yield mha_build(capability, 192, 128, bits=bits, dtype=torch.float32)
        if bits:
            yield list_build(capability)
        else:
            yield mha_build(capability, 192, 128, bits=bits, causal=False)
