"""Latent attention over V4's rows: 16 heads a program, or on SM90 64."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from openmla.backends import Problem
from openmla.backends.gluon import _few_heads_v4 as few_heads_v4
from openmla.backends.gluon import _many_heads_v4 as many_heads_v4
from openmla.backends.gluon._runs import cut_runs, heads_build
from openmla.backends.gluon._shapes import faster_with_16_heads, needs_nvidia, needs_sm90
from openmla.backends.kernels import Kernel
from openmla.backends.segments import Segment
from openmla.backends.triton import _launch as launch
from openmla.backends.triton._build import GFX942, TARGETS, Build, cdiv
from openmla.backends.triton._launch import in_order

FEW_HEADS_ROWS = 64  # of a block
MANY_HEADS_ROWS = 128  # of a step
KINDS = (("window",), ("window", "positions"), ("window", "prefix"))
# of the kernel of many heads: its odd and its loading warps, the even ones have the rest of 512;
# with others it spills
REGISTERS = (192, 112)
FP_FUSION = True


def why_not_few(problem: Problem) -> str | None:
    if problem.format != "fp8_dsv4":
        return f"reads fp8_dsv4, not {problem.format}"
    if needs_nvidia():
        return needs_nvidia()
    if problem.kinds not in KINDS:
        return f"takes a window and what may follow it, this is {' and '.join(problem.kinds)}"
    if (problem.D, problem.C) != (512, 512):
        return f"needs rows of 512 values, this is {problem.D}"
    if problem.dtype != torch.bfloat16:
        return f"takes bf16 queries, this is {problem.dtype}"
    if "pages" not in problem.aligned:
        return "needs pages at multiples of 16 bytes"
    return None


def slower_few(problem: Problem) -> str | None:
    return None if faster_with_16_heads(problem) else "is for up to 32 heads, or few tokens"


def why_not_many(problem: Problem) -> str | None:
    if problem.format != "fp8_dsv4":
        return f"reads fp8_dsv4, not {problem.format}"
    return needs_sm90(problem) or why_not_few(problem)


def slower_many(problem: Problem) -> str | None:
    """Programs of 16 heads, two at a time on a multiprocessor, are faster where they leave most of
    the machine idle, and up to 16 heads unless one of 64 for each token just fills it. (H200, 128 +
    512 rows: 15.3 beside 14.1 us for 8 tokens of 64 heads, 10.9 beside 13.7 for 4; 38.5 beside 33.1
    for 128 of 16 heads, 60.1 beside 66.4 for 256.)"""
    H, T, units = problem.H, problem.tokens, problem.multiprocessors
    if H <= 16:
        fills = not problem.run_length and 2 * units <= 3 * T <= 3 * units
        return None if fills else "is for more than 16 heads"
    if problem.run_length > 0 or cdiv(H, 16) * T > units // 5:
        return None
    return f"fills the machine from more than {T} tokens on"


def run_v4(
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
    T, H, _ = q.shape
    out = q.new_empty((T, H, 512))
    lse = q.new_empty((T, H), dtype=torch.float32)
    if T == 0:
        return out, lse
    kernel, block_h, block_n = few_heads_v4._few_heads_v4_kernel, 16, FEW_HEADS_ROWS
    constants = {"BLOCK_N": block_n}
    if many:
        kernel, block_h, block_n = many_heads_v4._many_heads_v4_kernel, 64, MANY_HEADS_ROWS
        constants = {"ODD_REGISTERS": REGISTERS[0], "LOAD_REGISTERS": REGISTERS[1]}
    width = sum(segment.width for segment in segments)
    runs = cut_runs(
        q, out, lse, sink, width=width, run_length=run_length, block_h=block_h, block_n=block_n
    )
    window = segments[0]
    assert window.block_table is not None
    # a window alone has the prefix of a table without columns after it
    nothing = window._replace(kind="prefix", block_table=window.block_table[:, :0], span=1)
    second = segments[1] if len(segments) > 1 else nothing
    assert second.block_table is not None
    query_start_loc = query_start_loc.contiguous()
    names, row_lens = query_start_loc[None], query_start_loc
    if second.rows is not None and second.row_lens is not None:
        names, row_lens = in_order(second.rows), in_order(second.row_lens)
    tables = [in_order(window.block_table), in_order(second.block_table)]
    sizes: list[int] = []
    for part, table in zip((window, second), tables, strict=True):
        sizes += [part.cache.stride(0) // 16, part.cache.shape[0]]
        sizes += [table.shape[1], part.span, table.stride(0)]
    for first_token in range(0, T, launch.TOKENS):
        kernel[(cdiv(H, block_h), min(T - first_token, launch.TOKENS), runs.X)](
            q,
            window.cache[:, 0].view(torch.int32),
            tables[0],
            second.cache[:, 0].view(torch.int32),
            tables[1],
            names,
            row_lens,
            positions.contiguous(),
            query_start_loc,
            lse if sink is None else sink,
            runs.target,
            runs.target_lse,
            query_start_loc.shape[0] - 1,
            first_token,
            scale * launch.LOG2E,
            q.stride(0),
            q.stride(1),
            names.stride(0),
            names.shape[1],
            runs.X,
            runs.length,
            *sizes,
            LISTED=second.kind == "positions",
            BS_1=window.cache.shape[1],
            BS_2=second.cache.shape[1],
            H=H,
            SPLIT=runs.split,
            SINK=sink is not None and not runs.split,
            **constants,
            num_warps=4,
            enable_fp_fusion=FP_FUSION,
        )
    if runs.split:
        fixed = bool(run_length)
        launch.merge_runs(runs.target, runs.target_lse, sink, out, lse, fixed=fixed)
    return out, lse


def few_heads_builds() -> Iterator[Build]:
    for capability in TARGETS:
        if capability == GFX942:  # its matrix instructions are others
            continue
        for kind, BS in (("positions", 64), ("prefix", 2)):
            constants = {
                "LISTED": kind == "positions", "BS_1": 64, "BS_2": BS, "H": 16, "SPLIT": True,
                "SINK": False, "BLOCK_N": 64,
            }  # fmt: skip
            name = f"few-heads-window-{kind}-fp8_dsv4-H16"
            kernel: Any = few_heads_v4._few_heads_v4_kernel
            yield heads_build(name, kernel, constants, capability, FP_FUSION)


def many_heads_builds() -> Iterator[Build]:
    odd, load = REGISTERS
    for kind, BS in (("positions", 64), ("prefix", 2)):
        for H, split in ((64, False), (128, True)):
            constants = {
                "LISTED": kind == "positions", "BS_1": 64, "BS_2": BS, "H": H, "SPLIT": split,
                "SINK": not split, "ODD_REGISTERS": odd, "LOAD_REGISTERS": load,
            }  # fmt: skip
            name = f"many-heads-window-{kind}-fp8_dsv4-H{H}"
            yield heads_build(name, many_heads_v4._many_heads_v4_kernel, constants, 90, FP_FUSION)


FEW_HEADS = Kernel(
    name="few heads V4",
    why_not=why_not_few,
    slower=slower_few,
    efficiency=0.42,
    run=partial(run_v4, many=False),
    builds=few_heads_builds,
)
MANY_HEADS = Kernel(
    name="many heads V4",
    why_not=why_not_many,
    slower=slower_many,
    efficiency=0.75,
    run=partial(run_v4, many=True),
    builds=many_heads_builds,
)
