"""V3.2's steps over two ranks: the choice of one process, ties included, and its outputs."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from openmla.attention.offers import choose_over_ranks
from openmla.parallel import attend_over_ranks, rank_buffers, select_over_ranks
from tests.parallel.counted import counted_bytes
from tests.parallel.processes import Processes
from tests.parallel.sparse import K, Sparse

STEPS = {
    "decode": ([1, 1, 1, 1, 1], [37, 16, 9, 2, 1]),  # the last three have nothing to choose
    "several": ([3, 1, 4, 2, 2], [30, 17, 41, 9, 2]),
    "prompts": ([20, 9, 5, 30], [20, 9, 5, 30]),
    "chunked": ([20, 9, 3, 7, 5], [30, 40, 4, 7, 8]),
}


def every_step(rank: int, format: str) -> None:
    for name, run, heads in product(STEPS, (1, 4), ("all", "own")):
        Sparse(*STEPS[name], format=format, run=run, padding=run // 2).check_choice(heads)


@pytest.mark.parametrize("format", ["fp32", "bf16", "fp8", "fp8_ds_mla"])
def test_steps(two_ranks: Processes, format: str) -> None:
    two_ranks.run(every_step, format)


def lengths(rank: int, run: int) -> None:
    seq_lens = list(range(1, 50))
    query_lens = [min(S, 1 + S % 3) for S in seq_lens]
    Sparse(query_lens, seq_lens, run=run).check_choice("all")


@pytest.mark.slow
@pytest.mark.parametrize("run", [1, 2, 4])
def test_every_length(many_ranks: Processes, run: int) -> None:
    many_ranks.run(lengths, run)


def over_buffers(rank: int) -> None:
    """A captured step: every token chooses, also those that see no more than K."""
    for heads in ("all", "own"):
        buffers = None
        for query_lens, seq_lens in (([1, 1, 2], [37, 5, 20]), ([1], [9])):
            story = Sparse(query_lens, seq_lens, padding=4 - sum(query_lens))
            peer = story.chosen_alone(story.dtype)[0]
            plan = story.planned(heads)[0]
            if buffers is None:
                assert plan.ranks is not None
                sizes = {"max_tokens": 4, "max_blocks": 6}
                buffers = rank_buffers(plan.config, story.mine, plan.ranks, **sizes)
            plan, own = story.planned(heads, into=buffers)
            assert [group.form for group in plan.groups] == ["chosen"] and plan.num_tokens == 4
            selection = select_over_ranks(story.index(story.dtype), story.mine, plan)
            given = (story.projected(story.dtype, own), story.absorbed(story.dtype, own))
            out = attend_over_ranks(*given, story.mine, plan, selection=selection)
            torch.testing.assert_close(out, peer[:, own], rtol=1e-5, atol=1e-5)


def test_fixed_buffers(two_ranks: Processes) -> None:
    two_ranks.run(over_buffers)


def in_messages(rank: int) -> None:
    """Of many tokens, a few at a time: the same choice."""
    from openmla.attention import offers

    story = Sparse(*STEPS["chunked"])
    plan = story.planned("all")[0]
    assert plan.select is not None and story.mine.index is not None
    given = (story.index(story.dtype), story.mine.index, plan, plan.select)
    at_once = choose_over_ranks(*given)
    kept, offers.OFFERS_BYTES = offers.OFFERS_BYTES, 3 * 2 * 8 * K
    try:
        with counted_bytes() as counted:
            apart = choose_over_ranks(*given)
    finally:
        offers.OFFERS_BYTES = kept
    assert counted.calls > 5 and torch.equal(at_once, apart)


def test_offers_in_several_messages(two_ranks: Processes) -> None:
    two_ranks.run(in_messages)
