"""Launching latent attention: how many runs, where partials go."""

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
    LAYOUTS,
    PACKED,
    V4,
    config_of,
    constants_of,
    shape_of,
)
from openmla.hardware import multiprocessors

LOG2E = 1.4426950408889634
FP_FUSION = True
TOKENS = 65535  # of one launch: the second dimension of a grid has no more


def run_latent(
    q: Tensor,
    query_start_loc: Tensor,
    positions: Tensor | None,
    segments: Sequence[Segment],
    *,
    sink: Tensor | None = None,
    seq_lens: Tensor | None = None,
    split_starts: Tensor | None = None,
    causal: bool = False,
    C: int,
    scale: float,
    width: int = 0,
    run_length: int = 0,
) -> tuple[Tensor, Tensor]:
    """Launch over all tokens. Rows are cut where split_starts say, else after run_length, else in
    as many runs as suit; `width` bounds them then."""
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
    run_length = cdiv(run_length, config.block_n) * config.block_n
    X = num_runs(tiles * T, cdiv(width, config.block_n), q.device, config.block_h)
    if run_length:
        X = max(cdiv(width, run_length), 1)
    if split_starts is not None:
        X = split_starts.shape[1] - 1
    # with fixed runs a sink's share is a product of its own, however many runs there are
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
        aligned=all(map(is_aligned, segments)), wide=any(map(is_wide, segments)), causal=causal,
        sink=sink is not None and not split, split=split,
    )  # fmt: skip
    nothing = query_start_loc = query_start_loc.contiguous()
    for first_token in range(0, T, TOKENS):
        kernels._latent_kernel[(tiles, min(T - first_token, TOKENS), X)](
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
        fixed = bool(run_length) or split_starts is not None
        merge_runs(target, target_lse, sink, out, lse, fixed=fixed)
    return out.to(q.dtype), lse


def merge_runs(
    part: Tensor, part_lse: Tensor, sink: Tensor | None, out: Tensor, lse: Tensor, *, fixed: bool
) -> None:
    """part [T, X, H, C] and part_lse [T, X, H] into out and lse; the sink counts once, here. Where
    runs are `fixed`, so is the order of the sum: empty ones at the end do not change it. Nor may
    the number of tokens: threads of a wider tile would add runs up in another order."""
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
    narrow = fixed or X > 16 or (X > 8 and T * H < 256)  # few rows, which have many runs
    return {
        "H": H,
        "C": C,
        "SINK": sink,
        "BLOCK_X": 16 if fixed else min(next_power_of_2(X), 16),
        "BLOCK_C": min(next_power_of_2(C), 128 if narrow else 512),
    }


def flattened(part: Segment) -> Segment:
    """Slots of a cache without padding between pages: blocks of one row, nothing to divide."""
    N, BS, W = part.cache.shape
    if part.kind != "slots" or LAYOUTS[part.format] == V4 or not is_dense(part.cache):
        return part
    return part._replace(
        cache=part.cache.as_strided((N * BS, 1, W), (part.cache.stride(1),) * 2 + (1,))
    )


def is_dense(cache: Tensor) -> bool:
    """Whether pages follow one another without padding, so that slots count rows."""
    return cache.stride(0) == cache.shape[1] * cache.stride(1)


def num_runs(programs: int, blocks: int, device: torch.device, block_h: int) -> int:
    """Runs a token's rows are cut into: enough to fill the machine once, all alike. Two programs of
    16 heads are on a multiprocessor at a time, one of more. A run of one block pays only where it
    has a multiprocessor to itself: one partial less to write and to merge."""
    units = max(multiprocessors(device), 1)
    wanted = (2 if block_h <= 16 else 1) * units // max(programs, 1)
    each = cdiv(blocks, max(wanted, 1))
    if each == 1 and programs * blocks > units:
        each = 2
    return max(cdiv(blocks, max(each, 1)), 1)


def is_aligned(part: Segment) -> bool:
    """Whether scales and 16-bit columns inside bytes can be read as what they are."""
    if LAYOUTS[part.format] < PACKED:
        return True
    cache = part.cache
    return cache.data_ptr() % 4 == 0 and cache.stride(0) % 4 == 0 and cache.stride(1) % 4 == 0


def is_wide(part: Segment) -> bool:
    """Whether offsets into a cache need 64 bits; where not, gathering takes half the registers."""
    return part.cache.shape[0] * part.cache.stride(0) >= 2**31


def _tensors(part: Segment, nothing: Tensor) -> tuple[Tensor, ...]:
    cache = part.cache.view(torch.uint8) if part.format == "fp8" else part.cache
    names = (part.rows, part.row_lens, part.block_table)
    return (
        cache,
        part.kv_scale,
        *(nothing if each is None else inner_contiguous(each) for each in names),
    )


def inner_contiguous(names: Tensor) -> Tensor:
    """Kernels step through the last dimension; what comes otherwise is a small table."""
    return names if names.stride(-1) == 1 or names.shape[-1] < 2 else names.contiguous()


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
