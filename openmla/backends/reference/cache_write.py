"""cache_write, reference: index the blocks, encode, assign."""

from __future__ import annotations

import torch
from torch import Tensor

from openmla.backends import Problem
from openmla.cache.format import get_format


def why_not(problem: Problem) -> str | None:
    return None


def run(
    cache: Tensor,
    kv_c: Tensor,
    k_pe: Tensor,
    slot_mapping: Tensor,
    kv_scale: Tensor,
    *,
    format: str,
) -> None:
    written = (slot_mapping >= 0).nonzero().squeeze(1)
    rows = torch.cat([kv_c[written], k_pe[written]], dim=1)
    get_format(format).write(cache, slot_mapping[written], rows, kv_scale)
