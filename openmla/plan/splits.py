"""How a request's keys are split for programs that attend to them in parallel (split-KV)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

FIXED_SPLIT = 1024  # keys per split when a row's bits must not depend on its neighbours
SHORTEST_SPLIT = 256  # shorter ones cost more in prologue and merge than they save


def fixed_run_length(batch_invariant: bool) -> int:
    """mqa_sparse's run_length: nobody cuts its rows beforehand."""
    return FIXED_SPLIT if batch_invariant else 0


def split_length(
    seq_lens: Sequence[int],
    *,
    multiprocessors: int,
    block_size: int,
    batch_invariant: bool,
    num_heads: int = 16,
) -> int:
    """Keys per split for this batch: about one wave of programs, and the longest request in splits
    of equal length.

    A program takes up to 16 heads at an occupancy of two per multiprocessor, or 64 at one (H200,
    16 heads, 64 requests of 16384 keys: 293 us in four splits each, 384 in three uneven ones).
    With batch_invariant splits begin at fixed positions of the row itself.
    """
    if batch_invariant:
        return FIXED_SPLIT
    at_once = 2 * multiprocessors if num_heads <= 32 else multiprocessors // -(-num_heads // 64)
    even = max(-(-sum(seq_lens) // max(at_once, 1)), SHORTEST_SPLIT)
    longest = max(seq_lens, default=0)
    length = -(-longest // max(round(longest / even), 1))
    return -(-max(length, SHORTEST_SPLIT) // block_size) * block_size


def split_bounds(seq_lens: Tensor, length: int, num_splits: int = 0) -> Tensor:
    """[B, X+1] i32 rising bounds, splits of `length` keys, empty ones behind the last key.

    X is a power of two that serves the longest request, so that it seldom changes from step to
    step, or num_splits if given. Where there would be more than X splits the last takes the rest.
    """
    X = num_splits
    if X == 0:
        longest = int(seq_lens.max()) if seq_lens.numel() else 1
        X = 1 << (max(-(-longest // length), 1) - 1).bit_length()
    bounds = torch.arange(0, (X + 1) * length, length, dtype=torch.int32)
    bounds = bounds.minimum(seq_lens[:, None])
    bounds[:, X] = seq_lens
    return bounds
