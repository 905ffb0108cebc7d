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
    rope_ratio: Tensor | None,
    clamped: Tensor | None,
    *,
    format: str,
) -> None:
    slots, n = slot_mapping, slot_mapping.shape[0]
    rows = torch.cat([kv_c[:n], k_pe[:n]], dim=1)
    if rope_ratio is not None:  # one scale per column
        widths = torch.tensor([kv_c.shape[1], k_pe.shape[1]], device=rows.device)
        kv_scale = torch.stack([kv_scale, kv_scale * rope_ratio]).repeat_interleave(widths)
    written = slots >= 0
    if not bool(written.all()):
        slots, rows = slots[written], rows[written]
    if clamped is not None:
        clamped += get_format(format).num_clamped(rows, kv_scale)
    get_format(format).write(cache, slots, rows, kv_scale)
