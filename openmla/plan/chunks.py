"""Cuts long contexts into chunks that fit the workspace, so that every row is in one chunk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Spans(NamedTuple):
    """One chunk: requests first, first+1, ... each with a span of its context rows."""

    first: int
    starts: tuple[int, ...]
    lens: tuple[int, ...]


def cut_at_fixed(context_lens: Sequence[int], cut: int, budget: int) -> list[Spans]:
    """Cut every context after each `cut` of its own rows, independently of other requests.
    Neighbors share a chunk while they fit the budget. A chunk has at most one span of a request,
    and only its first can be a continuation, as below. A request without context ends a chunk."""
    assert cut > 0
    chunks: list[Spans] = []
    first, starts, lens = 0, [], []  # type: int, list[int], list[int]
    for request, context in enumerate(context_lens):
        for done in range(0, context, cut):
            take = min(cut, context - done)
            neighbour = first + len(lens) == request
            if lens and not (neighbour and sum(lens) + take <= budget):
                chunks.append(Spans(first, tuple(starts), tuple(lens)))
                first, starts, lens = request, [], []
            first = first if lens else request
            starts.append(done)
            lens.append(take)
    if lens:
        chunks.append(Spans(first, tuple(starts), tuple(lens)))
    return chunks


def cut_contexts(context_lens: Sequence[int], budget: int, align: int) -> list[Spans]:
    """Pack contexts greedily, in order, into chunks of at most `budget` rows.

    A context that does not fit is cut at a multiple of `align`; only the first request of a chunk
    can be a continuation. A request without context ends a chunk, so that a chunk's requests, and
    therefore its query rows, are neighbors. budget is at least align.
    """
    assert budget >= align > 0
    chunks: list[Spans] = []
    first, starts, lens = 0, [], []  # type: int, list[int], list[int]

    def close(following: int) -> None:
        nonlocal first, starts, lens
        if lens:
            chunks.append(Spans(first, tuple(starts), tuple(lens)))
        first, starts, lens = following, [], []

    for request, context in enumerate(context_lens):
        if context == 0:
            close(request + 1)
            continue
        done = 0
        while done < context:
            free = budget - sum(lens)
            rest = context - done
            take = rest if rest <= free else min(free, rest - 1) // align * align
            if take > 0:
                starts.append(done)
                lens.append(take)
                done += take
            if done < context:
                close(request)
    close(len(context_lens))
    return chunks
