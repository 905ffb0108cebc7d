"""index_select, Triton: scores of as many rows as the second-level cache holds, then their best.

Two kernels a turn, index_logits' and index_topk's own, so the answer is theirs. What the first
writes the second reads before it leaves the cache: hardly a score gets to memory, and a turn's
scores are all that is ever held.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from openmla.backends import Problem
from openmla.backends.triton import index_logits, index_topk
from openmla.backends.triton._build import Build
from openmla.hardware import l2_cache

SHARE = 0.75  # of the cache; queries and keys pass through it too


def why_not(problem: Problem) -> str | None:
    return index_logits.why_not(problem)


def rows_at_once(num_rows: int, num_keys: int, device: torch.device) -> int:
    """Turns of about equal size, each within the cache if a single row is."""
    most = max(int(SHARE * l2_cache(device)) // (4 * max(num_keys, 1)), 1)
    turns = -(-num_rows // most)
    return -(-num_rows // max(turns, 1))


def run(
    q_idx: Tensor,
    w_idx: Tensor,
    cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    row_lens: Tensor,
    *,
    format: str,
    num_keys: int,
    K: int,
    sorted: bool,
) -> tuple[Tensor, Tensor]:
    T = q_idx.shape[0]
    positions = row_lens.new_empty((T, K))
    lens, starts = torch.empty_like(row_lens), torch.zeros_like(row_lens)
    step = max(rows_at_once(T, num_keys, q_idx.device), 1)
    for i in range(0, T, step):
        turn = slice(i, min(i + step, T))
        bounds = query_start_loc
        if step < T:
            bounds = query_start_loc.clamp(turn.start, turn.stop) - turn.start
        logits = index_logits.run(
            q_idx[turn],
            w_idx[turn],
            cache,
            block_table,
            bounds,
            row_lens[turn],
            format=format,
            num_keys=num_keys,
        )
        index_topk.choose_rows(logits, starts[turn], row_lens[turn], positions[turn], lens[turn])
    return positions, lens


def builds() -> Iterator[Build]:
    """None of its own."""
    return iter(())
