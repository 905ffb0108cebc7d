"""Which tile a problem of latent attention is given, and what a kernel is compiled for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton.language as tl

from openmla.backends import Problem
from openmla.backends.triton._build import (
    GFX942,
    assembly,
    interpreted,
    nearest_target,
    next_power_of_2,
)
from openmla.backends.triton._versions import DISABLE_LICM_STOPS_TRITON
from openmla.cache.format import GROUP

SMALL = (86, 89, 120)  # targets with 99 KiB of shared memory
KINDS = {"slots": 0, "positions": 1, "window": 2, "prefix": 3, "paged": 4}
PLAIN, FP8, PACKED, V4 = range(4)
LAYOUTS = {
    "fp32": PLAIN,
    "bf16": PLAIN,
    "fp16": PLAIN,
    "fp8": FP8,
    "fp8_ds_mla": PACKED,
    "fp8_ds_mla_exact": PACKED,
    "fp8_dsv4": V4,
}
# What a format's values fit in exactly, beside float32.
EXACT_IN = {
    "bf16": (torch.bfloat16,),
    "fp16": (torch.float16,),
    "fp8": (torch.bfloat16, torch.float16),
    "fp8_ds_mla": (torch.bfloat16, torch.float16),
    "fp8_dsv4": (torch.bfloat16,),
}
PRODUCTS = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


class Config(NamedTuple):
    block_h: int
    block_n: int
    num_warps: int
    num_stages: int
    columns: int = 512  # of the first tile of a row; what is left is a second one
    hoist: bool = True  # what a loop does not change, out of it: takes registers


class Shape(NamedTuple):
    """What a kernel is compiled for, beside segments."""

    H: int
    C: int
    MAIN: int
    ROPE: int
    products: torch.dtype
    PRECISION: str


def why_not_latent(problem: Problem) -> str | None:
    if problem.dtype not in PRODUCTS:
        return f"takes 16- and 32-bit queries, this is {problem.dtype}"
    for format in problem.format.split():
        if format not in LAYOUTS:
            return f"cache format {format} is not implemented"
        if LAYOUTS[format] == PACKED and problem.C not in (packed_main(problem.D), problem.D):
            return (
                f"reads values of {packed_main(problem.D)} columns from {format}, not {problem.C}"
            )
    layouts = {LAYOUTS[format] for format in problem.format.split()}
    if layouts >= {PACKED, V4} and packed_main(problem.D) != problem.D:
        return f"reads rows of {problem.D} values cut in one place, not as {problem.format}"
    if problem.D > 1024:
        return f"holds rows of up to 1024 values, this is {problem.D}"
    return None


def packed_main(D: int) -> int:
    return D // GROUP * GROUP


def shape_of(dtype: torch.dtype, formats: Sequence[str], H: int, D: int, C: int) -> Shape:
    """Where rows are cut in two, and in which precision products are taken: 16-bit numbers where
    query and rows both fit in one kind of them, else float32, as tf32 if 16 bits were all."""
    layouts = {LAYOUTS[format] for format in formats}
    main = C
    if V4 in layouts:
        main = D
    elif PACKED in layouts:
        main = packed_main(D)
    if all(dtype in EXACT_IN.get(format, ()) for format in formats):
        return Shape(H, C, main, D - main, dtype, "tf32")
    narrow = dtype.itemsize == 2 and all(format in EXACT_IN for format in formats)
    return Shape(H, C, main, D - main, torch.float32, "tf32" if narrow else "ieee")


def config_of(shape: Shape, capability: int, segments: Sequence[tuple[str, str]]) -> Config:
    """The tile for a shape and segments, (kind, format) each, on a target: the largest that does
    not spill. Rows that are decoded pass through registers and want smaller ones.

    Evidence: H200, bench/results/triton_latent_h200.json; other rows were swept and lost. Two tiles
    of 256 columns halve the rows a warp gathers, which pays for 16 heads and costs for 64, unless
    what is decoded at once would not fit otherwise.
    """
    small, wide, hopper = nearest_target(capability) in SMALL, capability >= 90, capability < 100
    if shape.products == torch.float32:
        return Config(16, 16, 4, 1)
    layouts = {LAYOUTS[format] for _, format in segments}
    if capability == GFX942:  # compiled, never run: what does not spill
        return Config(16, 32, 4, 1) if layouts == {PLAIN} else Config(16, 16, 4, 1, 256)
    few = shape.H <= 16 or small
    if layouts != {PLAIN}:
        if few:
            return Config(16, 32, 4, 2, 256 if V4 in layouts else 512)
        if wide and hopper:
            if V4 in layouts:
                return Config(64, 64, 8, 2, 256, hoist=False)
            return Config(64, 64, 8, 2, hoist=segments[0][0] != "paged")
        if wide and layouts & {PACKED, V4}:  # on SM100 products of 64 heads spill here
            return Config(16, 32, 4, 2, 256 if V4 in layouts else 512)
        hoist = DISABLE_LICM_STOPS_TRITON and not layouts & {PACKED, V4}
        return Config(32, 32, 8, 2 if wide else 1, 256 if V4 in layouts else 512, hoist=hoist)
    named = any(kind == "positions" for kind, _ in segments)
    if few:
        block_n = 32 if small or (named and not wide) else 64
        return Config(16, block_n, 4, 2, 256, hoist=DISABLE_LICM_STOPS_TRITON)
    if not wide:
        return Config(32, 64, 8, 2)
    if not hopper:
        return Config(64, 32, 8, 2)
    if named or len(segments) > 1:
        return Config(64, 64, 8, 2, 256, hoist=False)
    return Config(64, 64, 8, 2)


def constants_of(
    shape: Shape,
    config: Config,
    segments: Sequence[tuple[str, str, int]],
    *,
    aligned: bool,
    wide: bool,
    causal: bool,
    sink: bool,
    split: bool,
) -> dict[str, Any]:
    (kind_1, format_1, BS_1), (kind_2, format_2, BS_2) = segments[0], segments[-1]
    return {
        "H": shape.H,
        "C": shape.C,
        "MAIN": shape.MAIN,
        "ROPE": shape.ROPE,
        "KIND_1": KINDS[kind_1],
        "FORMAT_1": LAYOUTS[format_1],
        "BS_1": BS_1,
        "ONE_BLOCK_1": kind_1 in ("paged", "prefix") and BS_1 % config.block_n == 0,
        "KIND_2": KINDS[kind_2],
        "FORMAT_2": LAYOUTS[format_2],
        "BS_2": BS_2,
        "ONE_BLOCK_2": kind_2 in ("paged", "prefix") and BS_2 % config.block_n == 0,
        "SECOND": len(segments) == 2,
        "CAUSAL": causal,
        "SINK": sink,
        "SPLIT": split,
        "ALIGNED": aligned,
        "ASM": assembly(),
        "OFFSET": tl.int64 if wide else tl.int32,
        "BLOCK_H": config.block_h,
        "BLOCK_N": config.block_n,
        "BLOCK_A": min(max(next_power_of_2(shape.MAIN), 16), config.columns),
        "BLOCK_B": max(next_power_of_2(max(shape.MAIN - config.columns, 1)), 16),
        "BLOCK_R": max(next_power_of_2(shape.ROPE), 16),
        "PRECISION": shape.PRECISION,
        "UNCHAINED": assembly() and 16 * config.num_warps > config.block_h > 16,
        "UPCAST": interpreted(),
        "STAGES": config.num_stages,
        "HOIST": config.hoist,
        "dtype": PRODUCTS[shape.products],
    }
