"""Segments as FlashMLA takes them: one list of slots a token, -1 for all that does not count."""

from __future__ import annotations

import torch
from torch import Tensor

from openmla.backends.segments import Segment


def owners(query_start_loc: Tensor, T: int) -> Tensor:
    """[T] i64: the request of each token, B of those that belong to none."""
    tokens = torch.arange(T, dtype=torch.int32, device=query_start_loc.device)
    return torch.searchsorted(query_start_loc[1:].contiguous(), tokens, right=True)


def entries(
    segment: Segment, query_start_loc: Tensor, positions: Tensor, multiple: int
) -> Tensor:  # [T, n] i32, n a multiple, not 0
    """The slots that a segment names. Whatever is no slot of the cache is -1: the kernels look at
    nothing else, and would read past the cache."""
    T, (N, BS, _) = positions.shape[0], segment.cache.shape
    listed, counts = _listed(segment, positions)
    if segment.kind == "slots":  # decode: every launch counts, and nobody asks whose a token is
        tokens = torch.arange(T, device=positions.device)
        counts &= (tokens < query_start_loc[-1])[:, None]
    else:
        owner = owners(query_start_loc, T)
        counts &= (owner < query_start_loc.shape[0] - 1)[:, None]
        listed, counts = _looked_up(segment, listed, counts, owner, BS)
    counts &= listed >= 0
    counts &= listed < N * BS
    slots = listed.where(counts, -1).to(torch.int32)
    n = slots.shape[1]
    filled = -n % multiple if n else multiple
    if filled:
        slots = torch.nn.functional.pad(slots, (0, filled), value=-1)
    return slots.contiguous()


def _listed(segment: Segment, positions: Tensor) -> tuple[Tensor, Tensor]:
    """[T, n] what a token names, and which of it counts."""
    columns = torch.arange(segment.width, device=positions.device)
    if segment.rows is not None:
        assert segment.row_lens is not None
        return segment.rows, columns < segment.row_lens[:, None]
    own = positions[:, None]
    if segment.kind == "window":
        return own - columns, columns <= own
    return columns.expand(len(positions), -1), columns < (own + 1) // segment.span


def _looked_up(
    segment: Segment, listed: Tensor, counts: Tensor, owner: Tensor, BS: int
) -> tuple[Tensor, Tensor]:
    """Positions within requests as slots."""
    assert segment.block_table is not None
    B, M = segment.block_table.shape
    if B == 0 or M == 0:
        return listed, torch.zeros_like(counts)
    listed = listed.long()
    columns = listed // BS
    if segment.kind == "window":
        columns = columns % M  # a ring
    counts = counts & (listed >= 0) & (columns < M)
    table = segment.block_table[owner.clamp_max(B - 1)].long()
    blocks = table.gather(1, columns.where(counts, 0))
    # a block that is none must not become a slot by its offset
    return blocks * BS + listed % BS, counts & (blocks >= 0)
