"""merge_states, reference: weights first; empty sides are replaced, not multiplied."""

from __future__ import annotations

import torch
from torch import Tensor

from openmla.backends import Problem


def why_not(problem: Problem) -> str | None:
    return None


def run(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> None:
    merged, merged_lse = merge(out, lse, other_out, other_lse)
    out.copy_(merged)
    lse.copy_(merged_lse)


def merge(
    out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor
) -> tuple[Tensor, Tensor]:  # in float32 or wider
    wide = torch.promote_types(torch.promote_types(out.dtype, other_out.dtype), torch.float32)
    wide = torch.promote_types(torch.promote_types(lse.dtype, other_lse.dtype), wide)
    lses = torch.stack([lse.to(wide), other_lse.to(wide)])
    empty = lses == -torch.inf  # NaN and +inf do not count as empty: they make the row NaN
    largest = lses.amax(dim=0)
    weights = (lses - largest).exp().masked_fill(empty, 0)
    total = weights.sum(dim=0)
    merged = out.new_zeros(out.shape, dtype=wide)
    for side, weight, unseen in zip((out, other_out), weights, empty, strict=True):
        merged += (side.to(wide) * weight[:, :, None]).masked_fill(unseen[:, :, None], 0)
    merged /= total.masked_fill(empty.all(dim=0), 1)[:, :, None]
    return merged, largest + total.log()
