"""mqa_paged, Triton: folds a request's tokens into tiles and splits keys evenly among programs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from openmla.backends import Problem
from openmla.backends.segments import Segment
from openmla.backends.triton import _merge_parts as merge
from openmla.backends.triton import _paged as kernels
from openmla.backends.triton._build import capability_of, cdiv, next_power_of_2
from openmla.backends.triton._launch import (
    inner_contiguous,
    is_aligned,
    is_wide,
    out_dtype,
    query_pieces,
    scales_of,
)
from openmla.backends.triton._prepare import Launch
from openmla.backends.triton._spec import Case, Fixed, KernelSpec, case
from openmla.backends.triton._tiles import (
    E4M3,
    EIGHT_BITS_ON,
    FEW_HEADS,
    PLAIN,
    STORED_AS,
    Config,
    Shape,
    config_of,
    shape_of,
    tile_constants,
    why_not_latent,
)
from openmla.hardware import multiprocessors

LAUNCHES = 2  # the second merges the splits


def why_not(problem: Problem) -> str | None:
    return why_not_latent(problem)


class Schedule(NamedTuple):
    """Everything that is constant between calls of the same sizes."""

    launch: Launch
    grid: tuple[int, int]
    unit: int  # keys of the finest split
    merge: merge.Merge


class Sizes(NamedTuple):
    T: int
    H: int
    D: int
    C: int
    BS: int
    B: int
    M: int
    max_query_len: int
    run_length: int


@lru_cache(maxsize=4096)
def schedule_of(
    sizes: Sizes, dtype: torch.dtype, format: str, capability: int, units: int, *, causal: bool,
    aligned: bool, wide: bool, scales: int,
) -> Schedule:  # fmt: skip
    """Return the schedule for `units` multiprocessors."""
    T, H, D, C, BS, B, M, max_query_len, run_length = sizes
    shape = shape_of(dtype, [format], H, D, C)
    config, tokens = tile_of(shape, capability, format, max_query_len, run_length)
    tiles = cdiv(tokens * H, config.block_h)
    unit = cdiv(run_length, config.block_n) * config.block_n or unit_of(config)
    programs = max(occupancy(config) * max(units, 1) // tiles, 1)
    fixed = run_length > 0
    launch = SPEC.launch(
        shape, config, format, BS, tokens, causal=causal, fixed=fixed, aligned=aligned, wide=wide,
        scales=scales,
    )  # fmt: skip
    merged = merge.prepare_merge(
        T, H, C, rows=tiles * config.block_h, items=B * cdiv(max_query_len, tokens),
        programs=programs, units=max(cdiv(M * BS, unit), 1), fixed=fixed, overlapped=False,
    )  # fmt: skip
    return Schedule(launch, (tiles, programs), unit, merged)


def run(
    q_latent: Tensor,
    cache: Tensor,
    kv_scale: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    *,
    format: str,
    C: int,
    scale: float,
    causal: bool,
    max_query_len: int,
    run_length: int,
    q_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    T, H, D = q_latent.shape
    N, BS, W = cache.shape
    B, M = block_table.shape
    segment = Segment(cache, kv_scale, format, "paged", block_table=block_table)
    schedule = schedule_of(
        Sizes(T, H, D, C, BS, B, M, max_query_len, run_length), q_latent.dtype, format,
        capability_of(q_latent.device), multiprocessors(q_latent.device), causal=causal,
        aligned=is_aligned(segment), wide=is_wide(segment), scales=scales_of(q_scale),
    )  # fmt: skip
    dtype = out_dtype(q_latent)
    outputs = merge.make_outputs(q_latent, C, schedule.merge, dtype)
    if T == 0:
        return outputs.out.to(dtype), outputs.lse
    table = inner_contiguous(block_table)
    schedule.launch(
        schedule.grid,
        *query_pieces(q_latent, q_scale),
        query_start_loc.contiguous(),
        seq_lens.contiguous(),
        table,
        cache.view(torch.uint8) if format == "fp8" else cache,
        kv_scale,
        *outputs,
        B,
        T,
        schedule.unit,
        scale,
        q_latent.stride(0),
        q_latent.stride(1),
        cache.stride(0),
        cache.stride(1),
        W,
        N,
        M,
        table.stride(0),
        schedule.merge.rows,
    )
    merge.merge_parts(schedule.merge, outputs)
    return outputs.out.to(dtype), outputs.lse


def tile_of(
    shape: Shape, capability: int, format: str, max_query_len: int, run_length: int
) -> tuple[Config, int]:
    """Return the tile and the number of query tokens that share it: a power of two if they fit, so
    that few token counts need their own kernel. With fixed runs only heads decide: a row's bits
    must not depend on how many tokens other requests have."""
    rows = shape.H if run_length else shape.H * max_query_len
    config = config_of(shape._replace(H=rows), capability, [("paged", format)])
    return config, max(min(config.block_h // shape.H, next_power_of_2(max_query_len)), 1)


def occupancy(config: Config) -> int:
    """Return the number of resident programs per multiprocessor."""
    return 2 if config.block_h <= FEW_HEADS else 1


def unit_of(config: Config) -> int:
    """Return the keys of the finest split; shorter runs cost more in prologue and merge than they
    save."""
    return 2 * config.block_n if config.block_n < 64 else config.block_n


def fix(
    shape: Shape, config: Config, format: str, BS: int, tokens: int, *, causal: bool, fixed: bool,
    aligned: bool, wide: bool, scales: int = 0,
) -> Fixed:  # fmt: skip
    constants = {
        **tile_constants(shape, config, aligned=aligned, wide=wide),
        "FORMAT": STORED_AS[format],
        "BS": BS,
        "ONE_BLOCK": BS % config.block_n == 0,
        "TOKENS": tokens,
        "CAUSAL": causal,
        "FIXED": fixed,
        "BLOCK_T": next_power_of_2(tokens),
        "Q_SCALES": scales,
    }
    return Fixed(constants, config.num_warps, config.num_stages)


def cases(capability: int) -> Iterator[Case]:
    """Few heads and many, and few with draft tokens; 16-bit queries and e4m3."""
    found = [(torch.bfloat16, format) for format in ("bf16", "fp8", "fp8_ds_mla")]
    if capability in EIGHT_BITS_ON:
        found += [(E4M3, "fp8"), (E4M3, "fp8_ds_mla")]
    for (dtype, format), (H, new) in product(found, ((16, 1), (128, 1), (8, 4))):
        eight = dtype == E4M3
        shape = shape_of(dtype, [format], H, 576, 512)
        config, tokens = tile_of(shape, capability, format, new, 0)
        yield case(
            f"paged-{format}{'-e4m3' * eight}-H{H}x{new}-D576", shape, config, format, 64, tokens,
            causal=True, fixed=False, aligned=True, wide=False, scales=2 * eight,
            types={
                "q": "*u8" if eight else "*bf16",
                "cache": "*bf16" if STORED_AS[format] == PLAIN else "*u8",
            },
        )  # fmt: skip


SPEC = KernelSpec(
    kernels._paged_kernel,
    fix,
    types={
        "*bf16": "out",
        "*fp32": "lse part part_lse kv_scale q_scale",
        "*i32": "query_start_loc seq_lens table spans",
        "fp32": "qk_scale",
    },
    cases=cases,
    fp_fusion=True,
)


SPECS = (SPEC, merge.PARTS, merge.FIXED)
