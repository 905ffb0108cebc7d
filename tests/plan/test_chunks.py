"""Context chunks: exhaustive over small sizes, hypothesis for the rest."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from openmla.plan.chunks import Spans, cut_at_fixed, cut_contexts


def check(contexts: Sequence[int], budget: int, align: int) -> None:
    """The laws: every row once and in order, within budget, aligned cuts, greedy."""
    chunks = cut_contexts(contexts, budget, align)
    covered = [0] * len(contexts)
    for index, chunk in enumerate(chunks):
        assert 0 < sum(chunk.lens) <= budget
        assert len(chunk.starts) == len(chunk.lens) > 0
        for offset, (start, length) in enumerate(zip(chunk.starts, chunk.lens, strict=True)):
            request = chunk.first + offset
            assert length > 0 and start == covered[request]  # in order, nothing twice
            covered[request] += length
            if covered[request] < contexts[request]:  # cut: aligned, and the chunk's last
                assert covered[request] % align == 0 and offset == len(chunk.lens) - 1
            if start > 0:
                assert offset == 0  # only the first request continues
        if index + 1 < len(chunks):  # the next row did not fit, or a request without context
            following = chunks[index + 1]
            stop = chunk.first + len(chunk.lens)
            gap = any(contexts[r] == 0 for r in range(stop, following.first))
            assert gap or sum(chunk.lens) + min(following.lens[0], align) > budget
    assert covered == list(contexts)


def test_exhaustive_small() -> None:
    for align in (1, 2, 3):
        for budget in range(align, 8):
            for contexts in product(range(8), repeat=3):
                check(contexts, budget, align)


@given(
    contexts=st.lists(st.integers(0, 5000), max_size=12),
    align=st.sampled_from([1, 16, 64, 100]),
    blocks=st.integers(1, 40),
    surplus=st.integers(0, 99),
)
def test_chunks_cover_contexts_of_any_sizes(
    contexts: list[int], align: int, blocks: int, surplus: int
) -> None:
    check(contexts, align * blocks + surplus, align)


def test_worked_examples() -> None:
    assert cut_contexts([768, 512, 512], 1024, 16) == [
        Spans(0, (0, 0), (768, 256)),
        Spans(1, (256, 0), (256, 512)),
    ]
    assert cut_contexts([2048, 32, 32], 1024, 16) == [
        Spans(0, (0,), (1024,)),
        Spans(0, (1024,), (1024,)),
        Spans(1, (0, 0), (32, 32)),
    ]
    assert cut_contexts([0, 0], 16, 16) == []
    assert cut_contexts([8, 0, 8], 16, 4) == [Spans(0, (0,), (8,)), Spans(2, (0,), (8,))]


def test_fixed_cuts_are_each_contexts_own() -> None:
    """Every row once and in order, cut at multiples of `cut` alone, whatever is beside it."""
    for cut, budget in product((1, 2, 3), (0, 3, 5, 100)):
        for contexts in product(range(6), repeat=3):
            covered = [0] * len(contexts)
            for chunk in cut_at_fixed(contexts, cut, budget):
                assert sum(chunk.lens) <= budget or len(chunk.lens) == 1
                for offset, (start, length) in enumerate(
                    zip(chunk.starts, chunk.lens, strict=True)
                ):
                    request = chunk.first + offset
                    assert start == covered[request] and start % cut == 0
                    assert length == min(cut, contexts[request] - start) > 0
                    assert start == 0 or offset == 0  # only the first request continues
                    covered[request] += length
            assert covered == list(contexts)
