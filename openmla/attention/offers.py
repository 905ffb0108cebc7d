"""Exact top-k selection over the keys of all ranks.

A key in the global top K is also in the top K of its rank. Each rank therefore scores its own keys
and offers its K best with their scores. All ranks gather the offers and select by the same rule as
index_topk: the higher score first, and the lower position among equal scores. Then each rank
attends to the selected keys that it holds, and the results are merged.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from openmla.attention.scores import score_chunk
from openmla.attention.types import IndexInputs, rows_of
from openmla.cache import PagedCache
from openmla.ops import index_topk, map_slots
from openmla.ops.index_logits import scores_dtype
from openmla.plan import Plan, Select
from openmla.ranks.collectives import all_gather

OFFERS_BYTES = 64 * 2**20  # per message, over all ranks; more tokens take several messages
NOBODY = 2**31 - 1  # position of an empty offer, which sorts last


def choose_over_ranks(
    index: IndexInputs, keys: PagedCache, plan: Plan, select: Select
) -> Tensor:  # [n, K] i32
    """Return positions in the sequence, equal on every rank; -1 if a token sees fewer than K."""
    assert plan.ranks is not None
    scores, positions = _offers(index, keys, plan, select)
    chosen = [
        _best(all_gather(offer, plan.ranks.link), scores.dtype, plan)
        for offer in _messages(scores, positions, plan.ranks.shard.size)
    ]
    return chosen[0] if len(chosen) == 1 else torch.cat(chosen)


def _offers(
    index: IndexInputs, keys: PagedCache, plan: Plan, select: Select
) -> tuple[Tensor, Tensor]:  # scores [n, offered] f32, positions [n, offered] i32
    """Return the best keys of this rank, padded with position NOBODY."""
    width, shard = select.offered, select.shard
    assert shard is not None
    q_idx, w_idx = rows_of(index.q_idx, select.rows), rows_of(index.w_idx, select.rows)
    n, device = select.num_rows, q_idx.device
    scores = torch.zeros((n, width), dtype=scores_dtype(q_idx.dtype), device=device)
    positions = torch.full((n, width), NOBODY, dtype=torch.int32, device=device)
    for chunk, start_loc in zip(select.chunks, select.start_locs, strict=True):
        if chunk.num_keys == 0:  # other ranks hold all of these keys
            continue
        logits = score_chunk(q_idx, w_idx, keys, plan, select, chunk, start_loc)
        seen = select.row_lens[chunk.rows]
        best, _ = index_topk(
            logits, torch.zeros_like(seen), seen, K=width, backend=plan.backend("index_topk")
        )
        scores[chunk.rows] = logits.gather(1, best.clamp_min(0).long())
        found = shard.global_positions(best)
        positions[chunk.rows] = torch.where(best < 0, NOBODY, found)
    return scores, positions


def _messages(scores: Tensor, positions: Tensor, size: int) -> Iterator[Tensor]:
    """Yield offers as bytes [n', offered * 8], with the same n' on every rank."""
    packed = torch.cat([scores.view(torch.uint8), positions.view(torch.uint8)], dim=1)
    if torch.compiler.is_compiling():  # sizes are symbols, which a loop would specialize
        yield packed
        return
    step = max(OFFERS_BYTES // (packed.shape[1] * size), 1)
    for first in range(0, len(packed), step):
        yield packed[first : first + step]


def _best(every: Tensor, dtype: torch.dtype, plan: Plan) -> Tensor:  # [n', K] i32
    """Select the K best of all ranks' offers [W, n', bytes], by the same rule on every rank."""
    indexer = plan.config.indexer
    assert indexer is not None
    width = every.shape[2] // (dtype.itemsize + 4)
    scores, positions = (
        offers.transpose(0, 1).contiguous().view(kind).flatten(1)
        for offers, kind in zip(
            every.split([width * dtype.itemsize, width * 4], dim=2),
            (dtype, torch.int32),
            strict=True,
        )
    )
    positions, order = positions.sort(dim=1)  # index_topk takes the first of equal scores
    count = (positions < NOBODY).sum(1, dtype=torch.int32)
    best, _ = index_topk(
        scores.gather(1, order),
        torch.zeros_like(count),
        count,
        K=indexer.topk,
        backend=plan.backend("index_topk"),
    )
    found = positions.gather(1, best.clamp_min(0).long())
    return torch.where(best < 0, -1, found)


def held_here(positions: Tensor, plan: Plan, select: Select) -> tuple[Tensor, Tensor]:
    """Filter positions [n, K] to the keys that this rank holds, renumbered locally: [n, K] i32, and
    how many columns count. Masked tokens keep their positions in the sequence, because all keys are
    gathered for them."""
    masked = plan.group("masked")
    if masked is None:
        return _numbered_here(positions, plan, select)
    assert masked.selected is not None
    first = masked.selected.start
    here, lens = _numbered_here(positions[:first], plan, select)
    return torch.cat([here, positions[first:]]), lens


def _numbered_here(positions: Tensor, plan: Plan, select: Select) -> tuple[Tensor, Tensor]:
    """Renumber with map_slots and an identity block table, so that slots are local key numbers."""
    shard, device, M = select.shard, positions.device, select.block_table.shape[1]
    assert shard is not None
    return map_slots(
        positions,
        torch.arange(M, dtype=torch.int32, device=device)[None],
        torch.arange(2, dtype=torch.int32, device=device) * positions.shape[0],
        BS=select.block_size,
        num_blocks=M,
        cp_size=shard.size,
        cp_rank=shard.rank,
        interleave=shard.interleave,
        compact=True,
        backend=plan.backend("map_slots"),
    )
