"""cache_gather, reference: one request after another."""

from __future__ import annotations

import torch
from torch import Tensor

from openmla.backends import Problem
from openmla.cache.format import get_format


def why_not(problem: Problem) -> str | None:
    return None


def run(
    out: Tensor,
    cache: Tensor,
    kv_scale: Tensor,
    block_table: Tensor,
    starts: Tensor,
    row_start_loc: Tensor,
    *,
    format: str,
) -> None:
    BS = cache.shape[1]
    bounds = row_start_loc.tolist()
    for b, start in enumerate(starts.tolist()):
        positions = torch.arange(bounds[b + 1] - bounds[b], device=cache.device) + start
        blocks = block_table[b].long()[positions // BS]
        slots = blocks * BS + positions % BS
        if out.dtype == torch.float8_e4m3fn:
            rows = cache[blocks, positions % BS].view(out.dtype)
        else:
            rows = get_format(format).read(cache, slots, kv_scale, out.dtype, out.shape[1])
        out[bounds[b] : bounds[b + 1]] = rows
