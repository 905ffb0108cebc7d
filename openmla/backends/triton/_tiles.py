"""The tile latent attention uses for a problem, and its compile-time constants."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton.language as tl

from openmla.backends import Problem
from openmla.backends.triton import _latent_rows as rows
from openmla.backends.triton import _primitives as formats
from openmla.backends.triton._build import (
    GFX942,
    TARGETS,
    assembly,
    interpreted,
    nearest_target,
    next_power_of_2,
)
from openmla.backends.triton._versions import DISABLE_LICM_STOPS_TRITON
from openmla.cache.format import GROUP

SMALL = (86, 89, 120, 121)  # targets with 99 KiB of shared memory
KINDS = {
    "slots": rows.SLOTS.value,
    "positions": rows.POSITIONS.value,
    "window": rows.WINDOW.value,
    "prefix": rows.PREFIX.value,
    "paged": rows.PAGED.value,
}
PLAIN, FP8, PACKED, V4 = (
    each.value for each in (formats.PLAIN, formats.FP8, formats.PACKED, formats.V4)
)
STORED_AS = {
    "fp32": PLAIN,
    "bf16": PLAIN,
    "fp16": PLAIN,
    "fp8": FP8,
    "fp8_ds_mla": PACKED,
    "fp8_ds_mla_exact": PACKED,
    "fp8_dsv4": V4,
}
# Query dtypes that hold a format's values exactly, beside float32.
EXACT_IN = {
    "bf16": (torch.bfloat16,),
    "fp16": (torch.float16,),
    "fp8": (torch.bfloat16, torch.float16),
    "fp8_ds_mla": (torch.bfloat16, torch.float16),
    "fp8_dsv4": (torch.bfloat16,),
}
PRODUCTS = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
E4M3 = torch.float8_e4m3fn
EIGHT_BITS_ON = (89, 90, 100, 120, 121)  # targets with products of e4m3
LEAST_COLUMNS = 16  # of a product; 32 of eight bits
WIDEST = 1024  # columns of a row beside its shared ones, held as two tiles of a power of two
WIDE_ROWS = 512  # columns beside the shared ones from which on tiles are other ones
FEW_HEADS = 16  # the least rows of a tensor core product: one tile has them all
MMA_ROWS = 16  # a warp's rows of a product


class Config(NamedTuple):
    block_h: int
    block_n: int
    num_warps: int
    num_stages: int
    columns: int = 512  # of a row's first tile; the rest is a second one
    hoist: bool = True  # loop-invariant code out of the loop: costs registers


def _on(
    sm80: Config, small: Config, sm90: Config, sm100: Config, gfx942: Config
) -> dict[int, Config]:
    by_target = {80: sm80, **dict.fromkeys(SMALL, small), 90: sm90, 100: sm100, GFX942: gfx942}
    assert set(by_target) == set(TARGETS)
    return by_target


# The largest tiles that do not spill, by rows, whether there are more than FEW_HEADS heads, and
# target. SM90's were swept on an H200 (bench/results/triton_latent_h200.json): all others lost, but
# for plain rows of many heads: SM90 was 4 to 8 % faster, and its lse exceeded the budget, as one
# chain of 512 columns does. The other targets' were compiled only.
#
# Two tiles of 256 columns halve the rows that a warp gathers: faster for 16 heads, slower for 64
# unless the decoded columns of one tile would not fit into registers. Rows that are decoded pass
# through registers and take smaller tiles. Not hoisting recomputes addresses rather than hold them
# in registers that would spill. DISABLE_LICM_STOPS_TRITON: there it would also store queries to
# shared memory in every iteration, so small tiles hoist.
FLOAT32 = Config(16, 16, 4, 1)  # float32 products hold whole rows in registers
GATHER_64 = Config(16, 64, 4, 2, 256, hoist=DISABLE_LICM_STOPS_TRITON)
GATHER_32 = Config(16, 32, 4, 2, 256, hoist=DISABLE_LICM_STOPS_TRITON)
SM80 = Config(32, 64, 8, 2)
SM90 = Config(64, 64, 8, 2)
SM90_LEAN = Config(64, 64, 8, 2, 256, hoist=False)  # 234 registers; SM90 spills two segments
SM100 = Config(64, 32, 8, 2)
AMD = Config(16, 32, 4, 1)
DECODED = Config(16, 32, 4, 2)
DECODED_V4 = Config(16, 32, 4, 2, 256)
DECODED_AMD = Config(16, 16, 4, 1, 256)
FP8_SM80 = Config(32, 32, 8, 1, hoist=DISABLE_LICM_STOPS_TRITON)
FP8_SM100 = Config(32, 32, 8, 2, hoist=DISABLE_LICM_STOPS_TRITON)
PACKED_SM80 = Config(32, 32, 8, 1, hoist=False)
V4_SM80 = Config(32, 32, 8, 1, 256, hoist=False)
# Persistent programs hold the state of their part too: nothing is hoisted.
PAGED_16 = Config(16, 32, 4, 2, 256, hoist=DISABLE_LICM_STOPS_TRITON)
PAGED_16_WIDE = Config(16, 64, 4, 2, 256, hoist=DISABLE_LICM_STOPS_TRITON)
if DISABLE_LICM_STOPS_TRITON:  # 128 bytes of spill there
    PAGED_16_WIDE = PAGED_16
PAGED_SM80 = Config(32, 64, 8, 2, hoist=DISABLE_LICM_STOPS_TRITON)
PAGED_32 = Config(32, 32, 8, 2, hoist=DISABLE_LICM_STOPS_TRITON)
PAGED_32_PACKED = Config(32, 32, 8, 1, 256, hoist=False)
PAGED_FP8_SM90 = Config(64, 64, 8, 2, hoist=False)
E4M3_SM90 = Config(64, 32, 8, 2, hoist=False)  # with 64 keys it spills
E4M3_16_SM90 = Config(16, 32, 8, 2, 256)  # with 4 warps
# e4m3 queries that are widened: scales of query rows take registers, too, and SM90_LEAN spills 28
# bytes. With 32 keys nothing spills, and an H200 took 1.1 to 1.3 times as long.
PAGED_WIDENED_SM90 = SM90_LEAN
if DISABLE_LICM_STOPS_TRITON:  # 144 bytes of spill there
    PAGED_WIDENED_SM90 = Config(64, 32, 8, 2, 256, hoist=False)
PAGED_AMD = Config(16, 32, 4, 1, hoist=False)
PAGED_AMD_DECODED = Config(16, 16, 4, 1, 256, hoist=False)
# Rows of more than 512 columns beside the shared ones, as dots3's sliding layers have, in two tiles
# of 512: eight warps hold what 16 heads accumulate. Compiled only. SM80 to SM121 do not spill.
WIDE = Config(16, 32, 8, 2)
WIDE_SMALL = Config(16, 16, 8, 2)
WIDE_AMD = Config(16, 16, 4, 1, hoist=False)  # 68 bytes of spill with group scales
TILES = {
    ("plain", False): _on(GATHER_64, GATHER_32, GATHER_64, GATHER_64, AMD),
    ("plain", True): _on(SM80, GATHER_32, SM90_LEAN, SM100, AMD),
    ("positions", False): _on(GATHER_32, GATHER_32, GATHER_64, GATHER_64, AMD),
    ("positions", True): _on(SM80, GATHER_32, SM90_LEAN, SM100, AMD),
    ("two segments", False): _on(GATHER_64, GATHER_32, GATHER_64, GATHER_64, AMD),
    ("two segments", True): _on(SM80, GATHER_32, SM90_LEAN, SM100, AMD),
    ("fp8", False): _on(DECODED, DECODED, DECODED, DECODED, DECODED_AMD),
    ("fp8", True): _on(FP8_SM80, DECODED, SM90, FP8_SM100, DECODED_AMD),
    ("paged plain", False): _on(PAGED_16, PAGED_16, PAGED_16_WIDE, PAGED_16, PAGED_AMD),
    ("paged plain", True): _on(PAGED_SM80, PAGED_16, SM90_LEAN, PAGED_32, PAGED_AMD),
    ("paged fp8", False): _on(PAGED_16, PAGED_16, PAGED_16, PAGED_16, PAGED_AMD_DECODED),
    ("paged fp8", True): _on(PAGED_32, PAGED_16, PAGED_FP8_SM90, PAGED_32, PAGED_AMD_DECODED),
    # on SM100 products of 64 heads spill beside rows that are decoded with group scales
    ("packed", False): _on(DECODED, DECODED, DECODED, DECODED, DECODED_AMD),
    ("packed", True): _on(PACKED_SM80, DECODED, SM90, DECODED, DECODED_AMD),
    ("paged packed", False): _on(PAGED_16, PAGED_16, PAGED_16, PAGED_16, PAGED_AMD_DECODED),
    ("paged packed", True): _on(PAGED_32_PACKED, PAGED_16, SM90_LEAN, PAGED_16, PAGED_AMD_DECODED),
    ("wide", False): _on(WIDE, WIDE_SMALL, WIDE, WIDE, WIDE_AMD),
    ("v4", False): _on(DECODED_V4, DECODED_V4, DECODED_V4, DECODED_V4, DECODED_AMD),
    ("v4", True): _on(V4_SM80, DECODED_V4, SM90_LEAN, DECODED_V4, DECODED_AMD),
}  # fmt: skip


class Shape(NamedTuple):
    """What a kernel specializes on, beside its segments."""

    H: int
    C: int
    MAIN: int
    ROPE: int
    products: torch.dtype
    PRECISION: str
    e4m3: bool = False  # queries, with a scale per row
    eight_bits: bool = False  # and their products with rows; else they are widened


def why_not_eight_bits(problem: Problem) -> str | None:
    """Why e4m3 queries are not taken."""
    if torch.version.hip is not None:
        return "takes 16- and 32-bit queries on this device"
    if problem.capability is not None and problem.capability < (8, 9):
        return "multiplies fp8 from SM89 on, this is SM{}{}".format(*problem.capability)
    return None


def why_not_latent(problem: Problem) -> str | None:
    if problem.dtype == E4M3:
        reason = why_not_eight_bits(problem)
        if reason is not None:
            return reason
    elif problem.dtype not in PRODUCTS:
        return f"takes 16- and 32-bit queries, this is {problem.dtype}"
    for format in problem.format.split():
        if format not in STORED_AS:
            return f"cache format {format} is not implemented"
        if STORED_AS[format] == PACKED and problem.C not in (packed_main(problem.D), problem.D):
            return (
                f"reads values of {packed_main(problem.D)} columns from {format}, not {problem.C}"
            )
    stored_as = {STORED_AS[format] for format in problem.format.split()}
    if stored_as >= {PACKED, V4} and packed_main(problem.D) != problem.D:
        return f"reads rows of {problem.D} values cut in one place, not as {problem.format}"
    shape = shape_of(problem.dtype, problem.format.split(), problem.H, problem.D, problem.C)
    if shape.MAIN > WIDEST:
        return f"holds rows of up to {WIDEST} values beside shared ones, these have {shape.MAIN}"
    if shape.MAIN > WIDE_ROWS and shape.products == torch.float32:
        return f"multiplies rows of more than {WIDE_ROWS} values in 16 bits only"
    return None


def packed_main(D: int) -> int:
    return D // GROUP * GROUP


def shape_of(dtype: torch.dtype, formats: Sequence[str], H: int, D: int, C: int) -> Shape:
    """Where rows are cut in two, and the precision of products: a 16-bit type that holds queries
    and rows exactly, else float32, as tf32 if all inputs have 16 bits or fewer."""
    stored_as = {STORED_AS[format] for format in formats}
    main = C
    if V4 in stored_as:
        main = D
    elif PACKED in stored_as:
        main = packed_main(D)
    if dtype == E4M3:  # fp8 and bf16 hold it exactly; rows are decoded faster into bf16
        return Shape(H, C, main, D - main, torch.bfloat16, "tf32", True, stored_as == {FP8})
    if all(dtype in EXACT_IN.get(format, ()) for format in formats):
        return Shape(H, C, main, D - main, dtype, "tf32")
    narrow = dtype.itemsize == 2 and all(format in EXACT_IN for format in formats)
    return Shape(H, C, main, D - main, torch.float32, "tf32" if narrow else "ieee")


def config_of(shape: Shape, capability: int, segments: Sequence[tuple[str, str]]) -> Config:
    """The tile for a shape and its segments, (kind, format) each, on a target."""
    if shape.products == torch.float32:
        return FLOAT32
    stored_as = {STORED_AS[format] for _, format in segments}
    paged = "paged " if segments[0][0] == "paged" else ""
    if V4 in stored_as:
        case = "v4"
    elif PACKED in stored_as:
        case = f"{paged}packed"
    elif FP8 in stored_as:
        case = f"{paged}fp8"
    elif any(kind == "positions" for kind, _ in segments):
        case = "positions"
    else:
        case = "two segments" if len(segments) > 1 else f"{paged}plain"
    target, many = nearest_target(capability), shape.H > FEW_HEADS
    if shape.MAIN > WIDE_ROWS:
        return TILES["wide", False][target]
    if shape.eight_bits and target == 90 and (many or case == "paged fp8"):
        return E4M3_SM90 if many else E4M3_16_SM90
    if shape.e4m3 and target == 90 and (many or case == "plain"):
        return GATHER_32 if not many else PAGED_WIDENED_SM90 if paged else SM90_LEAN
    return TILES[case, many][target]


def tile_constants(shape: Shape, config: Config, *, aligned: bool, wide: bool) -> dict[str, Any]:
    """What kernels of latent attention specialise on alike."""
    least = 2 * LEAST_COLUMNS if shape.eight_bits else LEAST_COLUMNS
    return {
        "H": shape.H,
        "C": shape.C,
        "MAIN": shape.MAIN,
        "ROPE": shape.ROPE,
        "ALIGNED": aligned,
        "ASM": assembly(),
        "OFFSET": tl.int64 if wide else tl.int32,
        "BLOCK_H": config.block_h,
        "BLOCK_N": config.block_n,
        "BLOCK_A": min(max(next_power_of_2(shape.MAIN), least), config.columns),
        "BLOCK_B": max(next_power_of_2(max(shape.MAIN - config.columns, 1)), least),
        "BLOCK_R": max(next_power_of_2(shape.ROPE), least),
        "PRECISION": shape.PRECISION,
        # where several warps would compute the same rows of chained products: see unchain()
        "UNCHAINED": assembly() and MMA_ROWS * config.num_warps > config.block_h > MMA_ROWS,
        "UPCAST": interpreted(),
        "STAGES": config.num_stages,
        "HOIST": config.hoist,
        "dtype": PRODUCTS[shape.products],
        "EIGHT_BITS": shape.eight_bits,
    }
