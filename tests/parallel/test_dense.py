"""Dense steps over two ranks are those of one process: formats, forms, heads, schedules."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.parallel.counted import counted_bytes
from tests.parallel.parts import context_of, gathered_chunks
from tests.parallel.processes import Processes
from tests.parallel.stories import Story

STEPS = {
    "decode": ([1, 1, 1, 1, 1], [37, 16, 9, 2, 1]),  # the last is shorter than there are ranks
    "several": ([3, 1, 4, 2, 2], [30, 17, 41, 5, 2]),  # drafts
    "prompts": ([20, 9, 1, 30], [20, 9, 1, 30]),
    "chunked": ([20, 9, 3, 7], [30, 40, 4, 7]),
    "mixed": ([1, 20, 3, 0, 12, 1], [30, 45, 17, 9, 12, 1]),
}
FORMATS = ("fp32", "bf16", "fp8", "fp8_ds_mla")


def contexts(rank: int, format: str) -> None:
    """In place and gathered, in whole and in chunks of a few rounds."""
    for heads, run, tokens in product(("all", "own"), (1, 2, 4), (8, 24, None)):
        story = Story(*STEPS["mixed"], format=format, run=run, padding=1)
        options: dict[str, Any] = {"heads": heads, "form": "expanded", "workspace_tokens": tokens}
        plan = story.check(**options, context="gather")
        assert context_of(plan) is None and gathered_chunks(plan)
        assert (len(gathered_chunks(plan)) > 1) == (tokens is not None)
        assert "gathered from all ranks" in plan.explain()
        with counted_bytes() as counted:
            Story(*STEPS["mixed"], format=format, run=run, padding=1).over_ranks(
                **options, context="gather", check=False
            )
        assert counted.num_bytes == plan.sent_bytes(story.dtype)
        assert counted.calls == len(gathered_chunks(plan))
        plan = story.check(**options, context="place")
        assert context_of(plan) is not None and "attended to in place" in plan.explain()


@pytest.mark.parametrize("format", FORMATS)
def test_contexts_over_two_ranks_equal_one_process(two_ranks: Processes, format: str) -> None:
    two_ranks.run(contexts, format)


def cheaper(rank: int) -> None:
    """Few keys from elsewhere are gathered, many attended to where they are."""
    for heads in ("all", "own"):
        plan = Story([60], [64]).planned(heads, form="expanded")[0]
        assert gathered_chunks(plan) and context_of(plan) is None
        plan = Story([2], [900], BS=64).planned(heads, form="expanded")[0]
        assert not gathered_chunks(plan) and context_of(plan) is not None


def test_contexts_by_cost(two_ranks: Processes) -> None:
    two_ranks.run(cheaper)


def every_step(rank: int, format: str) -> None:
    for name, heads in product(STEPS, ("all", "own")):
        Story(*STEPS[name], format=format).check(heads=heads, form="auto")
    for form in ("absorbed", "expanded"):
        Story(*STEPS["mixed"], format=format, run=4, padding=3).check(form=form)
        Story(*STEPS["chunked"], format=format, run=2).check(form=form, workspace_tokens=8)


@pytest.mark.parametrize("format", FORMATS)
def test_steps(two_ranks: Processes, format: str) -> None:
    two_ranks.run(every_step, format)


def schedules(rank: int) -> None:
    for heads, name in product(("all", "own"), ("several", "chunked")):
        outs = [
            Story(*STEPS[name], format="bf16").over_ranks(
                heads=heads, schedule=schedule, context="place"
            )[0]
            for schedule in ("gather", "exchange")
        ]
        assert torch.equal(*outs), "the schedules must agree to the bit on two ranks"


def test_schedules_agree_to_the_bit(two_ranks: Processes) -> None:
    two_ranks.run(schedules)


def counted_steps(rank: int) -> None:
    """What a layer sends is what the plan says, and of prompts without context nothing."""
    for heads, schedule, name in product(("all", "own"), ("gather", "exchange"), STEPS):
        story = Story(*STEPS[name], format="bf16", padding=2)
        plan = story.over_ranks(heads=heads, schedule=schedule)[1]
        with counted_bytes() as counted:
            story.over_ranks(heads=heads, schedule=schedule, check=False)
        assert counted.num_bytes == plan.sent_bytes(torch.bfloat16), (heads, schedule, name)
        silent = all(group.across is None for group in plan.groups) and not gathered_chunks(plan)
        assert (counted.calls == 0) == silent
        H, V, C, D = 4, 24, 32, 40
        if name == "decode" and schedule == "exchange":  # the formula of the docs, in numbers
            row = 2 * V + 4 if heads == "all" else (2 * C + 4) / 2 + 2 * D / 2
            assert counted.num_bytes == 5 * H * row


def test_sent_bytes(two_ranks: Processes) -> None:
    two_ranks.run(counted_steps)


def prefixes(rank: int) -> None:
    for heads in ("all", "own"):
        story = Story([1, 2, 9], [21, 25, 29], BS=4, run=2, shared=16)
        assert (story.table[:, :2] == story.table[0, :2]).all()
        story.check(heads=heads)


def test_shared_prefixes(two_ranks: Processes) -> None:
    two_ranks.run(prefixes)


def corners(rank: int) -> None:
    for query_lens, seq_lens in (([], []), ([0], [5]), ([0, 1], [0, 1])):
        for padding in (0, 2):
            story = Story(query_lens, seq_lens, padding=padding)
            out, plan = story.over_ranks()
            T = sum(query_lens) + padding
            assert out.shape == (T, 4, 24) and not out[sum(query_lens) :].any()
            assert repr(plan)
            if sum(query_lens):
                story.check()


def test_empty_steps(two_ranks: Processes) -> None:
    two_ranks.run(corners)


def lengths(rank: int, run: int) -> None:
    """All of them in one step: the budget is of what many outputs err."""
    seq_lens = list(range(1, 40))
    query_lens = [min(S, 1 + S % 3) for S in seq_lens]
    for form in ("absorbed", "expanded"):
        Story(query_lens, seq_lens, BS=4, run=run).check(form=form)


@pytest.mark.slow
@pytest.mark.parametrize("run", [1, 2, 4])
def test_every_length(many_ranks: Processes, run: int) -> None:
    many_ranks.run(lengths, run)


@pytest.mark.slow
def test_steps_on_more_ranks(many_ranks: Processes) -> None:
    many_ranks.run(all_heads, "fp8")


def all_heads(rank: int, format: str) -> None:
    for name, run in product(STEPS, (1, 4)):
        for context in ("place", "gather"):
            Story(*STEPS[name], format=format, run=run).check(form="auto", context=context)


def any_story(rank: int, lens: list[tuple[int, int]], story: dict[str, Any], options: Any) -> None:
    query_lens = [n for n, _ in lens]
    seq_lens = [n + context for n, context in lens]
    Story(query_lens, seq_lens, **story).check_close(**options)


@pytest.mark.slow
@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(
    lens=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 40)), min_size=1, max_size=5),
    story=st.fixed_dictionaries({"run": st.sampled_from([1, 2, 4]), "padding": st.integers(0, 2)}),
    options=st.fixed_dictionaries(
        {
            "heads": st.sampled_from(["all", "own"]),
            "schedule": st.sampled_from(["auto", "gather", "exchange"]),
            "form": st.sampled_from(["auto", "absorbed", "expanded"]),
            "context": st.sampled_from(["auto", "place", "gather"]),
            "workspace_tokens": st.sampled_from([4, 8, 20, None]),
        }
    ),
)
def test_any_step_over_two_ranks_equals_one_process(
    two_ranks: Processes, lens: Any, story: Any, options: Any
) -> None:
    two_ranks.run(any_story, lens, story, options)
