"""Launching latent attention: what a problem is compiled for, how many runs, where partials go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from openmla.backends import Problem
from openmla.backends.triton import _latent as kernels
from openmla.backends.triton._build import (
    TYPES,
    Build,
    capability_of,
    cdiv,
    interpreted,
    nearest_target,
    next_power_of_2,
    why_not_device,
)
from openmla.cache.format import GROUP, V4_ROPE
from openmla.hardware import multiprocessors

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


class Shape(NamedTuple):
    """What a kernel is compiled for, beside segments."""

    H: int
    C: int
    MAIN: int
    ROPE: int
    products: torch.dtype
    PRECISION: str


def why_not_latent(problem: Problem) -> str | None:
    reason = why_not_device(problem.device)
    if reason is not None:
        return reason
    if problem.dtype not in PRODUCTS:
        return f"takes 16- and 32-bit queries, this is {problem.dtype}"
    for format in problem.format.split():
        if format not in LAYOUTS:
            return f"cache format {format} is not implemented"
        if LAYOUTS[format] == PACKED and problem.C not in (packed_main(problem.D), problem.D):
            return (
                f"reads values of {packed_main(problem.D)} columns from {format}, not {problem.C}"
            )
    if problem.D > 1024:
        return f"holds rows of up to 1024 values, this is {problem.D}"
    return None


def packed_main(D: int) -> int:
    return D // GROUP * GROUP


def shape_of(dtype: torch.dtype, formats: Sequence[str], H: int, D: int, C: int) -> Shape:
    """Where rows are cut in two, and in which precision products are taken: 16-bit numbers where
    query and rows both fit in one kind of them, else float32, as tf32 if 16 bits were all."""
    layouts = {LAYOUTS[format] for format in formats}
    if V4 in layouts:
        main = D - V4_ROPE
    elif PACKED in layouts:
        main = packed_main(D)
    else:
        main = C
    if all(dtype in EXACT_IN.get(format, ()) for format in formats):
        return Shape(H, C, main, D - main, dtype, "tf32")
    narrow = dtype.itemsize == 2 and all(format in EXACT_IN for format in formats)
    return Shape(H, C, main, D - main, torch.float32, "tf32" if narrow else "ieee")


def config_of(shape: Shape, capability: int, packed: bool) -> Config:
    """The tile for a shape on a target. Evidence: docs/backends.md."""
    width = shape.MAIN + shape.ROPE
    small = nearest_target(capability) in (86, 89, 120)
    if shape.products == torch.float32:
        block_n = 16 if small or width > 320 else 32
        return Config(16, block_n, 4, 1)
    if small:
        return Config(16, 32, 4, 2)
    if shape.H <= 16 or capability < 90:
        return Config(16, 64, 4, 1 if packed else 2)
    if shape.H <= 32:
        return Config(32, 64, 4, 1 if packed else 2)
    return Config(64, 64, 8, 1 if packed else 2)


class Rows(NamedTuple):
    """A segment as the kernel takes it; absent tensors are None."""

    cache: Tensor
    kv_scale: Tensor
    format: str
    kind: str
    block_table: Tensor | None = None
    rows: Tensor | None = None
    row_lens: Tensor | None = None
    span: int = 0


def run_latent(
    q: Tensor,
    query_start_loc: Tensor,
    positions: Tensor | None,
    segments: Sequence[Rows],
    *,
    sink: Tensor | None = None,
    seq_lens: Tensor | None = None,
    split_starts: Tensor | None = None,
    causal: bool = False,
    C: int,
    scale: float,
    width: int = 0,
) -> tuple[Tensor, Tensor]:
    """Launch over all tokens; `width` bounds the rows of a token where no split_starts cut them."""
    T, H, D = q.shape
    # the interpreter cuts short where it should round: torch does it then
    out = q.new_empty((T, H, C), dtype=torch.float32 if interpreted() else q.dtype)
    lse = q.new_empty((T, H), dtype=torch.float32)
    if T == 0:
        return out.to(q.dtype), lse
    shape = shape_of(q.dtype, [part.format for part in segments], H, D, C)
    capability = capability_of(q.device)
    config = config_of(shape, capability, any(LAYOUTS[p.format] >= FP8 for p in segments))
    tiles = cdiv(H, config.block_h)
    X = num_runs(tiles * T, cdiv(width, config.block_n), q.device)
    if split_starts is not None:
        X = split_starts.shape[1] - 1
    target, target_lse = out, lse
    if X > 1:
        target = q.new_empty((T, X, H, C), dtype=torch.float32)
        target_lse = q.new_empty((T, X, H), dtype=torch.float32)
    B = query_start_loc.shape[0] - 1
    segments = [flattened(part) for part in segments]
    first, second = segments[0], segments[-1]
    constants = constants_of(
        shape, config, [(part.kind, part.format, part.cache.shape[1]) for part in segments],
        aligned=all(map(is_aligned, segments)), wide=any(map(is_wide, segments)), causal=causal,
        sink=sink is not None and X == 1, split=X > 1, B=B,
    )  # fmt: skip
    nothing = query_start_loc
    kernels._latent_kernel[(tiles, T, X)](
        q,
        query_start_loc,
        nothing if positions is None else positions,
        nothing if seq_lens is None else seq_lens,
        nothing if split_starts is None else split_starts,
        lse if sink is None else sink,
        *_tensors(first, nothing),
        *_tensors(second, nothing),
        target,
        target_lse,
        B,
        scale,
        q.stride(0),
        q.stride(1),
        X,
        *_sizes(first),
        *_sizes(second),
        **constants,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        enable_fp_fusion=True,
    )
    if X > 1:
        block_c = min(next_power_of_2(C), 512 if T * H >= 256 else 128)
        kernels._merge_runs_kernel[(T * H, cdiv(C, block_c))](
            target,
            target_lse,
            lse if sink is None else sink,
            out,
            lse,
            X,
            H=H,
            C=C,
            SINK=sink is not None,
            BLOCK_X=min(next_power_of_2(X), 16),
            BLOCK_C=block_c,
            num_warps=4,
            enable_fp_fusion=True,
        )
    return out.to(q.dtype), lse


def flattened(part: Rows) -> Rows:
    """Slots of a cache without padding between pages: blocks of one row, nothing to divide."""
    N, BS, W = part.cache.shape
    if (
        part.kind != "slots"
        or LAYOUTS[part.format] == V4
        or part.cache.stride(0) != BS * part.cache.stride(1)
    ):
        return part
    return part._replace(
        cache=part.cache.as_strided((N * BS, 1, W), (part.cache.stride(1),) * 2 + (1,))
    )


def num_runs(programs: int, blocks: int, device: torch.device) -> int:
    """Runs a token's rows are cut into: enough to fill the machine twice, no more than blocks."""
    wanted = 2 * max(multiprocessors(device), 1) // max(programs, 1)
    return max(min(wanted, blocks), 1)


def is_aligned(part: Rows) -> bool:
    """Whether scales and 16-bit columns inside bytes can be read as what they are."""
    if LAYOUTS[part.format] < PACKED:
        return True
    cache = part.cache
    return cache.data_ptr() % 4 == 0 and cache.stride(0) % 4 == 0 and cache.stride(1) % 4 == 0


def is_wide(part: Rows) -> bool:
    """Whether offsets into a cache need 64 bits; where not, gathering takes half the registers."""
    return part.cache.shape[0] * part.cache.stride(0) >= 2**31


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
    B: int,
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
        "ASM": not interpreted(),
        "OFFSET": tl.int64 if wide else tl.int32,
        "REQUESTS": next_power_of_2(max(B, 1)),
        "BLOCK_H": config.block_h,
        "BLOCK_N": config.block_n,
        # tiles of 256 columns: a warp loads half as many different rows as with 512
        "BLOCK_A": min(max(next_power_of_2(shape.MAIN), 16), 256),
        "BLOCK_B": max(next_power_of_2(max(shape.MAIN - 256, 1)), 16),
        "BLOCK_R": max(next_power_of_2(shape.ROPE), 16),
        "PRECISION": shape.PRECISION,
        "UPCAST": interpreted(),
        "STAGES": config.num_stages,
        "dtype": PRODUCTS[shape.products],
    }


def _tensors(part: Rows, nothing: Tensor) -> tuple[Tensor, ...]:
    cache = part.cache.view(torch.uint8) if part.format == "fp8" else part.cache
    absent = (part.rows, part.row_lens, part.block_table)
    return (cache, part.kv_scale, *(nothing if each is None else each for each in absent))


def _sizes(part: Rows) -> tuple[int, ...]:
    N, _, W = part.cache.shape
    table, rows = part.block_table, part.rows
    return (
        part.cache.stride(0),
        part.cache.stride(1),
        W,
        N,
        0 if table is None else table.shape[1],
        0 if rows is None else rows.shape[1],
        part.span,
        0 if rows is None else rows.stride(0),
        0 if table is None else table.stride(0),
    )


def latent_builds(*kinds: str) -> Any:
    """One build per kind of segments, format, number of heads and target."""
    from openmla.backends.triton._build import TARGETS

    for capability in TARGETS:
        for kind in kinds:
            parts = kind.split()
            formats = ("bf16", "fp8_dsv4") if len(parts) > 1 else ("bf16", "fp8", "fp8_ds_mla")
            for format in formats:
                D, C = (512, 512) if len(parts) > 1 else (576, 512)
                for H in (16, 128):
                    yield latent_build(capability, parts, format, H, D, C)


def latent_build(
    capability: int, kinds: Sequence[str], format: str, H: int, D: int, C: int,
    config: Config | None = None, dtype: torch.dtype = torch.bfloat16, split: bool = True,
    BS: int = 64,
) -> Build:  # fmt: skip
    shape = shape_of(dtype, [format], H, D, C)
    config = config or config_of(shape, capability, LAYOUTS[format] >= FP8)
    constants = constants_of(
        shape, config, [(kind, format, BS) for kind in kinds], aligned=True,
        wide=False, causal=kinds[0] == "paged", sink=len(kinds) > 1 and not split, split=split,
        B=64,
    )  # fmt: skip
    stored = {PLAIN: TYPES[dtype]}.get(LAYOUTS[format], "u8")
    result = "fp32" if split else TYPES[dtype]
    types = {
        "q": TYPES[dtype],
        "positions": "i64",
        "cache_1": stored,
        "cache_2": stored,
        "out": result,
        **dict.fromkeys(("sink", "lse", "kv_scale_1", "kv_scale_2"), "fp32"),
        **dict.fromkeys(
            ("query_start_loc", "seq_lens", "split_starts", "rows_1", "row_lens_1", "table_1",
             "rows_2", "row_lens_2", "table_2"), "i32"),
    }  # fmt: skip
    signature = {}
    for name in kernels._latent_kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name in types:
            signature[name] = "*" + types[name]
        else:
            signature[name] = "fp32" if name == "qk_scale" else "i32"
    return Build(
        f"latent-{'-'.join(kinds)}-{format}-H{H}-D{D}", kernels._latent_kernel, signature,
        constants, config.num_warps, config.num_stages, capability,
    )  # fmt: skip
