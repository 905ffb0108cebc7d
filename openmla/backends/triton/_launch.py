"""Launching latent attention: into how many runs keys are split, where partial results go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from openmla.backends.segments import Segment
from openmla.backends.triton import _latent as kernels
from openmla.backends.triton._build import (
    capability_of,
    cdiv,
    interpreted,
    next_power_of_2,
)
from openmla.backends.triton._tiles import (
    FEW_HEADS,
    PACKED,
    STORED_AS,
    V4,
    config_of,
    constants_of,
    shape_of,
)
from openmla.hardware import multiprocessors

LOG2E = kernels.LOG2E.value
FP_FUSION = True
TOKENS = 65535  # of one launch: the limit of a grid's second dimension
# Tiles of merge_runs: runs and columns of one program, narrow columns where there are few programs.
MERGED_RUNS = 16
MERGED_COLUMNS = 512
MERGED_COLUMNS_NARROW = 128


def run_latent(
    q: Tensor,
    query_start_loc: Tensor,
    positions: Tensor,
    segments: Sequence[Segment],
    sink: Tensor | None,
    *,
    C: int,
    scale: float,
    width: int,
    run_length: int,
) -> tuple[Tensor, Tensor]:
    """Launch over all tokens. Rows are split every run_length, else into as many runs as fill the
    machine; `width` is the most rows of a token."""
    T, H, D = q.shape
    # the interpreter truncates where it should round: let torch round
    out = q.new_empty((T, H, C), dtype=torch.float32 if interpreted() else q.dtype)
    lse = q.new_empty((T, H), dtype=torch.float32)
    if T == 0:
        return out.to(q.dtype), lse
    shape = shape_of(q.dtype, [part.format for part in segments], H, D, C)
    capability = capability_of(q.device)
    config = config_of(shape, capability, [(part.kind, part.format) for part in segments])
    tiles = cdiv(H, config.block_h)
    run_length = cdiv(run_length, config.block_n) * config.block_n
    X = num_runs(tiles * T, cdiv(width, config.block_n), q.device, config.block_h)
    if run_length:
        X = max(cdiv(width, run_length), 1)
    # with fixed runs the sink is always applied by merge_runs: the same rounding for any X
    split = X > 1 or (run_length > 0 and sink is not None)
    target, target_lse = out, lse
    if split:
        target = q.new_empty((T, X, H, C), dtype=torch.float32)
        target_lse = q.new_empty((T, X, H), dtype=torch.float32)
    B = query_start_loc.shape[0] - 1
    segments = [flattened(part) for part in segments]
    first, second = segments[0], segments[-1]
    constants = constants_of(
        shape, config, [(part.kind, part.format, part.cache.shape[1]) for part in segments],
        aligned=all(map(is_aligned, segments)), wide=any(map(is_wide, segments)),
        sink=sink is not None and not split, split=split,
    )  # fmt: skip
    unused = query_start_loc = query_start_loc.contiguous()
    for first_token in range(0, T, TOKENS):
        kernels._latent_kernel[(tiles, min(T - first_token, TOKENS), X)](
            q,
            query_start_loc,
            positions.contiguous(),
            lse if sink is None else sink,
            *_tensors(first, unused),
            *_tensors(second, unused),
            target,
            target_lse,
            B,
            first_token,
            scale,
            q.stride(0),
            q.stride(1),
            X,
            run_length,
            *_sizes(first),
            *_sizes(second),
            **constants,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            enable_fp_fusion=FP_FUSION,
        )
    if split:
        merge_runs(target, target_lse, sink, out, lse, fixed=bool(run_length))
    return out.to(q.dtype), lse


def merge_runs(
    part: Tensor, part_lse: Tensor, sink: Tensor | None, out: Tensor, lse: Tensor, *, fixed: bool
) -> None:
    """part [T, X, H, C] and part_lse [T, X, H] into out and lse; the sink counts once, here. With
    `fixed` runs the order of the sum is fixed too: neither empty runs at the end nor the number of
    tokens, by way of wider tiles, may change a bit."""
    T, X, H, C = part.shape
    constants = merge_constants(T, X, H, C, sink=sink is not None, fixed=fixed)
    kernels._merge_runs_kernel[(T * H, cdiv(C, constants["BLOCK_C"]))](
        part,
        part_lse,
        lse if sink is None else sink,
        out,
        lse,
        X,
        **constants,
        num_warps=4,
        num_stages=3,
        enable_fp_fusion=FP_FUSION,
    )


def merge_constants(T: int, X: int, H: int, C: int, *, sink: bool, fixed: bool) -> dict[str, Any]:
    # few rows have many runs and few programs: narrower columns make more of them
    narrow = fixed or X > 16 or (X > 8 and T * H < 256)
    return {
        "H": H,
        "C": C,
        "SINK": sink,
        "BLOCK_X": MERGED_RUNS if fixed else min(next_power_of_2(X), MERGED_RUNS),
        "BLOCK_C": min(next_power_of_2(C), MERGED_COLUMNS_NARROW if narrow else MERGED_COLUMNS),
    }


def flattened(part: Segment) -> Segment:
    """Slots of a cache without padding between pages, as blocks of one row: no division by BS."""
    N, BS, W = part.cache.shape
    if part.kind != "slots" or STORED_AS[part.format] == V4 or not is_dense(part.cache):
        return part
    return part._replace(
        cache=part.cache.as_strided((N * BS, 1, W), (part.cache.stride(1),) * 2 + (1,))
    )


def is_dense(cache: Tensor) -> bool:
    """Whether pages follow one another without padding, so that a slot is a row index."""
    return cache.stride(0) == cache.shape[1] * cache.stride(1)


def num_runs(programs: int, blocks: int, device: torch.device, block_h: int) -> int:
    """Runs a token's rows are split into: one wave, all of equal length. Occupancy is two programs
    of 16 heads per multiprocessor, one of more heads. Runs of one block only pay where each has a
    multiprocessor to itself: otherwise two blocks save a partial result to write and merge."""
    sms = max(multiprocessors(device), 1)
    wanted = (2 if block_h <= FEW_HEADS else 1) * sms // max(programs, 1)
    blocks_per_run = cdiv(blocks, max(wanted, 1))
    if blocks_per_run == 1 and programs * blocks > sms:
        blocks_per_run = 2
    return max(cdiv(blocks, max(blocks_per_run, 1)), 1)


def is_aligned(part: Segment) -> bool:
    """Whether scales and bf16 columns inside bytes lie on multiples of 4."""
    if STORED_AS[part.format] < PACKED:
        return True
    cache = part.cache
    return cache.data_ptr() % 4 == 0 and cache.stride(0) % 4 == 0 and cache.stride(1) % 4 == 0


def is_wide(part: Segment) -> bool:
    """Whether offsets into a cache need 64 bits; 32 halve the registers of a gather."""
    return part.cache.shape[0] * part.cache.stride(0) >= 2**31


def inner_contiguous(table: Tensor) -> Tensor:
    """Kernels assume stride 1 in the last dimension; these tables are small enough to copy."""
    return table if table.stride(-1) == 1 or table.shape[-1] < 2 else table.contiguous()


def _tensors(part: Segment, unused: Tensor) -> tuple[Tensor, ...]:
    cache = part.cache.view(torch.uint8) if part.format == "fp8" else part.cache
    tables = (part.rows, part.row_lens, part.block_table)
    return (
        cache,
        part.kv_scale,
        *(unused if each is None else inner_contiguous(each) for each in tables),
    )


def _sizes(part: Segment) -> tuple[int, ...]:
    N, _, W = part.cache.shape
    table, rows = (
        None if each is None else inner_contiguous(each) for each in (part.block_table, part.rows)
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
