"""Scores of the lightning indexer, for a chunk of tokens at a time."""

from __future__ import annotations

from torch import Tensor

from openmla.cache import PagedCache
from openmla.ops import index_logits
from openmla.plan import Plan, ScoreChunk, Select


def score_chunk(
    q_idx: Tensor,  # [n, HI, DI]
    w_idx: Tensor,  # [n, HI]
    keys: PagedCache,
    plan: Plan,
    select: Select,
    chunk: ScoreChunk,
    start_loc: Tensor,  # [B+1] i32
) -> Tensor:  # [rows, num_keys] f32
    """Score the keys that a chunk's rows may see."""
    rows = chunk.rows
    q, scales = keys.layout.encode_query(q_idx[rows])
    w = w_idx[rows] if scales is None else w_idx[rows] * scales
    return index_logits(
        q,
        w,
        keys.data,
        select.block_table,
        start_loc,
        select.row_lens[rows],
        format=keys.format,
        num_keys=chunk.num_keys,
        batch_invariant=plan.batch_invariant,
        backend=plan.backend("index_logits"),
    )
