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
    slots, n = slot_mapping, slot_mapping.shape[0]
    rows = torch.cat([kv_c[:n], k_pe[:n]], dim=1)
    written = slots >= 0
    if not bool(written.all()):
        slots, rows = slots[written], rows[written]
    get_format(format).write(cache, slots, rows, kv_scale)
