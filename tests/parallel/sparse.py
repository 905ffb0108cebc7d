"""A story whose model selects its keys, over two ranks and in one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from openmla import IndexerConfig, IndexInputs, attend_step, make_plan, ops, select_step
from openmla.attention.offers import choose_over_ranks
from openmla.parallel import attend_over_ranks, select_over_ranks
from openmla.plan import Plan
from openmla.testing.budgets import out_budget
from tests.parallel.counted import counted_bytes
from tests.parallel.stories import TINY, WIDE, Story

K = 8


def by_token(positions: Tensor, plan: Plan) -> dict[int, list[int]]:
    """The positions that each token of the step selected, in order."""
    assert plan.select is not None
    tokens = torch.arange(plan.num_tokens)[plan.select.rows].tolist()
    return dict(zip(tokens, positions.sort(1).values.tolist(), strict=True))


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

    def chosen_alone(self, dtype: torch.dtype) -> tuple[Tensor, dict[int, list[int]]]:
        """Outputs, and what each token that selects selected."""
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
        return out, {} if selection is None else by_token(selection.positions, plan)

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
        if plan.select is not None:
            assert self.mine.index is not None
            found = choose_over_ranks(index, self.mine.index, plan, plan.select)
            assert by_token(found, plan) == chosen
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
