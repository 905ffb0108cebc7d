"""map_slots, Triton: map positions within requests to physical slots of a paged cache.

Computes  slot = block_table[b, l // BS] * BS + l % BS, where l is the index of p among the
          positions this rank owns; -1 if there is none (specification: ops/map_slots.py)
Grid      (T,): one program owns one row.
Reads     positions [T, K], block_table [B, M], query_start_loc [B+1]
Writes    slots [T, K], slot_lens [T]
Limits    see why_not()
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from openmla.backends import Problem
from openmla.backends.triton._build import TARGETS, Build, next_power_of_2, signature_of
from openmla.backends.triton._prepare import Launch, prepare
from openmla.backends.triton._primitives import request_of

POINTERS = ("positions", "block_table", "query_start_loc", "slots", "slot_lens")
POSITIONS = 2048  # positions per tile, at most: 8 per thread of 8 warps

LAUNCHES = 1
FP_FUSION = True


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
        launch = launch_of(K, BS, cp_size, interleave, compact)
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


@lru_cache(maxsize=1024)
def launch_of(K: int, BS: int, cp_size: int, interleave: int, compact: bool) -> Launch:
    constants = constants_of(K, BS, cp_size, interleave, compact)
    return prepare(
        _map_slots_kernel, constants, num_warps=num_warps_of(constants), num_stages=1,
        enable_fp_fusion=FP_FUSION,
    )  # fmt: skip


def constants_of(K: int, BS: int, cp_size: int, interleave: int, compact: bool) -> dict[str, Any]:
    return {
        # clamped to their types, which makes no difference for 31-bit positions
        "BS": min(BS, 2**31 - 1),
        "CP_SIZE": min(cp_size, 2**32 - 1),
        "INTERLEAVE": min(interleave, 2**32 - 1),
        "COMPACT": compact,
        "BLOCK_K": min(next_power_of_2(max(K, 32)), POSITIONS),
    }


def num_warps_of(constants: dict[str, Any]) -> int:
    """Return the number of warps for 8 positions per thread, 256 per warp."""
    return min(max(constants["BLOCK_K"] // 256, 1), 8)


def builds() -> Iterator[Build]:
    """Build for a single rank, and for one of eight ranks with compaction, per target."""
    for capability in TARGETS:
        yield map_build(capability, 2048)
        yield map_build(capability, 2048, cp_size=8, compact=True)
        yield map_build(capability, 512)


def map_build(capability: int, K: int, *, cp_size: int = 1, compact: bool = False) -> Build:
    constants = constants_of(K, 64, cp_size, 1, compact)
    types = dict.fromkeys(POINTERS, "*i32")
    return Build(
        f"map-K{K}-cp{cp_size}", _map_slots_kernel,
        signature_of(_map_slots_kernel, constants, types), constants, num_warps_of(constants), 1,
        capability, FP_FUSION,
    )  # fmt: skip
