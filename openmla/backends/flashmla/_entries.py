"""Convert segments for FlashMLA: one list of slots per token, -1 for entries to skip."""

from __future__ import annotations

import torch
from torch import Tensor

from openmla.backends.segments import Segment


def owners(query_start_loc: Tensor, T: int) -> Tensor:
    """Return the request of each token, [T] i64; B for tokens without a request."""
    tokens = torch.arange(T, dtype=torch.int32, device=query_start_loc.device)
    return torch.searchsorted(query_start_loc[1:].contiguous(), tokens, right=True)


def entries(
    segment: Segment, query_start_loc: Tensor, positions: Tensor, multiple: int
) -> Tensor:  # [T, n] i32, n a multiple, not 0
    """Return the slots that a segment lists. Anything that is not a slot of the cache becomes -1:
    the kernels check nothing else and would read past the cache."""
    T, (N, BS, _) = positions.shape[0], segment.cache.shape
    listed, counts = _listed(segment, positions)
    if segment.kind == "slots":  # decode: every launch counts, owners are not needed
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
    """Return the entries [T, n] that a token lists, and a mask of those that count."""
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
    """Map positions within requests to slots."""
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
    # the offset must not turn an invalid block into a slot
    return blocks * BS + listed % BS, counts & (blocks >= 0)
