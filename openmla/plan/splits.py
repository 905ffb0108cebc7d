"""How a request's keys are cut into runs that a kernel works on in parallel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

FIXED_RUN = 1024  # keys per run when a row's bits must not depend on its neighbours
SHORTEST_RUN = 256  # below this a run's start-up costs more than it saves


def fixed_run(batch_invariant: bool) -> int:
    """mqa_sparse's run_length: nobody cuts its rows beforehand."""
    return FIXED_RUN if batch_invariant else 0


def run_length(
    seq_lens: Sequence[int],
    *,
    multiprocessors: int,
    block_size: int,
    batch_invariant: bool,
    num_heads: int = 16,
) -> int:
    """Keys per run for this batch: long enough to fill the machine about once, not shorter, and the
    longest request in runs of equal length.

    A program works on up to 16 heads, two at a time on a multiprocessor, or on 64, one at a time
    (H200, 16 heads, 64 requests of 16384 keys: 293 us in four runs each, 384 in three uneven ones).
    With batch_invariant the cut is at fixed positions of the row itself.
    """
    if batch_invariant:
        return FIXED_RUN
    at_once = 2 * multiprocessors if num_heads <= 32 else multiprocessors // -(-num_heads // 64)
    share = max(-(-sum(seq_lens) // max(at_once, 1)), SHORTEST_RUN)
    longest = max(seq_lens, default=0)
    length = -(-longest // max(round(longest / share), 1))
    return -(-max(length, SHORTEST_RUN) // block_size) * block_size


def split_bounds(seq_lens: Tensor, length: int, num_splits: int = 0) -> Tensor:
    """[B, X+1] i32 rising bounds, runs of `length` keys, empty ones behind the last key.

    X is a power of two that serves the longest request, so that it seldom changes from step to
    step, or num_splits if given. Where the runs would be more than X the last takes the rest.
    """
    X = num_splits
    if X == 0:
        longest = int(seq_lens.max()) if seq_lens.numel() else 1
        X = 1 << (max(-(-longest // length), 1) - 1).bit_length()
    bounds = torch.arange(0, (X + 1) * length, length, dtype=torch.int32)
    bounds = bounds.minimum(seq_lens[:, None])
    bounds[:, X] = seq_lens
    return bounds
