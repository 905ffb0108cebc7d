"""Looks up blocks and slots of requests in a host table, in one operation for the whole batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from openmla.plan.rows import integers


def last_blocks(table: Tensor, counts: Sequence[int], lens: Sequence[int], BS: int) -> list[int]:
    """The blocks of the last counts[b] of lens[b] positions, request by request and in order.

    `table` is [B, M] i32 on the CPU; its rows may be rings.
    """
    B, M = table.shape
    if not B or max(counts) <= 1:  # decode, at every step
        rows = zip(range(0, B * M, M), counts, lens, strict=True) if M else ()
        places = [row + (S - 1) // BS % M for row, n, S in rows if n]
    else:
        places = [
            b * M + column % M
            for b, (n, S) in enumerate(zip(counts, lens, strict=True))
            if n
            for column in range((S - n) // BS, (S - 1) // BS + 1)
        ]
    found: list[int] = table.take(integers(places, torch.int64)).tolist() if places else []
    return found


def last_slots(table: Tensor, counts: Sequence[int], lens: Sequence[int], BS: int) -> list[int]:
    """The slot of each of those positions."""
    blocks = last_blocks(table, counts, lens, BS)
    if max(counts, default=0) <= 1:
        written = lens if all(counts) else [S for n, S in zip(counts, lens, strict=True) if n]
        return [block * BS + (S - 1) % BS for block, S in zip(blocks, written, strict=True)]
    slots: list[int] = []
    following = iter(blocks)
    for n, S in zip(counts, lens, strict=True):
        position = S - n
        while position < S:
            offset = position % BS
            size = min(S - position, BS - offset)
            first = next(following) * BS + offset
            slots += range(first, first + size)
            position += size
    return slots
