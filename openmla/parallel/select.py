"""select_over_ranks: the K best keys of each token, of all ranks' keys, exactly.

Whoever is among the K best of all is among the K best of its rank. So each rank scores its own
keys and offers its K best, with their scores; everyone gathers the offers and chooses alike: the
higher score, of equals the lower position, as index_topk does. Then each rank attends to those of
the chosen that it holds, and the results are merged.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from openmla.attention import IndexInputs, Selection, make_selection
from openmla.attention.select import check_index, score_chunk, write_keys
from openmla.cache import LayerCache, PagedCache
from openmla.errors import check_kind
from openmla.ops import index_topk, map_slots
from openmla.ops.index_logits import scores_dtype
from openmla.parallel.collectives import all_gather
from openmla.parallel.layout import Shard
from openmla.parallel.types import RankPart, RankPlan

OFFERS_BYTES = 64 * 2**20  # of all ranks at once; more tokens are exchanged in several messages
NOBODY = 2**31 - 1  # position of an offer that is none: behind all others


def select_over_ranks(index: IndexInputs, cache: LayerCache, plan: RankPlan) -> Selection | None:
    """select_step over ranks: keys are written by the ranks that hold them, and what each attends
    to of everyone's choice comes back. None where no request has more keys than K."""
    check_kind("parallel", "plan", plan, RankPlan)
    keys = check_index(index, cache, plan.step)
    write_keys(index, keys, plan.step)
    if plan.chosen is None:
        return None
    positions = choose_over_ranks(index, keys, plan, plan.chosen)
    return held_here(positions, cache, plan, plan.chosen)


def choose_over_ranks(
    index: IndexInputs, keys: PagedCache, plan: RankPlan, part: RankPart
) -> Tensor:  # [n, K] i32
    """Positions in the sequence, the same on every rank; -1 where a token sees fewer than K."""
    scores, positions = _offers(index, keys, plan, part)
    chosen = [
        _best(all_gather(offer, plan.ranks.group), scores.dtype, part)
        for offer in _messages(scores, positions, plan)
    ]
    return chosen[0] if len(chosen) == 1 else torch.cat(chosen)


def _offers(
    index: IndexInputs, keys: PagedCache, plan: RankPlan, part: RankPart
) -> tuple[Tensor, Tensor]:  # scores [n, offered] f32, positions [n, offered] i32
    """The best keys of this rank; position NOBODY where it has fewer."""
    sparse, width = part.scored, plan.candidates
    q_idx, w_idx = index.q_idx[part.rows], index.w_idx[part.rows]
    n, device = sparse.num_rows, q_idx.device
    scores = torch.zeros((n, width), dtype=scores_dtype(q_idx.dtype), device=device)
    positions = torch.full((n, width), NOBODY, dtype=torch.int32, device=device)
    for chunk, start_loc in zip(sparse.chunks, sparse.score_start_locs, strict=True):
        if chunk.num_keys == 0:  # all of these are elsewhere
            continue
        logits = score_chunk(q_idx, w_idx, keys, part.plan, sparse, chunk, start_loc)
        seen = sparse.row_lens[chunk.rows]
        best, _ = index_topk(
            logits,
            torch.zeros_like(seen),
            seen,
            K=width,
            backend=part.plan.backends["index_topk"],
        )
        scores[chunk.rows] = logits.gather(1, best.clamp_min(0).long())
        found = plan.shard.global_positions(best)
        positions[chunk.rows] = torch.where(best < 0, NOBODY, found)
    return scores, positions


def _messages(scores: Tensor, positions: Tensor, plan: RankPlan) -> Iterator[Tensor]:
    """Offers as bytes [n', offered * 8], as many tokens at once on every rank."""
    packed = torch.cat([scores.view(torch.uint8), positions.view(torch.uint8)], dim=1)
    step = max(OFFERS_BYTES // (packed.shape[1] * plan.ranks.shard.size), 1)
    for first in range(0, len(packed), step):
        yield packed[first : first + step]


def _best(every: Tensor, dtype: torch.dtype, part: RankPart) -> Tensor:  # [n', K] i32
    """The K best of all ranks' offers [W, n', bytes], by one rule on every rank."""
    indexer = part.plan.config.indexer
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
    positions, order = positions.sort(dim=1)  # of equal scores, the first will be taken
    count = (positions < NOBODY).sum(1, dtype=torch.int32)
    best, _ = index_topk(
        scores.gather(1, order),
        torch.zeros_like(count),
        count,
        K=indexer.topk,
        backend=part.plan.backends["index_topk"],
    )
    found = positions.gather(1, best.clamp_min(0).long())
    return torch.where(best < 0, -1, found)


def held_here(
    positions: Tensor, cache: LayerCache, plan: RankPlan, part: RankPart
) -> Selection | None:
    """Of chosen positions [n, K], those that this rank holds, by their numbers here."""
    own, lens = local_choice(positions, plan.shard, part)
    return make_selection(own, cache, part.plan, lens=lens)


def local_choice(positions: Tensor, shard: Shard, part: RankPart) -> tuple[Tensor, Tensor]:
    """[n, K] i32 and how many columns count: map_slots by a table in which every block is where it
    was, so that slots are numbers of keys."""
    BS, device = part.plan.block_size, positions.device
    M = part.scored.block_table.shape[1]
    return map_slots(
        positions,
        torch.arange(M, dtype=torch.int32, device=device)[None],
        torch.arange(2, dtype=torch.int32, device=device) * len(positions),
        BS=BS,
        num_blocks=M,
        cp_size=shard.size,
        cp_rank=shard.rank,
        interleave=shard.interleave,
        compact=True,
        backend=part.plan.requested["map_slots"],
    )
