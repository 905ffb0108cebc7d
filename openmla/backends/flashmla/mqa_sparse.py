"""mqa_sparse with FlashMLA: 64 or 128 heads; packed V3.2 rows, V4 rows and 16-bit rows.

This file converts its conventions: every token is a sequence of one, skipped entries are exactly
-1, the number of entries is a multiple of a tile, lse is [B, H, 1], and an empty row has lse +inf.
Run on SM90 only; for SM100, we rely on what that package claims, for all but V4 pages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from openmla.backends import Problem
from openmla.backends.flashmla._entries import entries
from openmla.backends.flashmla._package import (
    MAX_SEQUENCES,
    Schedule,
    flash_mla,
    legacy,
    why_not_installed,
)
from openmla.backends.kernels import Kernel, choose, why_none
from openmla.backends.segments import Segment, problem_of

TILE = 64  # entries that a decode kernel reads at once; prefill kernels read two tiles
MANY = 1024  # prefill tokens; above this, our own kernels decode packed rows only once


def _why_not(
    problem: Problem, format: str, D: int, segments: int, chips: tuple[int, ...]
) -> str | None:
    if problem.format != format:
        return f"reads {format}, not {problem.format}"
    if problem.capability is None or problem.capability[0] not in chips:
        where = problem.device
        if problem.capability is not None:
            where = "SM{}{}".format(*problem.capability)
        return f"needs {' or '.join(f'SM{chip}0' for chip in chips)}, this is {where}"
    if (problem.D, problem.C) != (D, 512):
        return f"needs rows of 512 + {D - 512}, this is {problem.C} + {problem.D - problem.C}"
    if problem.H not in (64, 128):
        return f"needs 64 or 128 heads, this is {problem.H}"
    if problem.dtype != torch.bfloat16:
        return f"takes bf16 queries, this is {problem.dtype}"
    if len(problem.kinds) > segments:
        return f"takes one segment, this is {' and '.join(problem.kinds)}"
    if problem.run_length:
        return "cuts rows by how many tokens there are"
    return why_not_installed()


def why_not_packed(problem: Problem) -> str | None:
    reason = _why_not(problem, "fp8_ds_mla", 576, 1, (9, 10))
    return reason or _why_not_pages(problem)


def why_not_v4(problem: Problem) -> str | None:
    return _why_not(problem, "fp8_dsv4", 512, 2, (9,)) or _why_not_pages(problem)


def why_not_16_bits(problem: Problem) -> str | None:
    reason = _why_not(problem, "bf16", 576, 1, (9, 10))
    if reason is None and not {"rows", "tight"} <= problem.aligned:
        return "needs one row after another, at multiples of 16 bytes"
    return reason


def _why_not_pages(problem: Problem) -> str | None:
    if problem.tokens > MAX_SEQUENCES:
        return f"takes up to {MAX_SEQUENCES} tokens, this is {problem.tokens}"
    # SM100 needs pages at multiples of a row, which holds if there is no padding between them
    needed = {"pages", "tight"} if problem.capability == (9, 0) else {"rows", "tight"}
    return None if needed <= problem.aligned else "needs whole pages at multiples of 16 bytes"


# H200, bench/results/flashmla_adapter_h200.json, adapter time relative to ours: packed rows with
# 128 heads 2.7, 2.0, 1.5, 1.09 and 0.99 for 1, 4, 16, 64 and 128 tokens, 1.38 for 4096; V4 1.8 to
# 10; 16-bit rows 0.95 for 4096. Not measured on SM100, where we have no kernel for 64 heads.
def slower_packed(problem: Problem) -> str | None:
    if problem.capability != (9, 0):
        return None
    tiles = problem.tokens * problem.H // TILE
    if problem.tokens <= MANY and 2 * tiles > 3 * problem.multiprocessors:
        return None
    return f"converts its arguments: no faster for {problem.tokens} tokens"


def slower_v4(problem: Problem) -> str | None:
    return "converts its arguments, and is as fast as ours at best"


def slower_16_bits(problem: Problem) -> str | None:
    if problem.capability != (9, 0) or problem.tokens > MANY:
        return None
    return "is for prompts: a token's rows are not split"


def _decode(
    q_latent: Tensor,
    query_start_loc: Tensor,
    positions: Tensor,
    segments: Sequence[Segment],
    sink: Tensor | None,
    *,
    C: int,
    scale: float,
    run_length: int,
) -> tuple[Tensor, Tensor]:
    call = flash_mla().flash_mla_with_kvcache
    slots = [entries(part, query_start_loc, positions, TILE)[:, None] for part in segments]
    pages = [part.cache.unsqueeze(2) for part in segments]
    more = {}
    if len(segments) == 2:
        more = {"extra_k_cache": pages[1], "extra_indices_in_kvcache": slots[1]}
    T, H, D = q_latent.shape
    shapes = [
        (part.cache.shape[1], listed.shape[2]) for part, listed in zip(segments, slots, strict=True)
    ]
    with Schedule(T, H, D, q_latent.device, *shapes) as schedule:
        out, lse = call(
            q_latent.contiguous().unsqueeze(1), pages[0], None, None, C, schedule,
            softmax_scale=scale, causal=False, is_fp8_kvcache=True, indices=slots[0],
            attn_sink=sink, **more, **legacy(call),
        )  # fmt: skip
    out = out.squeeze(1)
    return out, _natural(out, lse.squeeze(2))


def _prompt(
    q_latent: Tensor,
    query_start_loc: Tensor,
    positions: Tensor,
    segments: Sequence[Segment],
    sink: Tensor | None,
    *,
    C: int,
    scale: float,
    run_length: int,
) -> tuple[Tensor, Tensor]:
    call = flash_mla().flash_mla_sparse_fwd
    (part,) = segments
    slots = entries(part, query_start_loc, positions, 2 * TILE)[:, None]
    rows = part.cache.view(-1, 1, part.cache.shape[2])
    out, _, lse = call(
        q_latent.contiguous(), rows, slots, scale, d_v=C, attn_sink=sink, **legacy(call)
    )
    return out, _natural(out, lse)


def _natural(out: Tensor, lse: Tensor) -> Tensor:
    """Convert +inf in lse: -inf where there is no row (out is 0), NaN where out is NaN."""
    return torch.where(lse == torch.inf, out[:, :, 0] - torch.inf, lse)


def _kernel(
    name: str,
    why_not: Callable[[Problem], str | None],
    slower: Callable[[Problem], str | None],
    efficiency: float,
    run: Callable[..., Any],
) -> Kernel:
    return Kernel(name, why_not, slower, efficiency, run)


PACKED = _kernel("sparse decode", why_not_packed, slower_packed, 0.59, _decode)
V4 = _kernel("sparse decode V4", why_not_v4, slower_v4, 0.59, _decode)
PROMPT = _kernel("sparse prefill", why_not_16_bits, slower_16_bits, 0.82, _prompt)
KERNELS = (PACKED, V4, PROMPT)
_choose = lru_cache(maxsize=1024)(partial(choose, KERNELS))


def why_not(problem: Problem) -> str | None:
    return why_none(KERNELS, problem)


def slower(problem: Problem) -> str | None:
    return _choose(problem).slower(problem)


def kernel_of(problem: Problem) -> str:
    return _choose(problem).name


def efficiency(problem: Problem) -> float:
    return _choose(problem).efficiency


def prefers_slots(problem: Problem) -> bool:
    return True  # one launch of a kernel that maps them, instead of several by torch


def run(
    q_latent: Tensor,
    query_start_loc: Tensor,
    positions: Tensor,
    segments: Sequence[Segment],
    sink: Tensor | None,
    *,
    C: int,
    scale: float,
    run_length: int,
) -> tuple[Tensor, Tensor]:
    T, H, _ = q_latent.shape
    if T == 0:
        return q_latent.new_empty((0, H, C)), q_latent.new_empty((0, H), dtype=torch.float32)
    problem = problem_of(q_latent, segments, C=C, run_length=run_length)
    sink = None if sink is None else sink.contiguous()
    out: tuple[Tensor, Tensor] = _choose(problem).run(
        q_latent, query_start_loc, positions, segments, sink, C=C, scale=scale,
        run_length=run_length,
    )  # fmt: skip
    return out
