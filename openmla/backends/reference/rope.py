"""rope, reference: both pairings as views of two columns per angle."""

from __future__ import annotations

import torch
from torch import Tensor

from openmla.backends import Problem


def why_not(problem: Problem) -> str | None:
    return None


def run(x: Tensor, positions: Tensor, table: Tensor, *, pairing: str, inverse: bool) -> None:
    wide = torch.promote_types(torch.promote_types(x.dtype, table.dtype), torch.float32)
    rotated = x[: positions.shape[0]]
    cos, sin = table[positions].to(wide)[:, None].chunk(2, dim=-1)
    if inverse:
        sin = -sin
    if pairing == "pairs":
        first, second = rotated[..., 0::2], rotated[..., 1::2]
    else:
        first, second = rotated.chunk(2, dim=-1)
    a, b = first.to(wide), second.to(wide)
    new_first, new_second = a * cos - b * sin, b * cos + a * sin
    first.copy_(new_first)
    second.copy_(new_second)
