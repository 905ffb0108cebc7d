"""compress_kv: what the state holds of open windows, and drafts that are rejected."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from openmla.cache.format import state_rows, state_width
from openmla.ops import compress_kv
from openmla.testing import poisoned_memory
from tests.ops.compress_kv_cases import FOLDED_8, FORMS, cut
from tests.ops.compress_kv_story import NOBODY, Feed, PoolCase, Step, Story
from tests.ops.contract import backends, page_bytes, run_or_skip


@pytest.mark.slow_interpreted
@pytest.mark.parametrize("backend", backends("compress_kv"))
@pytest.mark.parametrize("more", FORMS)
@pytest.mark.parametrize("start", [0, 1, 7, 8, 9, 15])
@pytest.mark.parametrize("wrong", [math.nan, 30.0], ids=["nan", "numbers"])
def test_rejected_drafts_leave_no_trace(
    wrong: float, start: int, more: dict[str, Any], backend: str, device: str
) -> None:
    """Back by as much as the contract allows, twice: the bits are those of a clean run."""
    first, last = (Feed(0, start),), (Feed(0, 20),)
    clean = Story(PoolCase("clean", (first, last), "bf16", **more), device).play(backend)
    for back in range(1, more["spare"] + 1):
        rejected = (Feed(0, 0, back),)
        case = PoolCase("drafts", (first, rejected, rejected, last), "bf16", wrong=wrong, **more)
        story = Story(case, device).play(backend, case.steps[:1])
        before = page_bytes(story.cache)
        story.play(backend, case.steps[1:2])
        if not math.isnan(wrong):  # NaN is what unwritten entries are
            finishes = start % case.ratio + back >= case.ratio
            assert torch.equal(page_bytes(story.cache), before) != finishes
        story.play(backend, case.steps[2:])
        assert torch.equal(story.entries(), clean.entries())
        assert story.entries().isfinite().all()
        assert torch.equal(story.kept_state(), clean.kept_state())


@pytest.mark.parametrize("backend", backends("compress_kv"))
def test_first_entry_is_its_own_tokens_alone(backend: str, device: str) -> None:
    """With overlap a window's first channels are for the entry after it, not for its own."""
    case = PoolCase("first", cut(8, 4), dtype=torch.float32)
    clean, story = Story(case, device).play(backend), Story(case, device)
    for tokens in (*story.kv, *story.score):
        tokens[:4, : case.D] = torch.nan
    story.play(backend)
    assert torch.equal(story.entries()[0], clean.entries()[0])
    assert story.entries()[0].isfinite().all() and story.entries()[1].isnan().all()


@pytest.mark.parametrize("backend", backends("compress_kv"))
@pytest.mark.parametrize("spare", [0, 4])
def test_a_folded_window_starts_from_nothing(spare: int, backend: str, device: str) -> None:
    """At a window's edge no state is needed, as after a prefix that was cached elsewhere."""
    case = PoolCase("edge", cut(24, 8, 16, 21), spare=spare, **FOLDED_8)
    clean, story = Story(case, device).play(backend), Story(case, device)
    for number, feeds in enumerate(case.steps):
        if number < 3:
            story.state.fill_(torch.nan)
        story.play(backend, [feeds])
    assert torch.equal(story.entries(), clean.entries())


@pytest.mark.parametrize("backend", backends("compress_kv"))
@pytest.mark.parametrize("spare", [0, 4])
def test_an_overlapping_window_needs_one_before_it(spare: int, backend: str, device: str) -> None:
    """Of that, only the first channels."""
    case = PoolCase("edge", cut(20, 12, 14), spare=spare)
    clean, story = Story(case, device).play(backend), Story(case, device)
    story.play(backend, case.steps[:1])
    D, slot = case.D, story.slots[0]
    needed = {p % case.V for p in range(8, 12)}
    for row in range(case.V):
        unread = (slice(D, 2 * D), slice(3 * D, None)) if row in needed else (slice(None),)
        for channels in unread:
            story.state[slot, row, channels] = torch.nan
    story.play(backend, case.steps[1:])
    assert torch.equal(story.entries(), clean.entries())


@pytest.mark.parametrize("backend", backends("compress_kv"))
@pytest.mark.parametrize("more", FORMS)
@pytest.mark.parametrize(
    "step",
    [(), (Feed(0, 0),), (Feed(0, 0), Feed(1, 0)), (Feed(NOBODY, 9),), (Feed(0, 1),)],
    ids=["no requests", "no tokens", "none twice", "nobody's", "no entry"],
)
@pytest.mark.parametrize("surplus", [0, 2])
def test_nothing_to_write(
    surplus: int, step: Step, more: dict[str, Any], backend: str, device: str
) -> None:
    case = PoolCase("nothing", (step,), "bf16", surplus=surplus, **more)
    story = Story(case, device)
    before = page_bytes(story.cache)
    story.play(backend)
    assert torch.equal(page_bytes(story.cache), before)


@pytest.mark.parametrize("backend", backends("compress_kv"))
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "folded"])
def test_requests_are_apart(overlap: bool, backend: str, device: str) -> None:
    """In one call or in one each, last first: the same bits."""
    lens = (9, 12, 5, 16)
    together = tuple(Feed(b, n) for b, n in enumerate(lens))
    case = PoolCase("apart", (together,), "fp32", overlap=overlap)
    alone = replace(case, steps=tuple((feed,) for feed in reversed(together)))
    story, other = Story(case, device).play(backend), Story(alone, device).play(backend)
    assert torch.equal(story.entries(), other.entries())
    assert torch.equal(story.kept_state(), other.kept_state())


@pytest.mark.parametrize("backend", backends("compress_kv"))
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "folded"])
def test_state_beyond_int32(overlap: bool, backend: str, device: str) -> None:
    """A slot past element 2^31 of the state, reserved likewise, and the first one."""
    case = PoolCase("far", cut(12, 6), overlap=overlap)
    story, other = Story(case, device), Story(case, device)
    V, SW = story.state.shape[1:]
    NS = 2**31 // (V * SW) + 2
    try:
        with poisoned_memory(False):
            state = torch.empty((NS, V, SW), dtype=torch.float32, device=device)
    except RuntimeError:
        pytest.skip("8.6 GB of address space are not to be had")
    state[[0, -1]] = torch.nan
    for each, slot in ((story, 0), (other, NS - 1)):
        each.slots, each.state = [slot], state
        for feeds in case.steps:
            run_or_skip(compress_kv, each.step(feeds), backend)
    assert torch.equal(story.entries(), other.entries())
    assert torch.equal(story.kept_state(), other.kept_state())


def test_sizes_of_state() -> None:
    """V4's three compressors."""
    assert state_width(512, overlap=True) == 2048 and state_rows(4, overlap=True) == 7
    assert state_width(512, overlap=False) == 1536 and state_rows(128, overlap=False) == 1
    assert state_width(128, overlap=True) == 512
