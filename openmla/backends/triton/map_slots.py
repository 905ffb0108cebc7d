"""map_slots, Triton: map positions within requests to physical slots of a paged cache.

Computes  slot = block_table[b, l // BS] * BS + l % BS, where l is the index of p among the
          positions this rank owns; -1 if there is none (specification: ops/map_slots.py)
Grid      (T,): one program owns one row.
Reads     positions [T, K], block_table [B, M], query_start_loc [B+1]
Writes    slots [T, K], slot_lens [T]
Limits    see why_not()
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from openmla.backends import Problem
from openmla.backends.triton._build import next_power_of_2
from openmla.backends.triton._primitives import request_of
from openmla.backends.triton._spec import Fixed, KernelSpec, case

POSITIONS = 2048  # positions per tile, at most: 8 per thread of 8 warps

LAUNCHES = 1


@triton.jit(
    do_not_specialize=["B", "M", "K", "num_blocks", "cp_rank", "table_stride"],
    do_not_specialize_on_alignment=["block_table", "query_start_loc"],
)
def _map_slots_kernel(
    positions, block_table, query_start_loc, slots, slot_lens,
    row_stride, table_stride, column_stride, out_stride, B, M, K, num_blocks, cp_rank,
    BS: tl.constexpr, CP_SIZE: tl.constexpr, INTERLEAVE: tl.constexpr, COMPACT: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0)
    b = request_of(t, query_start_loc, B)
    row = positions + t.to(tl.int64) * row_stride
    table = block_table + tl.minimum(b, B - 1).to(tl.int64) * table_stride
    out = slots + t.to(tl.int64) * out_stride
    # no columns without a request; Triton 3.9's interpreter rejects masks from scalar conditions
    columns = tl.where(b < B, M, 0)
    count = 0
    for first in range(0, K, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        p = tl.load(row + k, mask=k < K, other=-1)
        stripe = p.to(tl.uint32) // INTERLEAVE
        local = stripe // CP_SIZE * INTERLEAVE + p.to(tl.uint32) % INTERLEAVE
        column = (local // BS).to(tl.int32)
        owned = (p >= 0) & ((stripe % CP_SIZE).to(tl.int32) == cp_rank) & (column < columns)
        block = tl.load(table + column.to(tl.int64) * column_stride, mask=owned, other=-1)
        owned &= (block >= 0) & (block < num_blocks)
        slot = tl.where(owned, block * BS + (local % BS).to(tl.int32), -1)
        if COMPACT:
            at = count + tl.cumsum(owned.to(tl.int32), 0) - 1
            tl.store(out + at, slot, mask=owned)
        else:
            tl.store(out + k, slot, mask=k < K)
        count += tl.sum(owned.to(tl.int32), 0)
    if COMPACT:
        for first in range(0, K, BLOCK_K):
            k = first + tl.arange(0, BLOCK_K)
            tl.store(out + k, tl.full([BLOCK_K], -1, tl.int32), mask=(k >= count) & (k < K))
    tl.store(slot_lens + t, count)


def why_not(problem: Problem) -> str | None:
    return None


def run(
    positions: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    *,
    BS: int,
    num_blocks: int,
    cp_size: int,
    cp_rank: int,
    interleave: int,
    compact: bool,
) -> tuple[Tensor, Tensor]:
    T, K = positions.shape
    B, M = block_table.shape
    slots = torch.empty_like(positions)
    lens = positions.new_empty((T,))
    if T > 0:
        launch = SPEC.launch(K, BS, cp_size, interleave, compact)
        launch(
            (T,),
            positions,
            block_table,
            query_start_loc.contiguous(),
            slots,
            lens,
            positions.stride(0),
            block_table.stride(0),
            block_table.stride(1),
            slots.stride(0),
            B,
            M,
            K,
            num_blocks,
            cp_rank,
        )
    return slots, lens


def fix(K: int, BS: int, cp_size: int, interleave: int, compact: bool) -> Fixed:
    block = min(next_power_of_2(max(K, 32)), POSITIONS)
    constants = {
        # clamped to their types, which makes no difference for 31-bit positions
        "BS": min(BS, 2**31 - 1),
        "CP_SIZE": min(cp_size, 2**32 - 1),
        "INTERLEAVE": min(interleave, 2**32 - 1),
        "COMPACT": compact,
        "BLOCK_K": block,
    }
    # 8 positions per thread, 256 per warp
    return Fixed(constants, num_warps=min(max(block // 256, 1), 8))


SPEC = KernelSpec(
    _map_slots_kernel,
    fix,
    types={"*i32": "positions block_table query_start_loc slots slot_lens"},
    cases=lambda _: [  # a single rank, and one of eight with compaction
        case(f"map-K{K}-cp{cp_size}", K, 64, cp_size, 1, cp_size > 1)
        for K, cp_size in ((2048, 1), (2048, 8), (512, 1))
    ],
    fp_fusion=True,
)
SPECS = (SPEC,)
