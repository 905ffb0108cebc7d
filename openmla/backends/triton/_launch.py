"""Launching latent attention: what a problem is compiled for, how many runs, where partials go."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from openmla.backends import Problem
from openmla.backends.triton import _few_heads as few_heads
from openmla.backends.triton import _latent as kernels
from openmla.backends.triton._build import (
    TARGETS,
    TYPES,
    Build,
    capability_of,
    cdiv,
    interpreted,
    nearest_target,
    next_power_of_2,
)
from openmla.cache.format import GROUP, V4_ROPE
from openmla.hardware import multiprocessors

LOG2E = 1.4426950408889634
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


def config_of(shape: Shape, capability: int, segments: Sequence[tuple[str, str]]) -> Config:
    """The tile for a shape and segments, (kind, format) each, on a target: the largest that does
    not spill. Rows that are decoded pass through registers and want smaller ones.

    Evidence: H200, bench/results/triton_latent_h200.json; other rows were swept and lost. Two tiles
    of 256 columns halve the rows a warp gathers, which pays for 16 heads and costs for 64.
    """
    small, wide, hopper = nearest_target(capability) in SMALL, capability >= 90, capability < 100
    if shape.products == torch.float32:
        return Config(16, 16, 4, 1)
    layouts = {LAYOUTS[format] for _, format in segments}
    few, two = shape.H <= 16 or small, len(segments) > 1
    if layouts != {PLAIN}:
        if few:
            return Config(16, 32, 4, 2)
        if layouts == {PACKED} and wide:  # on SM100 products of 64 heads spill here
            return Config(64, 64, 8, 2) if hopper else Config(16, 32, 4, 2)
        return Config(32, 32, 8, 2 if wide else 1)
    named = any(kind == "positions" for kind, _ in segments)
    if few:
        return Config(16, 32 if small or (named and not wide) else 64, 4, 2, 256)
    if not wide:
        return Config(32, 64, 8, 2)
    return Config(64, 64 if hopper and not (two or named) else 32, 8, 2)


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
    config = config_of(shape, capability, [(part.kind, part.format) for part in segments])
    tiles = cdiv(H, config.block_h)
    X = num_runs(tiles * T, cdiv(width, config.block_n), q.device, config.block_h)
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
        sink=sink is not None and X == 1, split=X > 1,
    )  # fmt: skip
    nothing = query_start_loc = query_start_loc.contiguous()
    kernels._latent_kernel[(tiles, T, X)](
        q,
        query_start_loc,
        nothing if positions is None else positions.contiguous(),
        nothing if seq_lens is None else seq_lens.contiguous(),
        nothing if split_starts is None else split_starts.contiguous(),
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
        merge_runs(target, target_lse, sink, out, lse)
    return out.to(q.dtype), lse


def merge_runs(
    part: Tensor, part_lse: Tensor, sink: Tensor | None, out: Tensor, lse: Tensor
) -> None:
    """part [T, X, H, C] and part_lse [T, X, H] into out and lse; the sink counts once, here."""
    T, X, H, C = part.shape
    block_c = min(next_power_of_2(C), 512 if T * H >= 256 else 128)
    kernels._merge_runs_kernel[(T * H, cdiv(C, block_c))](
        part,
        part_lse,
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


def fits_few_heads(q: Tensor, part: Rows, C: int) -> bool:
    """Whether the kernel of few heads takes a segment: rows it knows, where 16 heads at a time pay:
    up to 32 heads, or so few tokens that head tiles fill the machine."""
    T, H, D = q.shape
    if interpreted() or part.kind != "slots" or part.format != "fp8_ds_mla":
        return False
    if (D, C, q.dtype) != (576, 512, torch.bfloat16) or flattened(part) is part:
        return False
    lies = part.cache.data_ptr() % 16 == 0 and part.cache.stride(1) % 16 == 0
    fits = part.cache.numel() < 2**33  # rows, not bytes, are counted in 32 bits
    return lies and fits and (H <= 32 or cdiv(H, 16) * T <= multiprocessors(q.device) // 4)


def run_few_heads(
    q: Tensor, query_start_loc: Tensor, part: Rows, sink: Tensor | None, *, scale: float
) -> tuple[Tensor, Tensor]:
    T, H, _ = q.shape
    assert part.rows is not None and part.row_lens is not None
    K = part.rows.shape[1]
    out = q.new_empty((T, H, 512))
    lse = q.new_empty((T, H), dtype=torch.float32)
    if T == 0:
        return out, lse
    tiles, BLOCK_N = cdiv(H, 16), 64
    X = num_runs(tiles * T, cdiv(K, BLOCK_N), q.device, 16)
    target, target_lse = out, lse
    if X > 1:
        target = q.new_empty((T, X, H, 512), dtype=torch.float32)
        target_lse = q.new_empty((T, X, H), dtype=torch.float32)
    N, BS, _ = part.cache.shape
    row = part.cache.stride(1)
    flat = part.cache.as_strided((N * BS, row), (row, 1))
    few_heads._few_heads_kernel[(tiles, T, X)](
        q,
        flat.view(torch.int32),
        flat.view(torch.float32),
        part.rows,
        part.row_lens,
        query_start_loc,
        lse if sink is None else sink,
        target,
        target_lse,
        query_start_loc.shape[0] - 1,
        N * BS,
        scale * LOG2E,
        q.stride(0),
        q.stride(1),
        part.rows.stride(0),
        K,
        X,
        ROW=row // 4,
        H=H,
        SPLIT=X > 1,
        SINK=sink is not None and X == 1,
        BLOCK_N=BLOCK_N,
        num_warps=4,
    )
    if X > 1:
        merge_runs(target, target_lse, sink, out, lse)
    return out, lse


def few_heads_builds() -> Iterator[Build]:
    kernel = few_heads._few_heads_kernel
    types = {
        **dict.fromkeys(("floats", "sink", "out", "lse"), "*fp32"),
        **dict.fromkeys(("words", "slots", "row_lens", "query_start_loc"), "*i32"),
        "q": "*bf16",
        "qk_scale": "fp32",
    }
    for capability in TARGETS:
        constants = {"ROW": 164, "H": 16, "SPLIT": True, "SINK": False, "BLOCK_N": 64}
        signature = {
            name: "constexpr" if name in constants else types.get(name, "i32")
            for name in kernel.arg_names
        }
        yield Build("few-heads-fp8_ds_mla-H16", kernel, signature, constants, 4, 1, capability)


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


def num_runs(programs: int, blocks: int, device: torch.device, block_h: int) -> int:
    """Runs a token's rows are cut into: enough to fill the machine once, no more than blocks. Two
    programs of 16 heads are on a multiprocessor at a time, one of more."""
    at_once = (2 if block_h <= 16 else 1) * max(multiprocessors(device), 1)
    wanted = at_once // max(programs, 1)
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
        "BLOCK_H": config.block_h,
        "BLOCK_N": config.block_n,
        "BLOCK_A": min(max(next_power_of_2(shape.MAIN), 16), config.columns),
        "BLOCK_B": max(next_power_of_2(max(shape.MAIN - config.columns, 1)), 16),
        "BLOCK_R": max(next_power_of_2(shape.ROPE), 16),
        "PRECISION": shape.PRECISION,
        "UPCAST": interpreted(),
        "STAGES": config.num_stages,
        "dtype": PRODUCTS[shape.products],
    }


def _tensors(part: Rows, nothing: Tensor) -> tuple[Tensor, ...]:
    cache = part.cache.view(torch.uint8) if part.format == "fp8" else part.cache
    names = (part.rows, part.row_lens, part.block_table)
    return (cache, part.kv_scale, *(nothing if each is None else in_order(each) for each in names))


def in_order(names: Tensor) -> Tensor:
    """Kernels step through the last dimension; what comes otherwise is a small table."""
    return names if names.stride(-1) == 1 or names.shape[-1] < 2 else names.contiguous()


def _sizes(part: Rows) -> tuple[int, ...]:
    N, _, W = part.cache.shape
    table, rows = (
        None if each is None else in_order(each) for each in (part.block_table, part.rows)
    )
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


def latent_builds(*kinds: str) -> Iterator[Build]:
    """One build per kind of segments, format, number of heads and target."""
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
    config = config or config_of(shape, capability, [(kind, format) for kind in kinds])
    BS = 1 if kinds == ["slots"] else BS  # as flattened() makes it
    constants = constants_of(
        shape, config, [(kind, format, BS) for kind in kinds], aligned=True,
        wide=False, causal=kinds[0] == "paged", sink=len(kinds) > 1 and not split, split=split,
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
