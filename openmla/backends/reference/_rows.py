"""Requests of rows and slots of positions, shared by the sparse references."""

from __future__ import annotations

import torch
from torch import Tensor


def row_requests(query_start_loc: Tensor, T: int) -> Tensor:
    """Return the request that owns each row, [T] i64; B for rows without a request."""
    rows = torch.arange(T, dtype=torch.int32, device=query_start_loc.device)
    return torch.searchsorted(query_start_loc[1:].contiguous(), rows, right=True)


def look_up(
    positions: Tensor, block_table: Tensor, requests: Tensor, BS: int, num_blocks: int
) -> Tensor:
    """Return slots [T, K] i64 of positions [T, K] in the rows' requests; -1 for none."""
    B, M = block_table.shape
    positions = positions.long()
    valid = (positions >= 0) & (positions < M * BS) & (requests < B)[:, None]
    if B == 0 or M == 0:
        return torch.full_like(positions, -1)
    columns = (positions // BS).where(valid, 0)
    blocks = block_table[requests.clamp_max(B - 1)].long().gather(1, columns)
    valid &= (blocks >= 0) & (blocks < num_blocks)
    return (blocks * BS + positions % BS).where(valid, -1)
