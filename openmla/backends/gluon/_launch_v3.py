"""Latent attention over listed rows of 512 + 64: 16 heads a program, or on SM90 64."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from openmla.backends import Problem
from openmla.backends.gluon import _few_heads_v3 as few_heads
from openmla.backends.gluon import _many_heads_v3 as many_heads_v3
from openmla.backends.gluon._runs import cut_runs, heads_build
from openmla.backends.gluon._shapes import faster_with_16_heads, needs_nvidia, needs_sm90
from openmla.backends.kernels import Kernel
from openmla.backends.segments import Segment
from openmla.backends.triton import _launch as launch
from openmla.backends.triton._build import GFX942, TARGETS, Build, cdiv
from openmla.backends.triton._decoded import decoded
from openmla.backends.triton._launch import in_order

FEW_HEADS_ROWS = 64  # of a block
MANY_HEADS_ROWS = 128  # of a step
# of the kernel of many heads: its odd and its loading warps, the even ones have the rest of 512;
# with others it spills
REGISTERS = {True: (192, 112), False: (224, 56)}  # packed rows, and those that are only copied
FP_FUSION = True


def why_not_listed(problem: Problem) -> str | None:
    """Why neither kernel takes a problem."""
    if needs_nvidia():
        return needs_nvidia()
    if len(problem.kinds) != 1 or problem.kinds[0] not in ("slots", "positions"):
        return f"takes one segment of listed rows, this is {' and '.join(problem.kinds)}"
    if (problem.D, problem.C) != (576, 512):
        return f"needs rows of 512 + 64, this is {problem.C} + {problem.D - problem.C}"
    if problem.dtype != torch.bfloat16:
        return f"takes bf16 queries, this is {problem.dtype}"
    if "rows" not in problem.aligned:
        return "needs rows at multiples of 16 bytes, no padding between pages, fewer than 2**33"
    return None


def why_not_few(problem: Problem) -> str | None:
    if problem.format != "fp8_ds_mla":
        return f"reads fp8_ds_mla, not {problem.format}"
    return why_not_listed(problem)


def slower_few(problem: Problem) -> str | None:
    return None if faster_with_16_heads(problem) else "is for up to 32 heads, or few tokens"


def why_not_many(problem: Problem) -> str | None:
    if problem.format not in ("bf16", "fp8_ds_mla"):
        return f"reads bf16 and fp8_ds_mla, not {problem.format}"
    return needs_sm90(problem) or why_not_listed(problem)


def slower_many(problem: Problem) -> str | None:
    """Over packed rows 16 heads at a time are faster where they leave nearly all of the machine
    idle (H200, 2048 rows, 64 heads: 10.8 and 12.8 us beside 13.6 and 15.0 for 1 and 2 tokens, 16.7
    beside 14.6 for 4)."""
    if problem.H <= 16:
        return "is for more than 16 heads"
    busy = cdiv(problem.H, 16) * problem.tokens > problem.multiprocessors // 12
    if problem.format == "bf16" or problem.run_length > 0 or busy:
        return None
    return f"fills the machine from more than {problem.tokens} tokens on"


def run_listed(
    q: Tensor,
    query_start_loc: Tensor,
    positions: Tensor,
    segments: Sequence[Segment],
    sink: Tensor | None,
    *,
    C: int,
    scale: float,
    run_length: int,
    many: bool,
) -> tuple[Tensor, Tensor]:
    sink = None if sink is None else sink.contiguous()
    if many:
        segments = decoded(q, query_start_loc, segments, run_length)
    (part,) = segments
    return run_v3(q, query_start_loc, part, sink, scale=scale, run_length=run_length, many=many)


def run_v3(
    q: Tensor,
    query_start_loc: Tensor,
    part: Segment,
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
    block_h, block_n = 16, FEW_HEADS_ROWS
    tensors, constants = [words, flat.view(torch.float32)], {"BLOCK_N": block_n}
    if many:
        kernel, block_h, block_n = many_heads_v3._many_heads_v3_kernel, 64, MANY_HEADS_ROWS
        packed = part.format == "fp8_ds_mla"
        odd, load = REGISTERS[packed]
        tensors = [words]
        constants = {"PACKED": packed, "ODD_REGISTERS": odd, "LOAD_REGISTERS": load}
    runs = cut_runs(
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


def few_heads_builds() -> Iterator[Build]:
    for capability in TARGETS:
        if capability == GFX942:  # its matrix instructions are others
            continue
        for kind, BS in (("slots", 0), ("positions", 64)):
            constants = {"ROW": 164, "BS": BS, "H": 16, "SPLIT": True, "SINK": False, "BLOCK_N": 64}
            name = f"few-heads-{kind}-fp8_ds_mla-H16"
            kernel: Any = few_heads._few_heads_kernel
            yield heads_build(name, kernel, constants, capability, FP_FUSION)


def many_heads_builds() -> Iterator[Build]:
    for format, ROW in (("bf16", 288), ("fp8_ds_mla", 164)):
        odd, load = REGISTERS[format == "fp8_ds_mla"]
        for kind, BS, split in (("slots", 0, False), ("positions", 64, True)):
            constants = {
                "PACKED": format == "fp8_ds_mla", "ROW": ROW, "BS": BS, "H": 128, "SPLIT": split,
                "SINK": not split, "ODD_REGISTERS": odd, "LOAD_REGISTERS": load,
            }  # fmt: skip
            name = f"many-heads-{kind}-{format}-H128"
            yield heads_build(name, many_heads_v3._many_heads_v3_kernel, constants, 90, FP_FUSION)


FEW_HEADS = Kernel(
    name="few heads",
    why_not=why_not_few,
    slower=slower_few,
    efficiency=0.42,
    run=partial(run_listed, many=False),
    builds=few_heads_builds,
)
MANY_HEADS = Kernel(
    name="many heads",
    why_not=why_not_many,
    slower=slower_many,
    efficiency=0.75,  # H200, bench/routes.py
    run=partial(run_listed, many=True),
    builds=many_heads_builds,
)
