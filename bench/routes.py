"""Sparse prefill on a GPU by both routes: rows gathered in latent space, or all pairs masked.

    python3 -m bench.routes --json routes.json

8192 new tokens of one V3.2 layer on a context, each with the same 2048 selected keys in both
routes, from the cache to the layer's heads: what the planner decides between (plan/forms.py). Both
routes are checked against one another and run in turns; times are medians. The last column shows
whether the planner picked the faster one.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.report import Report, script_parser
from openmla import PRESETS, Batch, LayerCache, Plan, allocate_cache, make_plan
from openmla.attention import Selection, attend_step
from openmla.attention.select import chosen_rows
from openmla.bench.harness import relative_error, time_round_robin
from openmla.bench.inputs import fill, random_step

BS, ROUNDS = 64, 3
FORMS = ("absorbed", "expanded")


def shapes() -> Iterator[tuple[int, int, int, str]]:
    """Heads, new tokens, tokens before them, cache format."""
    for H in (16, 128):
        for context in (2048, 8192, 32768, 65536, 131072):
            yield H, 8192, context, "bf16"


def choose(plan: Plan, cache: LayerCache, K: int) -> Selection:
    """K of each row's keys at equal distances, with an offset per row."""
    assert plan.select is not None
    lens = plan.select.row_lens
    step = (lens.double() / K).clamp(min=1)[:, None]
    begin = torch.rand_like(step) * step
    places = (torch.arange(K, device=lens.device) * step + begin).int()
    places = places.where(places < lens[:, None], -1)
    if not bool((lens >= K).all()):  # short rows select all their keys
        every = torch.arange(K, device=lens.device, dtype=torch.int32)
        places = places.where(lens[:, None] >= K, every.where(every < lens[:, None], -1))
    rows = chosen_rows(places, cache, plan)
    return Selection(places, lens.clamp(max=K), rows, lens)


class Step:
    """n tokens after `context` others, by either route."""

    def __init__(
        self, H: int, n: int, context: int, format: str, backend: str, device: str = "cuda"
    ) -> None:
        torch.manual_seed(0)
        self.config = config = replace(PRESETS["deepseek-v3.2"], num_heads=H)
        assert config.indexer is not None
        S = context + n
        blocks = -(-S // BS)
        self.cache = allocate_cache(
            config, num_blocks=blocks, block_size=BS, format=format, device=device
        )
        latent = self.cache.latent
        assert latent is not None
        fill(latent.data, format, config.latent_dim, std=1 / 3)
        table = torch.randperm(blocks).int()[None]
        at = torch.arange(context, S)
        batch = Batch([n], [S], table, table[0, at // BS].long() * BS + at % BS)
        common: dict[str, Any] = {"dtype": torch.bfloat16, "backend": backend}
        self.plans = {
            form: make_plan(batch, config, self.cache, form=form, **common) for form in FORMS
        }
        auto = make_plan(batch, config, self.cache, **common)
        assert auto.select is not None
        self.taken = FORMS[1] if auto.group("chosen") is None else FORMS[0]
        self.chosen = {}
        for form, plan in self.plans.items():
            torch.manual_seed(1)  # the same keys
            self.chosen[form] = choose(plan, self.cache, config.indexer.topk)
        self.projected, self.absorbed = random_step(config, n, device, torch.bfloat16, std=1 / 3)

    def run(self, form: str) -> Tensor:
        return attend_step(
            self.projected, self.absorbed, self.cache, self.plans[form], selection=self.chosen[form]
        )

    def difference(self) -> float:
        one, two = (self.run(form) for form in FORMS)
        return relative_error(two, one)


def run(arguments: Sequence[str] | None = None) -> None:
    parser = script_parser("routes", __doc__)
    parser.add_argument("--backend", default="auto", help="backend of every op (default: auto)")
    header = f"{'shape':<28} {'absorbed':>10} {'masked':>10} us  difference  planner takes"
    report = Report(parser, arguments, header, resume=True)
    for H, n, context, format in shapes():
        title = f"h{H}-n{n}-after-{context // 1024}k-{format}"
        if not report.wants(title):
            continue
        with torch.inference_mode():
            step = Step(H, n, context, format, report.options.backend)
            difference = step.difference()
            if difference > 0.02:
                print(f"{title:<28} WRONG: the routes differ by {difference:.4f}")
                continue
            calls = {form: partial(step.run, form) for form in FORMS}
            seen = time_round_robin(calls, ROUNDS, "cuda")
        times = {form: 1e6 * statistics.median(each) for form, each in seen.items()}
        right = step.taken == min(times, key=lambda form: times[form])
        shown = " ".join(f"{times[form]:>10.0f}" for form in FORMS)
        verdict = f"{step.taken}, {'the faster' if right else 'the SLOWER'}"
        print(f"{title:<28} {shown}     {difference:.4f}      {verdict}", flush=True)
        report.rows.append({"shape": title, **times, "taken": step.taken, "right": right})
        report.save()
    taken = sum(row["right"] for row in report.rows)
    print(f"the planner takes the faster route in {taken} of {len(report.rows)}")


if __name__ == "__main__":
    run()
