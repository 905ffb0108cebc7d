"""index_select, Triton: scores of some rows, then their best, then more rows.

Two kernels a turn, index_logits' and index_topk's own, so the answer is theirs, and a turn's scores
are all that is ever held. Longer turns were not faster on an H200 (48 to 192 MiB), shorter ones,
whose scores stay in the second-level cache, slower: each ends with idle processors.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from openmla.backends import Problem
from openmla.backends.triton import index_logits, index_topk
from openmla.backends.triton._build import Build

SCORES = 64 << 20  # bytes held at once


def why_not(problem: Problem) -> str | None:
    return index_logits.why_not(problem)


def rows_at_once(num_rows: int, num_keys: int) -> int:
    """Turns of about equal size."""
    most = max(SCORES // (4 * max(num_keys, 1)), 1)
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
    step = max(rows_at_once(T, num_keys), 1)
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
        del logits  # before the next turn's
    return positions, lens


def builds() -> Iterator[Build]:
    """None of its own."""
    return iter(())
