"""Launching expanded attention: tiles by shared memory, and what is built ahead of time."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from openmla.backends import Problem
from openmla.backends.expanded import joined
from openmla.backends.triton._build import (
    GFX942,
    SHARED_MEMORY,
    TYPES,
    capability_of,
    cdiv,
    interpreted,
    nearest_target,
    next_power_of_2,
)
from openmla.backends.triton._mha import WORD, _list_tiles_kernel, _mha_kernel
from openmla.backends.triton._spec import Case, Fixed, KernelSpec, case
from openmla.backends.triton._versions import JOINS_BRANCHES, WIDENS_EIGHT_BITS

E4M3 = torch.float8_e4m3fn
PRODUCTS = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
    E4M3: tl.float8e4nv,
}
HEADS = {**TYPES, E4M3: "fp8e4nv"}  # elsewhere e4m3 is read as bytes
FIRST_EIGHT = 89  # the first target with products of e4m3; AMD's CDNA3 has another eight bits
SMALL = (86, 89, 120, 121)  # targets with 99 KiB of shared memory
ASYNC = (90, 100)  # targets whose products run asynchronously, from shared memory
WIDEST = 512  # columns of a head
RESERVED = 1024  # bytes of shared memory for what Triton adds
# Queries of a tile where 128, or 64 with four warps, spill; 64 on other targets.
WIDE_BLOCK_M = {**dict.fromkeys(SMALL, 32), GFX942: 16}
LISTED_WORDS = 64  # mask words of a query that _list_tiles_kernel looks at together


class Strides(NamedTuple):
    """From one token to the next."""

    k: int
    k_pe: int
    v: int
    v_column: int = 1


class Config(NamedTuple):
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def blocks_of(E: int, V: int, least: int = 16) -> tuple[int, int, int]:
    """Columns of the two key tiles, the largest power of two in E and the rest, and of values;
    `least`: what a product sums over."""
    block_a = min(max(next_power_of_2(E + 1) // 2, least), 256)
    block_b = max(next_power_of_2(max(E - block_a, 1)), least)
    return block_a, block_b, max(next_power_of_2(max(V, 1)), 16)


def least_of(dtype: torch.dtype) -> int:
    """Columns that a product sums over, at least: 32 bytes of eight bits or sixteen."""
    return 32 if dtype == E4M3 else 16


def cut_alike(P: int, E: int, V: int) -> bool:
    """Whether kernels cut heads where a head's own columns end and the shared ones begin."""
    return P < E and blocks_of(E, V)[0] == P


def config_of(dtype: torch.dtype, E: int, V: int, capability: int, *, bits: bool) -> Config:
    """The tile for given widths: as many keys as fit in shared memory with two more tiles in flight
    while one is used. Loads are issued at the end of an iteration: with fewer, each is waited for
    at once. Asynchronous products still read a tile when the next iteration starts: one more.
    """
    block_a, block_b, block_v = blocks_of(E, V, least_of(dtype))
    columns = block_a + (block_b if block_a < E else 0)
    target = nearest_target(capability)
    asynchronous = target in ASYNC
    if dtype == torch.float32:  # float32 products hold whole rows in registers
        return Config(16, 32, 8, 1)
    block_m, num_warps = (128, 8) if asynchronous or block_v <= 128 else (64, 4)
    if columns + block_v > 512 or (columns > 256 and not asynchronous):  # or it spills
        block_m, num_warps = WIDE_BLOCK_M.get(target, 64), 8
    if dtype == E4M3 and num_warps == 4:  # values are decoded in registers
        num_warps = 8
    size = 2 if target in WIDENS_EIGHT_BITS else dtype.itemsize
    free = SHARED_MEMORY[target] - RESERVED - size * block_m * columns
    key_bytes = size * columns + 2 * block_v + (block_m // 8 if bits else 0)
    lengths: tuple[int, ...] = (128, 64, 32) if asynchronous else (64, 32)
    if JOINS_BRANCHES and not asynchronous and block_m == 128:
        lengths = (32,)  # longer tiles spill
    for block_n in lengths:
        # with 4 warps softmax weights go through shared memory between the two products
        weights = size * block_m * block_n if num_warps == 4 else 0
        tiles = (free - weights) // (block_n * key_bytes)
        if tiles >= (3 if asynchronous else 2):
            stages = 4 if asynchronous and bits and tiles > 3 else 3
            return Config(block_m, block_n, num_warps, stages)
        if asynchronous and (block_n, tiles) == (64, 2):  # H200: faster than 32 keys and 3 stages
            return Config(block_m, block_n, num_warps, 2)
    return Config(block_m, 32, num_warps, 2)


def no_eight_bits(problem: Problem) -> str | None:
    """Why a device has no products of e4m3."""
    if torch.version.hip is not None:
        return "has products of e4m3 on NVIDIA's GPUs only"
    if problem.capability is not None and problem.capability < (8, 9):
        major, minor = problem.capability
        return f"needs SM89 for products of e4m3, this is SM{major}{minor}"
    return None


def why_not_mha(problem: Problem) -> str | None:
    if problem.dtype not in PRODUCTS:
        return f"takes e4m3, 16- and 32-bit queries, this is {problem.dtype}"
    if problem.dtype == E4M3:
        reason = no_eight_bits(problem)
        if reason is not None:
            return reason
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
    k_pe: Tensor | None = None,
    scale: float,
    causal: bool = False,
    max_key_len: int,
    scales: tuple[Tensor, Tensor, Tensor] | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Launch over all queries; the launch does not depend on the contents of start_locs or mask."""
    (T, H, E), V, dtype = q.shape, v.shape[2], q.dtype
    out_dtype = dtype if out_dtype is None else out_dtype
    # the interpreter truncates where it should round: let torch round
    out = q.new_empty((T, H, V), dtype=torch.float32 if interpreted() else out_dtype)
    lse = q.new_empty((T, H), dtype=torch.float32)
    if T * H == 0:
        return out.to(out_dtype), lse
    q_scale, k_scale, v_scale = (lse, lse, lse) if scales is None else scales
    if scales is not None:
        k_scale, v_scale = k_scale.contiguous(), v_scale.contiguous()
        if v.dtype == torch.float32:
            v = v.to(torch.bfloat16)
        if interpreted():
            q, k = q.view(torch.uint8), k.view(torch.uint8)
            v = v.view(torch.uint8) if v.dtype == E4M3 else v
    bits = mask is not None
    config = config_of(dtype, E, V, capability_of(q.device), bits=bits)
    query_start_loc, key_start_loc = query_start_loc.contiguous(), key_start_loc.contiguous()
    B = query_start_loc.shape[0] - 1
    grid = T // config.block_m + B + 1
    tiles = num_tiles = query_start_loc
    if mask is not None:
        tiles = mask.new_empty((grid, cdiv(max_key_len, config.block_n)))
        num_tiles = mask.new_empty((grid,))
        LIST_TILES.launch(config)(
            (grid,),
            mask,
            query_start_loc,
            key_start_loc,
            tiles,
            num_tiles,
            T,
            B,
            mask.stride(0),
            tiles.stride(0),
        )
    if k_pe is not None and not cut_alike(k.shape[2], E, V):
        k, k_pe = joined(k, k_pe), None
    pe_stride = 0 if k_pe is None else k_pe.stride(0)
    strides = Strides(k.stride(0), pe_stride, v.stride(0), 1 if scales is None else v.stride(2))
    launch = (MASKED if bits else RAGGED).launch(
        dtype, H, E, V, config, strides, causal=causal, bits=bits, apart=k_pe is not None
    )
    launch(
        (grid, H),
        q,
        k,
        k if k_pe is None else k_pe,
        v,
        q_scale,
        k_scale,
        v_scale,
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
        q_scale.stride(0),
        q_scale.stride(1),
        0 if mask is None else mask.stride(0),
        0 if mask is None else tiles.stride(0),
    )
    return out.to(out_dtype), lse


def fix_list(config: Config) -> Fixed:
    words = config.block_n // WORD.value
    constants = {"BLOCK_M": config.block_m, "BLOCK_T": LISTED_WORDS // words, "WORDS": words}
    return Fixed(constants, num_warps=8)


def fix(
    dtype: torch.dtype, H: int, E: int, V: int, config: Config, strides: Strides, *, causal: bool,
    bits: bool, apart: bool = False,
) -> Fixed:  # fmt: skip
    block_a, block_b, block_v = blocks_of(E, V, least_of(dtype))
    constants = {
        # compile-time constants, so that row offsets are immediates: in registers tiles spill
        # A stride that is not used is the keys' own: one kernel fewer.
        "K_TOKEN": strides.k,
        "PE_TOKEN": strides.k_pe if apart else strides.k,
        "V_TOKEN": strides.v,
        "V_COLUMN": strides.v_column,
        "EIGHT": dtype == E4M3,
        "APART": apart,
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
    return Fixed(constants, config.num_warps, config.num_stages)


# Sparse models: V3.2 (and V3), GLM-5. Then Mistral 4, MiniCPM3, and one that torch's kernels
# refuse.
SPARSE_WIDTHS = ((192, 128), (256, 256))
WIDTHS = (*SPARSE_WIDTHS, (128, 128), (96, 64), (160, 128), (512, 512))


def cases(capability: int, *, bits: bool) -> Iterator[Case]:
    bf16, seen = torch.bfloat16, "bits" if bits else "causal"
    found = [(bf16, *widths, seen, False) for widths in (SPARSE_WIDTHS if bits else WIDTHS)]
    found.append((torch.float32, 192, 128, seen, False))
    if FIRST_EIGHT <= capability < GFX942:
        found += [(E4M3, *widths, seen, False) for widths in SPARSE_WIDTHS]
    if not bits:
        found += [(bf16, 192, 128, "all", False), (bf16, 192, 128, seen, True)]
    H = 128
    for dtype, E, V, seen, apart in found:
        heads, values = (f"*{HEADS[each]}" for each in (dtype, bf16 if dtype == E4M3 else dtype))
        yield case(
            f"mha-{seen}-E{E}-V{V}-{HEADS[dtype]}{'-apart' * apart}", dtype, H, E, V,
            config_of(dtype, E, V, capability, bits=bits), Strides(H * E, 64, H * (E + V)),
            causal=seen == "causal", bits=bits, apart=apart,
            types={**dict.fromkeys(("q", "k", "k_pe"), heads), "v": values, "out": values},
        )  # fmt: skip


LISTED = "mask query_start_loc key_start_loc tiles num_tiles"
TYPES_OF = {"*i32": LISTED, "*fp32": "lse q_scale k_scale v_scale", "fp32": "qk_scale"}
RAGGED, MASKED = (
    KernelSpec(_mha_kernel, fix, types=TYPES_OF, cases=partial(cases, bits=bits), fp_fusion=True)
    for bits in (False, True)
)
LIST_TILES = KernelSpec(
    _list_tiles_kernel,
    fix_list,
    types={"*i32": LISTED},
    cases=lambda capability: [
        case("list-tiles", config_of(torch.bfloat16, 192, 128, capability, bits=True))
    ],
    fp_fusion=True,
)
