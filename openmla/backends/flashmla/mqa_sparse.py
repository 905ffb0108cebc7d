"""mqa_sparse through flash_mla_with_kvcache: 64 or 128 heads over fp8_ds_mla rows.

Its conventions, converted here: every token is a sequence of one, skipped entries are exactly -1,
the number of entries is a multiple of 64, lse is [B, H, 1], and an empty row has lse +inf.
Run on SM90; SM100 is taken by that package's own word, with the page strides it asks for there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from openmla.backends import Problem
from openmla.errors import ShapeError
from openmla.hardware import capability

ENTRIES = 64  # the kernel's tile; rows are filled up to it
PAGE_STRIDES = {9: 16, 10: 656}  # by major capability: pages lie at multiples of so many bytes


def why_not(problem: Problem) -> str | None:
    if problem.capability is None or problem.capability[0] not in PAGE_STRIDES:
        major, minor = problem.capability or (0, 0)
        where = problem.device if problem.capability is None else f"SM{major}{minor}"
        return f"needs SM90 or SM100, this is {where}"
    if problem.format != "fp8_ds_mla":
        return f"reads fp8_ds_mla, whose scales it does not round, not {problem.format}"
    if (problem.D, problem.C) != (576, 512):
        return f"needs rows of 512 + 64, this is {problem.C} + {problem.D - problem.C}"
    if problem.H not in (64, 128):
        return f"needs 64 or 128 heads, this is {problem.H}"
    if problem.dtype != torch.bfloat16:
        return f"takes bf16 queries, this is {problem.dtype}"
    if problem.kinds != ("slots",):
        return f"takes one segment of slots, this is {' and '.join(problem.kinds)}"
    if problem.run_length:
        return "cuts rows by how many tokens there are"
    return None


def efficiency(problem: Problem) -> float:
    return 0.75  # as our own kernels of many heads, which it is as fast as


def run(
    q_latent: Tensor,
    query_start_loc: Tensor,
    positions: Tensor,
    segments: Sequence[Any],
    sink: Tensor | None,
    *,
    C: int,
    scale: float,
    run_length: int,
) -> tuple[Tensor, Tensor]:
    from flash_mla import flash_mla_with_kvcache, get_mla_metadata

    (segment,) = segments
    T, H, _ = q_latent.shape
    major = (capability(q_latent.device) or (9, 0))[0]
    if segment.cache.stride(0) % PAGE_STRIDES[major] or segment.cache.data_ptr() % 16:
        raise ShapeError(
            f"mqa_sparse: pages must lie at multiples of {PAGE_STRIDES[major]} bytes for flashmla, "
            f"got strides {segment.cache.stride()}. Pad them, or give backend='reference'."
        )
    if T == 0:
        return q_latent.new_empty((0, H, C)), q_latent.new_empty((0, H), dtype=torch.float32)
    slots = entries(segment, query_start_loc)
    metadata, _ = get_mla_metadata()
    out, lse = flash_mla_with_kvcache(
        q_latent.contiguous().unsqueeze(1),
        segment.cache.unsqueeze(2),
        None,
        None,
        C,
        metadata,
        softmax_scale=scale,
        causal=False,
        is_fp8_kvcache=True,
        indices=slots.unsqueeze(1),
        attn_sink=sink,
    )
    lse = lse.squeeze(2)
    return out.squeeze(1), lse.masked_fill(lse == torch.inf, -torch.inf)


def entries(segment: Any, query_start_loc: Tensor) -> Tensor:
    """[T, n] i32 with n a multiple of 64: the slots, -1 for all that do not count."""
    N, BS, _ = segment.cache.shape
    T, K = segment.rows.shape
    columns = torch.arange(K, device=segment.rows.device)
    tokens = torch.arange(T, device=segment.rows.device)[:, None]
    counts = (segment.rows < N * BS) & (columns < segment.row_lens[:, None])
    counts &= tokens < query_start_loc[-1]
    slots = segment.rows.where(counts, -1).clamp_min(-1)
    return torch.nn.functional.pad(slots, (0, -K % ENTRIES), value=-1).contiguous()
