"""Launching latent attention of few heads over V4's rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from openmla.backends.triton import _few_heads_v4 as few_heads_v4
from openmla.backends.triton import _launch as launch
from openmla.backends.triton._build import assembly, cdiv
from openmla.backends.triton._launch import Rows, in_order


def fits_few_heads_v4(q: Tensor, parts: Sequence[Rows], C: int, run_length: int) -> bool:
    """Whether the kernel of few heads takes a window and what may follow it, and pays."""
    if not assembly() or any(part.format != "fp8_dsv4" for part in parts):
        return False
    if (q.shape[2], C, q.dtype) != (512, 512, torch.bfloat16):
        return False
    kinds = tuple(part.kind for part in parts)
    known = kinds in (("window",), ("window", "positions"), ("window", "prefix"))
    return known and all(map(_is_aligned, parts)) and launch.few_heads_pay(q, run_length)


def _is_aligned(part: Rows) -> bool:
    """Whether rows can be read 16 bytes at a time; the first one is, for those not there."""
    cache = part.cache
    return cache.numel() > 0 and cache.data_ptr() % 16 == 0 and cache.stride(0) % 16 == 0


def run_few_heads_v4(
    q: Tensor,
    query_start_loc: Tensor,
    positions: Tensor,
    parts: Sequence[Rows],
    sink: Tensor | None,
    *,
    scale: float,
    width: int,
    run_length: int,
) -> tuple[Tensor, Tensor]:
    T, H, _ = q.shape
    out = q.new_empty((T, H, 512))
    lse = q.new_empty((T, H), dtype=torch.float32)
    if T == 0:
        return out, lse
    runs = launch.cut_runs(q, out, lse, sink, width=width, run_length=run_length)
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
        few_heads_v4._few_heads_v4_kernel[
            (cdiv(H, 16), min(T - first_token, launch.TOKENS), runs.X)
        ](
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
            BLOCK_N=launch.FEW_HEADS_ROWS,
            num_warps=4,
        )
    if runs.split:
        fixed = bool(run_length)
        launch.merge_runs(runs.target, runs.target_lse, sink, out, lse, fixed=fixed)
    return out, lse
