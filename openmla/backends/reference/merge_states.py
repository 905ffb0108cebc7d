"""merge_states, reference: weights first, empty sides replaced and not multiplied."""

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
    merged = out.new_zeros(out.shape, dtype=wide)
    sides = [(out, lse), (other_out, other_lse)]
    lses = torch.stack([_plain(side_lse, wide) for _, side_lse in sides])
    merged_lse = lses.logsumexp(dim=0)
    for (side_out, _), side_lse in zip(sides, lses, strict=True):
        empty = side_lse == -torch.inf
        weight = (side_lse - merged_lse).exp()
        part = side_out.to(wide) * weight[:, :, None]
        merged += part.masked_fill(empty[:, :, None], 0)
    return merged, merged_lse


def _plain(lse: Tensor, dtype: torch.dtype) -> Tensor:
    """+inf and NaN mean an empty side in other conventions; here that is -inf."""
    return lse.to(dtype).nan_to_num(nan=-torch.inf, posinf=-torch.inf, neginf=-torch.inf)
