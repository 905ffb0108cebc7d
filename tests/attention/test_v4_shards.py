"""docs/context-parallel-v4.md, carried out for several ranks in one process by the ops as they are.

Every rank pools all tokens, keeps the entries of its own blocks, scores and chooses among those;
their best make the choice of one rank; entries merged, then the window, then the sink: its answer.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from openmla import apply_sink
from openmla.ops import (
    Segment,
    compress_kv,
    index_logits,
    index_topk,
    merge_states,
    mqa_sparse,
)

BS, D, DI, R, H, HI, WINDOW, SCALE = 128, 32, 16, 8, 4, 16, 32, 0.3
ONE = torch.ones(())
LENS = (1100, 130, 3)  # one of them shorter than an entry
LAST = 3  # tokens of each that attend, as drafts do


class Rank(NamedTuple):
    """Entries and keys in blocks that a rank owns."""

    entries: Tensor  # [N, BS / r, D]
    keys: Tensor  # [N, BS / r, DI]
    write_table: Tensor  # [B, M] i32: every block of a request, others' as -1
    own: list[int]  # blocks of a request that are here
    table: Tensor  # [B, len(own)] i32


def f64(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


class Tokens(NamedTuple):
    """All requests' tokens as projected, for the layer's own entries and the indexer's keys."""

    pools: dict[int, tuple[Tensor, Tensor, Tensor, Tensor]]  # kv, score, bias, norm
    positions: Tensor
    start_loc: Tensor
    rope: Tensor


def make_tokens(ratio: int) -> Tokens:
    torch.manual_seed(ratio)
    T, wide = sum(LENS), 2 if ratio == 4 else 1
    pools = {
        width: (f64(T, wide * width), f64(T, wide * width), f64(ratio, wide * width), f64(width))
        for width in (D, DI)
    }
    positions = torch.cat([torch.arange(n) for n in LENS])
    start_loc = torch.tensor([0, *torch.tensor(LENS).cumsum(0).tolist()], dtype=torch.int32)
    angles = torch.outer(torch.arange(2000.0), 10.0 ** -torch.arange(R // 2)).double()
    return Tokens(pools, positions, start_loc, torch.cat([angles.cos(), angles.sin()], 1))


def compress(tokens: Tokens, ratio: int, rank: int, W: int) -> Rank:
    """What the rank keeps after a prompt of all tokens; its own blocks are every W-th."""
    B, M = len(LENS), -(-max(LENS) // BS)
    own = list(range(rank, M, W))
    N = B * len(own)
    table = torch.randperm(N).int().view(B, len(own))
    write_table = torch.full((B, M), -1, dtype=torch.int32)
    write_table[:, own] = table
    caches = []
    for width, pool in tokens.pools.items():
        overlap = ratio == 4
        cache = torch.full((max(N, 1), BS // ratio, width), torch.nan)
        rows, values = (7, 4 * width) if overlap else (1, 3 * width)
        state = torch.full((B, rows, values), torch.nan, dtype=torch.float64)
        compress_kv(
            cache, ONE, state, *pool, tokens.rope, tokens.positions, tokens.start_loc, write_table,
            torch.arange(B, dtype=torch.int32), format="fp32" if width == D else "index_fp32",
            ratio=ratio, overlap=overlap, eps=1e-6, backend="reference",
        )  # fmt: skip
        caches.append(cache)
    return Rank(caches[0], caches[1], write_table, own, table)


class Queries(NamedTuple):
    """The last tokens of every request."""

    q: Tensor
    q_idx: Tensor
    w_idx: Tensor
    start_loc: Tensor
    positions: Tensor
    window: Segment  # on every rank


def make_queries() -> Queries:
    positions = torch.cat([torch.arange(n - LAST, n) for n in LENS])
    T, blocks = len(positions), -(-max(LENS) // BS)
    rows = torch.randn(len(LENS) * blocks, BS, D)
    table = torch.arange(len(LENS) * blocks).int().view(len(LENS), blocks)
    window = Segment(rows, ONE, "fp32", "window", block_table=table, span=WINDOW)
    start_loc = torch.arange(0, T + 1, LAST, dtype=torch.int32)
    return Queries(f64(T, H, D), f64(T, HI, DI), f64(T, HI), start_loc, positions, window)


def visible(queries: Queries, ratio: int, own: list[int]) -> tuple[Tensor, Tensor]:
    """Entries that tokens see: all, and those of some blocks, a prefix of what a rank has."""
    counts = (queries.positions + 1) // ratio
    starts = torch.tensor(own, dtype=torch.int64) * (BS // ratio)
    here = (counts[:, None] - starts).clamp(0, BS // ratio).sum(1)
    return counts, here.int()


def candidates(rank: Rank, queries: Queries, ratio: int, K: int) -> tuple[Tensor, Tensor]:
    """A rank's best entries, by their numbers in the request, and their scores."""
    _, here = visible(queries, ratio, rank.own)
    keys = len(rank.own) * BS // ratio
    logits = index_logits(
        queries.q_idx, queries.w_idx, rank.keys, rank.table, queries.start_loc, here,
        format="index_fp32", num_keys=keys, backend="reference",
    )  # fmt: skip
    local, lens = index_topk(logits, torch.zeros_like(here), here, K=K, backend="reference")
    kept = torch.arange(K) < lens[:, None]
    local = local.long().clamp_min(0)
    block, offset = local // (BS // ratio), local % (BS // ratio)
    numbers = torch.tensor(rank.own)[block] * (BS // ratio) + offset
    scores = logits.gather(1, local)
    return numbers.masked_fill(~kept, -1), scores.masked_fill(~kept, -torch.inf)


def choose(ranks: list[Rank], queries: Queries, ratio: int, K: int) -> tuple[Tensor, Tensor]:
    """The best of all ranks' best, of equals the lower number: [T, K] i32, and how many."""
    counts, _ = visible(queries, ratio, [])
    every = torch.full((len(counts), max(LENS) // ratio + 1), -torch.inf, dtype=torch.float64)
    for rank in ranks:
        numbers, scores = candidates(rank, queries, ratio, K)
        every.scatter_(1, numbers % every.shape[1], scores)  # none: the last column, which is free
    starts, lens = torch.zeros_like(counts).int(), counts.int()
    return index_topk(every, starts, lens, K=K, sorted=True, backend="reference")


def attend(
    ranks: list[Rank], queries: Queries, ratio: int, chosen: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """Each rank over its own of the chosen entries, or of all; then the window, then the sink."""
    parts = []
    for rank in ranks:
        table = rank.write_table  # others' blocks are skipped
        if chosen is None:
            entries = Segment(rank.entries, ONE, "fp32", "prefix", table, span=ratio)
        else:
            entries = Segment(rank.entries, ONE, "fp32", "positions", table, *chosen)
        parts.append(over(queries, entries))
    out, lse = parts[0]
    for part in (*parts[1:], over(queries, queries.window)):
        merge_states(out, lse, *part, backend="reference")
    return apply_sink(out, lse, sink())


def over(queries: Queries, *segments: Segment, sink: Tensor | None = None) -> tuple[Tensor, Tensor]:
    second = segments[1] if len(segments) > 1 else None
    return mqa_sparse(
        queries.q, queries.start_loc, queries.positions, segments[0], second, sink, C=D,
        scale=SCALE, backend="reference",
    )  # fmt: skip


def by_one_rank(whole: Rank, queries: Queries, K: int) -> tuple[Tensor, Tensor]:
    """The choice over all scores."""
    counts = ((queries.positions + 1) // 4).int()
    logits = index_logits(
        queries.q_idx, queries.w_idx, whole.keys, whole.table, queries.start_loc, counts,
        format="index_fp32", num_keys=max(LENS) // 4, backend="reference",
    )  # fmt: skip
    starts = torch.zeros_like(counts)
    return index_topk(logits, starts, counts, K=K, sorted=True, backend="reference")


def sink() -> Tensor:
    return torch.linspace(-1, 1, H)


@pytest.mark.parametrize("W", [2, 3, 8])
@pytest.mark.parametrize("K", [16, 200])
def test_ranks_that_share_entries_are_one(W: int, K: int) -> None:
    tokens = make_tokens(4)
    whole = compress(tokens, 4, 0, 1)
    ranks = [compress(tokens, 4, rank, W) for rank in range(W)]
    for rank in ranks:  # each has, bit for bit, its own blocks of what one rank has
        for mine, theirs in ((rank.entries, whole.entries), (rank.keys, whole.keys)):
            assert torch.equal(
                mine[rank.table.long()].nan_to_num(7),
                theirs[whole.table[:, rank.own].long()].nan_to_num(7),
            )
    queries = make_queries()
    chosen = choose(ranks, queries, 4, K)
    alone = by_one_rank(whole, queries, K)
    assert all(map(torch.equal, chosen, alone))
    entries = Segment(whole.entries, ONE, "fp32", "positions", whole.table, *alone)
    wanted, _ = over(queries, queries.window, entries, sink=sink())
    assert torch.allclose(attend(ranks, queries, 4, chosen), wanted, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("W", [2, 3, 16])
def test_entries_of_ratio_128_may_be_shared_too(W: int) -> None:
    """16 ranks are more than there are blocks: most have nothing."""
    tokens = make_tokens(128)
    whole = compress(tokens, 128, 0, 1)
    ranks = [compress(tokens, 128, rank, W) for rank in range(W)]
    queries = make_queries()
    entries = Segment(whole.entries, ONE, "fp32", "prefix", whole.table, span=128)
    wanted, _ = over(queries, queries.window, entries, sink=sink())
    assert torch.allclose(attend(ranks, queries, 128), wanted, rtol=1e-12, atol=1e-14)


def test_equal_scores_are_chosen_as_by_one_rank() -> None:
    """Keys that are all alike tie: the lower entries win, on whichever rank they are."""
    tokens = make_tokens(4)
    kv, score, bias, norm = tokens.pools[DI]
    alike = tokens._replace(
        pools={**tokens.pools, DI: (torch.ones_like(kv), score, bias, norm)},
        rope=torch.cat([torch.ones(2000, R // 2), torch.zeros(2000, R // 2)], 1).double(),
    )
    whole, ranks = compress(alike, 4, 0, 1), [compress(alike, 4, rank, 3) for rank in range(3)]
    queries = make_queries()._replace(q_idx=torch.ones(9, HI, DI).double())
    queries = queries._replace(w_idx=torch.zeros_like(queries.w_idx))
    chosen, _ = choose(ranks, queries, 4, 16)
    assert torch.equal(chosen, by_one_rank(whole, queries, 16)[0])
    assert chosen[0].tolist() == list(range(16))
