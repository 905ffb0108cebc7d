"""V3.2's steps over two ranks: the choice of one process, ties included, and its outputs."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from openmla import IndexerConfig, IndexInputs, attend_step, make_plan, ops, select_step
from openmla.parallel import attend_over_ranks, rank_buffers, select_over_ranks
from openmla.parallel.select import choose_over_ranks
from openmla.testing.budgets import out_budget
from tests.parallel.counted import counted_bytes
from tests.parallel.processes import Processes
from tests.parallel.stories import TINY, WIDE, Story

K = 8
STEPS = {
    "decode": ([1, 1, 1, 1, 1], [37, 16, 9, 2, 1]),  # the last three have nothing to choose
    "several": ([3, 1, 4, 2, 2], [30, 17, 41, 9, 2]),
    "prompts": ([20, 9, 5, 30], [20, 9, 5, 30]),
    "chunked": ([20, 9, 3, 7, 5], [30, 40, 4, 7, 8]),
}


class Sparse(Story):
    """A story with an indexer, whose scores are small integers: many are equal."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        packed = options.get("format") == "fp8_ds_mla"
        DI = 128 if packed else 16
        options["index_format"] = "index_fp8" if packed else "index_fp32"
        config = replace(WIDE if packed else TINY, indexer=IndexerConfig(2, DI, K))
        super().__init__(*arguments, config=config, **options)
        T = self.q.shape[0]
        self.q_idx, self.w_idx = self._small(T, 2, DI), self._small(T, 2).float()
        self.k_idx = [self._small(S, DI) for S in self.seq_lens]
        for cache, sharded in ((self.one, False), (self.mine, True)):
            assert cache.index is not None
            for slots, rows, n in zip(self.places, self.k_idx, self.query_lens, strict=True):
                held = slots[: len(slots) - n]
                ops.cache_write(
                    cache.index.data,
                    rows[: len(held)],
                    rows[: len(held), :0],
                    self._local(held) if sharded else held,
                    cache.index.kv_scale,
                    format=cache.index.format,
                )

    def _small(self, *shape: int) -> Tensor:
        return torch.randint(-1, 2, shape, generator=self.random).to(self.dtype)

    def index(self, dtype: torch.dtype) -> IndexInputs:
        new = [rows[len(rows) - n :] for rows, n in zip(self.k_idx, self.query_lens, strict=True)]
        new.append(self._small(self.padding, self.k_idx[0].shape[1]))
        w = self.w_idx.to(torch.promote_types(dtype, torch.float32))
        return IndexInputs(self.q_idx.to(dtype), w, torch.cat(new).to(dtype))

    def chosen_alone(self, dtype: torch.dtype) -> tuple[Tensor, list[list[int]]]:
        plan = make_plan(self.batch, self.config, self.one, dtype=dtype, form="absorbed")
        selection = select_step(self.index(dtype), self.one, plan)
        out = attend_step(
            self.projected(dtype),
            self.absorbed(dtype),
            self.one,
            plan,
            selection=selection,
            write=dtype == self.dtype,
        )
        rows = [] if selection is None else selection.positions.sort(1).values.tolist()
        return out, rows

    def check_choice(self, heads: str, schedule: str = "auto") -> Any:
        peer, chosen = self.chosen_alone(self.dtype)
        exact, again = self.chosen_alone(torch.float64)
        assert chosen == again
        # what is expanded sees this step's rows unrounded
        form = "absorbed" if self.format.startswith("fp8") else "auto"
        plan, own = self.planned(heads, schedule, form=form)
        index = self.index(self.dtype)
        with counted_bytes() as counted:
            selection = select_over_ranks(index, self.mine, plan)
        assert counted.num_bytes == plan.selection_bytes()
        if plan.chosen is not None:
            assert self.mine.index is not None
            found = choose_over_ranks(index, self.mine.index, plan, plan.chosen)
            assert found.sort(1).values.tolist() == chosen
        out = attend_over_ranks(
            self.projected(self.dtype, own),
            self.absorbed(self.dtype, own),
            self.mine,
            plan,
            selection=selection,
        )
        used = out_budget(out, exact[:, own], peer[:, own])
        assert used <= 1, f"{used:.2f} of the budget, {plan}"
        assert plan.explain()
        return plan


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
                sizes = {"max_tokens": 4, "max_blocks": 6}
                buffers = rank_buffers(plan.config, story.mine, plan.ranks, **sizes)
            plan, own = story.planned(heads, into=buffers)
            assert plan.absorbed is None and plan.chosen is not None and plan.num_tokens == 4
            selection = select_over_ranks(story.index(story.dtype), story.mine, plan)
            given = (story.projected(story.dtype, own), story.absorbed(story.dtype, own))
            out = attend_over_ranks(*given, story.mine, plan, selection=selection)
            torch.testing.assert_close(out, peer[:, own], rtol=1e-5, atol=1e-5)


def test_fixed_buffers(two_ranks: Processes) -> None:
    two_ranks.run(over_buffers)


def in_messages(rank: int) -> None:
    """Of many tokens, a few at a time: the same choice."""
    from openmla.parallel import select

    story = Sparse(*STEPS["chunked"])
    plan = story.planned("all")[0]
    assert plan.chosen is not None and story.mine.index is not None
    given = (story.index(story.dtype), story.mine.index, plan, plan.chosen)
    at_once = choose_over_ranks(*given)
    kept, select.OFFERS_BYTES = select.OFFERS_BYTES, 3 * 2 * 8 * K
    try:
        with counted_bytes() as counted:
            apart = choose_over_ranks(*given)
    finally:
        select.OFFERS_BYTES = kept
    assert counted.calls > 5 and torch.equal(at_once, apart)


def test_offers_in_several_messages(two_ranks: Processes) -> None:
    two_ranks.run(in_messages)
