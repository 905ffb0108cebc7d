"""Launching latent attention over listed rows of 512 + 64: 16 heads a program, or on SM90 64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from openmla.backends.triton import _few_heads as few_heads
from openmla.backends.triton import _launch as launch
from openmla.backends.triton import _many_heads_v3 as many_heads_v3
from openmla.backends.triton._build import assembly, cdiv
from openmla.backends.triton._launch import Rows, in_order
from openmla.hardware import multiprocessors

# of the kernel of many heads: its odd and its loading warps, the even ones have the rest of 512;
# with others it spills
REGISTERS = {True: (192, 112), False: (224, 56)}  # packed rows, and those that are only copied
FP_FUSION = True


def fits_v3(q: Tensor, part: Rows, C: int) -> bool:
    """Whether these kernels take a segment: listed rows that lie as they know them."""
    if not assembly() or part.kind not in ("slots", "positions"):
        return False
    if (q.shape[2], C, q.dtype) != (576, 512, torch.bfloat16) or not launch.is_dense(part.cache):
        return False
    itemsize = part.cache.element_size()
    lies = part.cache.data_ptr() % 16 == 0 and part.cache.stride(1) * itemsize % 16 == 0
    # rows, not bytes, are counted in 32 bits; the first row is read for those that are not there
    return lies and 0 < part.cache.numel() < 2**33


def fits_few_heads(q: Tensor, part: Rows, C: int, run_length: int) -> bool:
    """Whether 16 heads at a time do, and pay."""
    packed = part.format == "fp8_ds_mla"
    return packed and fits_v3(q, part, C) and launch.few_heads_pay(q, run_length)


def fits_many_heads(q: Tensor, part: Rows, C: int, run_length: int) -> bool:
    """Whether 64 heads at a time do, and pay. Over packed rows 16 at a time are faster where they
    leave nearly all of the machine idle (H200, 2048 rows, 64 heads: 10.8 and 12.8 us beside 13.6
    and 15.0 for 1 and 2 tokens, 16.7 beside 14.6 for 4)."""
    if part.format not in ("bf16", "fp8_ds_mla") or q.shape[1] <= 16:
        return False
    if not launch.has_many_heads(q) or not fits_v3(q, part, C):
        return False
    busy = cdiv(q.shape[1], 16) * q.shape[0] > multiprocessors(q.device) // 12
    return part.format == "bf16" or run_length > 0 or busy


def run_v3(
    q: Tensor,
    query_start_loc: Tensor,
    part: Rows,
    sink: Tensor | None,
    *,
    scale: float,
    run_length: int,
    many: bool,
) -> tuple[Tensor, Tensor]:
    T, H, _ = q.shape
    assert part.rows is not None and part.row_lens is not None
    K = part.rows.shape[1]
    out = q.new_empty((T, H, 512))
    lse = q.new_empty((T, H), dtype=torch.float32)
    if T == 0:
        return out, lse
    N, BS, W = part.cache.shape
    row = part.cache.stride(1)
    flat = part.cache.as_strided((N * BS, W), (row, 1))  # the last row may have no padding
    words = flat.view(torch.int32)
    kernel: Any = few_heads._few_heads_kernel
    block_h, block_n = 16, launch.FEW_HEADS_ROWS
    tensors, constants = [words, flat.view(torch.float32)], {"BLOCK_N": block_n}
    if many:
        kernel, block_h, block_n = many_heads_v3._many_heads_v3_kernel, 64, launch.MANY_HEADS_ROWS
        packed = part.format == "fp8_ds_mla"
        odd, load = REGISTERS[packed]
        tensors = [words]
        constants = {"PACKED": packed, "ODD_REGISTERS": odd, "LOAD_REGISTERS": load}
    runs = launch.cut_runs(
        q, out, lse, sink, width=K, run_length=run_length, block_h=block_h, block_n=block_n
    )
    query_start_loc = query_start_loc.contiguous()
    names, table = in_order(part.rows), part.block_table
    if part.kind == "slots":
        N, BS, table = N * BS, 0, None
    table = query_start_loc[None] if table is None else in_order(table)
    for first_token in range(0, T, launch.TOKENS):
        kernel[(cdiv(H, block_h), min(T - first_token, launch.TOKENS), runs.X)](
            q,
            *tensors,
            names,
            in_order(part.row_lens),
            query_start_loc,
            table,
            lse if sink is None else sink,
            runs.target,
            runs.target_lse,
            query_start_loc.shape[0] - 1,
            first_token,
            N,
            scale * launch.LOG2E,
            q.stride(0),
            q.stride(1),
            names.stride(0),
            table.stride(0),
            K,
            table.shape[1],
            runs.X,
            runs.length,
            ROW=words.stride(0),
            BS=BS,
            H=H,
            SPLIT=runs.split,
            SINK=sink is not None and not runs.split,
            **constants,
            num_warps=4,
            enable_fp_fusion=FP_FUSION,
        )
    if runs.split:
        launch.merge_runs(runs.target, runs.target_lse, sink, out, lse, fixed=bool(run_length))
    return out, lse
