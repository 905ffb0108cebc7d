"""index_write, reference: LayerNorm, RoPE, Hadamard matrix, then the write of the format."""

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
        k = hadamard_transform(k)
    one = torch.ones((), device=cache.device)
    get_format(format).write(cache, slot_mapping[written], k, one)


def hadamard_transform(x: Tensor) -> Tensor:
    """Multiply rows [T, n] by the orthonormal Hadamard matrix, n a power of two. Sums and
    differences of columns keep a row's bits independent of the number of rows."""
    n, width = x.shape[-1], 1
    while width < n:
        first, second = x.unflatten(-1, (n // (2 * width), 2, width)).unbind(-2)
        x = torch.stack([first + second, first - second], dim=-2).flatten(-3)
        width *= 2
    return x * n**-0.5
