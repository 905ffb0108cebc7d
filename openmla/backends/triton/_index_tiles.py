"""Tiles of the indexer's kernels, how keys are spread over programs, and arguments they share."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
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
from openmla.backends.triton._cache_rows import is_aligned, layout_of
from openmla.backends.triton._launch import inner_contiguous
from openmla.backends.triton._primitives import INDEX, PLAIN
from openmla.cache.format import GROUP, get_format
from openmla.hardware import multiprocessors

FP8 = torch.float8_e4m3fn
# Targets that multiply fp8 queries and keys natively; elsewhere both become 16-bit numbers, which
# hold them exactly. SM89 and SM90 accumulate fp8 products with some 13 bits only, as the contract
# allows: on an H200 scores of a V3.2 layer are off by 5e-5 of themselves.
FP8_PRODUCTS = (89, 90, 100, 120, 121)
FP8_CONVERTED = FP8_PRODUCTS  # targets with e4m3 as a type, which convert two to fp16 at once
LARGE = (90, 100)  # targets with 227 KiB of shared memory
WIDEST = 256  # columns of a key
HEADS = 128  # of one product, at most
TOKENS = 8  # of one product, at most
KEYS = 64  # of one product
FILL = 2048  # logits of a tile that are set to -inf together
WAVES = 4  # of programs: rows differ in length, and later waves even that out
MIN_TILES = 4  # of keys per program, to pay for loading its queries
# Columns of one product: float32 without tensor cores holds whole rows in registers, so short ones.
MAX_SLICE = {"ieee": 16, "tf32": 512}


class Config(NamedTuple):
    block_n: int
    columns: int  # tokens times heads of one product, at most
    num_warps: int
    depth: int  # key tiles in flight


# On LARGE targets and elsewhere. 256 columns let one tile of keys serve four tokens of 64 heads,
# and two programs share a multiprocessor: one multiplies while the other sums. H200: 128 columns
# lost by 3 % at 65536 keys, eight warps by 20 %. Keys that are decoded, or looked up one by one,
# take the registers that deeper pipelines need.
TILES = {
    "ieee": (Config(16, 64, 4, 0), Config(16, 64, 4, 0)),
    "tf32": (Config(KEYS, 64, 4, 1), Config(KEYS, 64, 4, 1)),
    "several scales": (Config(KEYS, 64, 4, 1), Config(KEYS, 64, 4, 1)),
    "one token": (Config(KEYS, 64, 4, 3), Config(KEYS, 64, 4, 2)),
    "one token, gathered": (Config(KEYS, 64, 4, 2), Config(KEYS, 64, 4, 2)),
    "tokens": (Config(KEYS, 256, 4, 3), Config(KEYS, 128, 4, 2)),
    "tokens, gathered or decoded": (Config(KEYS, 256, 4, 1), Config(KEYS, 128, 4, 1)),
}


class Shape(NamedTuple):
    """What a kernel specializes on, beside where its keys lie."""

    HI: int
    DI: int
    SLICE: int  # columns of one product
    SCALES: int  # of a key
    products: torch.dtype
    PRECISION: str
    native: bool  # fp8 as a type of the kernel, not as bytes


def why_not_index(problem: Problem) -> str | None:
    if problem.dtype == torch.float64:
        return "takes queries of up to 32 bits, this is torch.float64"
    if problem.H == 0 or problem.D == 0:
        return f"needs heads, this is {problem.H} of {problem.D} values"
    if problem.D > WIDEST:
        return f"takes heads of up to {WIDEST} values, this is {problem.D}"
    return None


def shape_of(
    q: torch.dtype, keys: torch.dtype, HI: int, DI: int, SCALES: int, capability: int
) -> Shape:
    """Products in the narrowest type that holds both sides exactly; tf32 holds every 16-bit one."""
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
    columns = DI // SCALES
    while columns > MAX_SLICE[precision] and columns % 2 == 0:
        columns //= 2
    return Shape(HI, DI, columns, SCALES, products, precision, native)


def config_of(shape: Shape, tokens: int, gathered: bool, capability: int) -> Config:
    """The tile for so many tokens of a request; `gathered` if keys are looked up one by one."""
    large = nearest_target(capability) in LARGE and shape.SLICE <= 128
    if shape.products == torch.float32:
        case = shape.PRECISION
    elif shape.SCALES > 1:
        case = "several scales"
    elif tokens == 1:
        case = "one token, gathered" if gathered else "one token"
    else:
        decoded = shape.products != FP8
        case = "tokens, gathered or decoded" if gathered or decoded else "tokens"
    return TILES[case][0 if large else 1]


def tile_of(
    shape: Shape, tokens: int, *, chain: int, gathered: bool, capability: int
) -> tuple[Config, dict[str, Any]]:
    """The tile and the constants it implies. A key is the last of `chain` dependent loads, each of
    which takes its own stages."""
    config = config_of(shape, tokens, gathered, capability)
    heads = min(next_power_of_2(max(shape.HI, 16)), HEADS)
    if shape.products == torch.float32:
        heads = min(heads, config.columns)
    block_q = min(next_power_of_2(tokens), max(config.columns // heads, 1), TOKENS)
    if heads < shape.HI:  # queries are reloaded for every tile of keys
        block_q = 1
    fp8 = shape.products == FP8
    return config, {
        "HI": shape.HI,
        "DI": shape.DI,
        "SLICE": shape.SLICE,
        "BLOCK_Q": block_q,
        "BLOCK_H": heads,
        "BLOCK_N": config.block_n,
        "BLOCK_D": max(next_power_of_2(shape.SLICE), 32 if fp8 else 16),
        "FILL": FILL,
        "PRECISION": shape.PRECISION,
        # weights of 256 columns fit in registers only beside fp8 keys, and not beside tensor memory
        "HOLD": block_q * heads < 256 or (fp8 and nearest_target(capability) == 90),
        "ASM": assembly(),
        "UPCAST": interpreted(),
        "STAGES": 1 + chain * config.depth,
        "dtype": tl.float8e4nv if fp8 else getattr(tl, str(shape.products)[6:]),
    }


def as_stored(values: Tensor, shape: Shape) -> Tensor:
    """fp8 as the kernel takes it: as bytes where it decodes them itself."""
    if values.dtype in (FP8, torch.uint8):
        return values.view(FP8 if shape.native else torch.uint8)
    return values


def stored_type(dtype: torch.dtype, shape: Shape) -> str:
    """Triton's name for the type as_stored() gives."""
    fp8 = "fp8e4nv" if shape.native else "u8"
    return fp8 if dtype in (FP8, torch.uint8) else TYPES[dtype]


def stored_types(dtype: torch.dtype, format: str, shape: Shape) -> dict[str, str]:
    """Triton's types of queries and of a paged cache."""
    keys = get_format(format).dtype
    return {"q": "*" + stored_type(dtype, shape), "cache": "*" + stored_type(keys, shape)}


def programs_per_multiprocessor(config: Config) -> int:
    """Programs that a multiprocessor holds, or runs back to back."""
    return 2 if config.columns == 256 else 4


def keys_per_program(num_keys: int, tiles: int, config: Config, device: torch.device) -> int:
    resident = programs_per_multiprocessor(config) * max(multiprocessors(device), 1)
    runs = cdiv(WAVES * resident, tiles)
    blocks = cdiv(num_keys, config.block_n)
    return max(cdiv(blocks, runs), min(blocks, MIN_TILES)) * config.block_n


def paged_shape(dtype: torch.dtype, format: str, HI: int, DI: int, capability: int) -> Shape:
    layout = get_format(format)
    if layout.packed:
        return shape_of(dtype, FP8, HI, DI, max(DI // GROUP, 1), capability)
    return shape_of(dtype, layout.dtype, HI, DI, 1, capability)


def paged_constants(
    shape: Shape, format: str, BS: int, tokens: int, capability: int, *, aligned: bool
) -> tuple[Config, dict[str, Any]]:
    """As tile_of(), for a paged cache: a key's load waits for that of its block."""
    config, constants = tile_of(
        shape, tokens, chain=2, gathered=BS % KEYS != 0, capability=capability
    )
    constants["SCALES"] = shape.SCALES
    constants["BS"] = BS
    constants["FORMAT"] = INDEX.value if get_format(format).packed else PLAIN.value
    constants["ALIGNED"] = aligned
    constants["ONE_BLOCK"] = BS % config.block_n == 0
    return config, constants


def keys_aligned(cache: Tensor, format: str, DI: int) -> bool:
    return is_aligned(cache, layout_of(format, DI, cut=DI))


class PagedInputs(NamedTuple):
    """The tensors of index_logits and index_select, in the order of their kernels."""

    q_idx: Tensor
    w_idx: Tensor
    cache: Tensor
    block_table: Tensor
    query_start_loc: Tensor
    row_lens: Tensor


def paged_arguments(
    inputs: PagedInputs, shape: Shape
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """Tensors as kernels over a paged cache take them, and their strides."""
    q, w, cache, table, query_start_loc, row_lens = inputs
    table = inner_contiguous(table)
    q, keys = as_stored(q, shape), as_stored(cache, shape)
    tensors = (q, w, keys, table, query_start_loc.contiguous(), row_lens.contiguous())
    strides = (q.stride(0), q.stride(1), w.stride(0), keys.stride(0), keys.stride(1))
    return tensors, (*strides, table.stride(0))
