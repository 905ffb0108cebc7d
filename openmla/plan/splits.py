"""How a request's keys are cut into runs that a kernel works on in parallel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

FIXED_RUN = 1024  # keys per run when a row's bits must not depend on its neighbours
SHORTEST_RUN = 256  # below this a run's start-up costs more than it saves


def run_length(
    seq_lens: Sequence[int], *, multiprocessors: int, block_size: int, batch_invariant: bool
) -> int:
    """Keys per run for this batch: long enough to fill the machine about once, not shorter.

    With batch_invariant the cut is at fixed positions of the row itself.
    """
    if batch_invariant:
        return FIXED_RUN
    share = -(-sum(seq_lens) // max(multiprocessors, 1))
    length = max(share, SHORTEST_RUN)
    return -(-length // block_size) * block_size


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
