"""index_write, reference: LayerNorm, rotation, Hadamard matrix, then the format's own write."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from openmla.backends import Problem
from openmla.backends.reference import rope
from openmla.cache.format import get_format


def why_not(problem: Problem) -> str | None:
    return None


def run(
    cache: Tensor,
    k_raw: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    positions: Tensor,
    table: Tensor,
    slot_mapping: Tensor,
    *,
    format: str,
    eps: float,
    pairing: str,
    rope_start: int,
    hadamard: bool,
) -> None:
    DI, R = k_raw.shape[1], table.shape[1]
    wide = torch.promote_types(k_raw.dtype, torch.float32)
    written = (slot_mapping >= 0).nonzero().squeeze(1)
    k = F.layer_norm(k_raw[written].to(wide), (DI,), norm_weight.to(wide), norm_bias.to(wide), eps)
    turned = k[:, None, rope_start : rope_start + R]
    rope.run(turned, positions[written], table, pairing=pairing, inverse=False)
    if hadamard:
        k = k @ hadamard_matrix(DI, wide, k.device)
    one = torch.ones((), device=cache.device)
    get_format(format).write(cache, slot_mapping[written], k, one)


def hadamard_matrix(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The orthonormal n-point Hadamard matrix, n a power of two."""
    matrix = torch.ones((1, 1), dtype=dtype, device=device)
    while matrix.shape[0] < n:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix * n**-0.5
