"""compress_kv: entries and state against plain Python, however a sequence is cut."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from openmla.ops import compress_kv
from openmla.ops.compress_kv import cost
from openmla.testing import out_budget
from tests.ops.compress_kv_cases import (
    BASE,
    CASES,
    EXACT_CASES,
    FORMS,
    MIXED,
    SLOW_CASES,
    V4_128,
    cut,
    token_by_token,
)
from tests.ops.compress_kv_exact import assert_exact, exact_results
from tests.ops.compress_kv_story import Feed, PoolCase, Story
from tests.ops.contract import backends, broken, run_or_skip, slow_interpreted
from tests.ops.declared import check_declaration

NARROW_128 = {**V4_128, "D": 6}
SLOW = pytest.mark.slow_interpreted


@pytest.mark.contract
@pytest.mark.parametrize("backend", backends("compress_kv"))
@pytest.mark.parametrize("case", slow_interpreted(CASES, SLOW_CASES), ids=str)
def test_contract(case: PoolCase, backend: str, device: str) -> None:
    """Entries and state within the budget; what state holds unrounded is exact."""
    story, peer = Story(case, device).play(backend), Story(case, device)
    peer.play("reference")
    exact = exact_results(story)
    assert out_budget(story.entries().float(), exact.entries, peer.entries()) <= 1
    rows = story.kept_state()
    plain = case.D if not case.overlap else rows.shape[1]
    assert torch.equal(rows[:, :plain], exact.state[:, :plain].to(rows.dtype))
    for part in (slice(plain, plain + case.D), slice(plain + case.D, None)):
        used = out_budget(rows[:, part], exact.state[:, part], peer.kept_state()[:, part])
        assert used <= 1


@pytest.mark.contract
@pytest.mark.parametrize("backend", backends("compress_kv"))
@pytest.mark.parametrize("more", [{}, {**NARROW_128, "ratio": 16}], ids=["overlap-4", "folded-16"])
def test_contract_whatever_the_cuts(more: dict[str, Any], backend: str, device: str) -> None:
    """Batch invariant: tokens one by one, in pieces and at once leave the same bits."""
    total = 19 if more else 14
    found = []
    for edges in ((), range(1, total), (3, total // 2, total - 2)):
        case = PoolCase("cuts", cut(total, *edges), **more)
        story = Story(case, device).play(backend, batch_invariant=True)
        exact, peer = exact_results(story), Story(case, device).play("reference")
        assert out_budget(story.entries().float(), exact.entries, peer.entries()) <= 2
        found.append((story.entries(), story.kept_state()))
    for entries, state in found[1:]:
        assert torch.equal(entries, found[0][0]) and torch.equal(state, found[0][1])


@pytest.mark.parametrize("case", EXACT_CASES, ids=str)
def test_reference_is_exact_in_float64(case: PoolCase) -> None:
    assert_exact(Story(replace(case, wide=True)).play("reference"))


@given(
    ratio=st.integers(1, 6),
    overlap=st.booleans(),
    spare=st.integers(0, 4),
    feeds=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 4)), max_size=8),
)
def test_reference_takes_any_cuts_and_drafts(
    ratio: int, overlap: bool, spare: int, feeds: list[tuple[int, int]]
) -> None:
    steps = tuple((Feed(0, kept, min(lost, spare)),) for kept, lost in feeds)
    case = PoolCase("any", steps, D=2, R=2, ratio=ratio, overlap=overlap, spare=spare, wide=True)
    assert_exact(Story(case).play("reference"))


@pytest.mark.parametrize("backend", backends("compress_kv"))
@pytest.mark.parametrize(
    ("more", "total", "pieces"),
    [
        pytest.param({}, 64, "tokens", id="overlap-4-tokens"),
        pytest.param({}, 64, "cut", id="overlap-4-cut"),
        pytest.param(NARROW_128, 256, "tokens", id="folded-128-tokens", marks=SLOW),
        pytest.param(NARROW_128, 256, "cut", id="folded-128-cut"),
    ],
)
@pytest.mark.parametrize(
    "scores",
    ["plain", pytest.param("far apart", marks=SLOW), "rising", pytest.param("falling", marks=SLOW)],
)
def test_cuts_cost_no_precision(
    scores: str, more: dict[str, Any], total: int, pieces: str, backend: str, device: str
) -> None:
    """In pieces, an entry is as good as the reference makes it in one call."""
    edges = range(1, total) if pieces == "tokens" else (total // 2 - 1, total // 2 + 1)
    steps = cut(total, *edges)
    case = PoolCase("pieces", steps, dtype=torch.float32, scores=scores, **more)
    story = Story(case, device).play(backend)
    whole = Story(replace(case, steps=cut(total)), device).play("reference")
    assert out_budget(story.entries().float(), exact_results(story).entries, whole.entries()) <= 1


@pytest.mark.parametrize("backend", backends("compress_kv"))
def test_rope_is_the_first_token_of_the_window(backend: str, device: str) -> None:
    """Rows of the table other than ratio * i are NaN in every case; here one angle is turned."""
    case = PoolCase("turned", cut(12), dtype=torch.float32, R=2)
    plain, story = Story(case, device), Story(case, device)
    plain.table[:] = torch.tensor([1.0, 0.0])
    story.table[:] = torch.nan
    for p, angle in ((0, (1.0, 0.0)), (4, (0.0, 1.0)), (8, (-1.0, 0.0))):
        story.table[p] = torch.tensor(angle)
    upright, turned = plain.play(backend).entries(), story.play(backend).entries()
    assert torch.equal(turned[:, :-2], upright[:, :-2])
    x, y = upright[:, -2:].unbind(1)
    assert torch.equal(turned[:, -2], torch.stack([x[0], -y[1], -x[2]]))
    assert torch.equal(turned[:, -1], torch.stack([y[0], x[1], -y[2]]))


@pytest.mark.slow_interpreted
@pytest.mark.parametrize("backend", backends("compress_kv"))
@pytest.mark.parametrize("more", FORMS)
def test_one_score_far_above_the_rest_takes_all(
    more: dict[str, Any], backend: str, device: str
) -> None:
    """The entry is the token with it, normed, wherever in the window it comes."""
    r, D = more["ratio"], 16
    case = PoolCase("peak", token_by_token(2 * r), dtype=torch.float32, R=0, eps=0.0, **more)
    for peak in range(r):
        story = Story(case, device)
        own = slice(D if case.overlap else 0, None)
        story.score[0][:] = -120.0
        story.score[0][r + peak, own] = 120.0
        story.play(backend)
        v = story.kv[0][r + peak, own].double()
        wanted = v / v.square().mean().sqrt() * story.norm_weight.double()
        eps = torch.finfo(torch.float32).eps
        torch.testing.assert_close(story.entries()[1], wanted, rtol=4 * eps, atol=0)


@pytest.mark.parametrize("backend", backends("compress_kv"))
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "folded"])
def test_values_that_are_cut_off_are_counted(overlap: bool, backend: str, device: str) -> None:
    """As many as the reference counts, of the entries that were written; bytes are the same."""
    counts, stories = [], []
    for name, counted in ((backend, True), ("reference", True), (backend, False)):
        case = replace(BASE, overlap=overlap, format="fp8", kv_scale=1 / 512, dtype=torch.float32)
        story = Story(case, device)
        clamped = torch.tensor(3, device=device)
        for feeds in MIXED:
            inputs = story.step(feeds)
            if counted:
                inputs.scalars["clamped"] = clamped
            run_or_skip(compress_kv, inputs, name)
        counts.append(int(clamped) - 3)
        stories.append(story)
    assert counts[0] == counts[1] > 10 and counts[2] == 0
    assert torch.equal(stories[0].cache.view(torch.uint8), stories[2].cache.view(torch.uint8))
    largest = stories[0].entries().abs() == 448 / 512
    assert int(largest.sum()) >= counts[0] // len(MIXED)


@pytest.mark.contract
@pytest.mark.parametrize("backend", backends("compress_kv"))
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "folded"])
def test_entries_of_other_ranks_are_not_written(overlap: bool, backend: str, device: str) -> None:
    """A block of -1: state and all other entries are as ever, its own bytes stay."""
    whole, part = (Story(replace(BASE, overlap=overlap), device) for _ in range(2))
    before = part.cache.view(torch.uint8).clone()
    hidden = {blocks[1] for blocks in part.blocks if len(blocks) > 1}
    for feeds in MIXED:
        for story in (whole, part):
            inputs = story.step(feeds)
            table = inputs.tensors["block_table"]
            if story is part:
                for block in hidden:
                    table.masked_fill_(table == block, -1)
            run_or_skip(compress_kv, inputs, backend)
    assert torch.equal(whole.kept_state(), part.kept_state())
    found, wanted = part.cache.view(torch.uint8), whole.cache.view(torch.uint8)
    for block in range(len(found)):
        expected = before if block in hidden else wanted
        assert torch.equal(found[block], expected[block])
    assert any(not torch.equal(before[block], wanted[block]) for block in hidden)


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "folded"])
def test_declaration(overlap: bool, device: str) -> None:
    story = Story(replace(BASE, overlap=overlap), device).play("reference", MIXED[:2])
    inputs = broken(story.step(MIXED[2]), clamped=torch.tensor(5, device=device))
    check_declaration(compress_kv, inputs, "kv score bias norm_weight")


def test_cost() -> None:
    needed = cost(11, 3, D=512, ratio=4, overlap=True, format="fp8_dsv4", itemsize=4)
    assert needed.bytes == 11 * 2 * 1024 * 4 + 2 * 584 + 3 * 2 * 2048 * 4
    assert needed.flops == 11 * 5 * 1024
    needed = cost(256, 1, D=512, ratio=128, overlap=False, format="bf16", itemsize=2)
    assert needed.bytes == 256 * 2 * 512 * 2 + 2 * 1024 + 2 * 1536 * 4
    assert needed.flops == 256 * 5 * 512
