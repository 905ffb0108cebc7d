"""Launching latent attention over V4's rows: 16 heads a program, or on SM90 64."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from openmla.backends.triton import _few_heads_v4 as few_heads_v4
from openmla.backends.triton import _launch as launch
from openmla.backends.triton import _many_heads_v4 as many_heads_v4
from openmla.backends.triton._build import assembly, cdiv
from openmla.backends.triton._launch import Rows, in_order
from openmla.hardware import multiprocessors

# of the kernel of many heads: its odd and its loading warps, the even ones have the rest of 512;
# with others it spills
REGISTERS = (192, 112)
FP_FUSION = True


def fits_v4(q: Tensor, parts: Sequence[Rows], C: int) -> bool:
    """Whether these kernels take a window and what may follow it."""
    if not assembly() or any(part.format != "fp8_dsv4" for part in parts):
        return False
    if (q.shape[2], C, q.dtype) != (512, 512, torch.bfloat16):
        return False
    kinds = tuple(part.kind for part in parts)
    known = kinds in (("window",), ("window", "positions"), ("window", "prefix"))
    return known and all(map(_is_aligned, parts))


def many_heads_pay(q: Tensor, run_length: int) -> bool:
    """Whether a program of 64 heads pays, where there is one. Those of 16 heads, two at a time on a
    multiprocessor, are faster where they leave most of the machine idle, and up to 16 heads unless
    one of 64 for each token just fills it. (H200, 128 + 512 rows: 15.3 beside 14.1 us for 8 tokens
    of 64 heads, 10.9 beside 13.7 for 4; 38.5 beside 33.1 for 128 of 16 heads, 60.1 beside 66.4 for
    256.)"""
    T, H, _ = q.shape
    units = multiprocessors(q.device)
    if H <= 16:
        return not run_length and 2 * units <= 3 * T <= 3 * units
    return run_length > 0 or cdiv(H, 16) * T > units // 5


def _is_aligned(part: Rows) -> bool:
    """Whether rows can be read 16 bytes at a time; the first one is, for those not there."""
    cache = part.cache
    return cache.numel() > 0 and cache.data_ptr() % 16 == 0 and cache.stride(0) % 16 == 0


def run_v4(
    q: Tensor,
    query_start_loc: Tensor,
    positions: Tensor,
    parts: Sequence[Rows],
    sink: Tensor | None,
    *,
    scale: float,
    width: int,
    run_length: int,
    many: bool,
) -> tuple[Tensor, Tensor]:
    T, H, _ = q.shape
    out = q.new_empty((T, H, 512))
    lse = q.new_empty((T, H), dtype=torch.float32)
    if T == 0:
        return out, lse
    kernel, block_h, block_n = few_heads_v4._few_heads_v4_kernel, 16, launch.FEW_HEADS_ROWS
    constants = {"BLOCK_N": block_n}
    if many:
        kernel, block_h, block_n = many_heads_v4._many_heads_v4_kernel, 64, launch.MANY_HEADS_ROWS
        constants = {"ODD_REGISTERS": REGISTERS[0], "LOAD_REGISTERS": REGISTERS[1]}
    runs = launch.cut_runs(
        q, out, lse, sink, width=width, run_length=run_length, block_h=block_h, block_n=block_n
    )
    window = parts[0]
    assert window.block_table is not None
    # a window alone has the prefix of a table without columns after it
    nothing = window._replace(kind="prefix", block_table=window.block_table[:, :0], span=1)
    second = parts[1] if len(parts) > 1 else nothing
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
