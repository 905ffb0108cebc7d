"""make_plan(output=): what it refuses, which op ends each form, symbols of what ends where."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from openmla import PRESETS, Batch, BlockPool, MLAConfig, Plan, allocate_cache, make_plan
from openmla.backends import Problem
from openmla.errors import ConfigError, ShapeError
from openmla.ops.project_quantize import problem as project_quantize_problem
from openmla.plan import problems
from openmla.plan.expanded import expanded_group
from openmla.plan.types import Expanded
from tests.plan.groups import ends_of

DENSE = PRESETS["tiny-v3"]  # 4 heads of 24 columns
SPARSE = PRESETS["tiny-v3.2"]


def planned(output: str | None, *, config: MLAConfig = DENSE, **options: Any) -> Plan:
    """Two requests of 3 of 9 and 1 of 5 tokens."""
    cache = allocate_cache(config, num_blocks=64, block_size=4, format="fp32")
    query_lens, seq_lens = [3, 1], [9, 5]
    pool = BlockPool(64, 4)
    pool.take({str(b): S for b, S in enumerate(seq_lens)})
    names = [str(b) for b in range(len(seq_lens))]
    spans = [(str(b), S - n, S) for b, (n, S) in enumerate(zip(query_lens, seq_lens, strict=True))]
    batch = Batch(query_lens, seq_lens, pool.block_table(names), pool.slot_mapping(spans))
    return make_plan(batch, config, cache, dtype=torch.float32, output=output, **options)


def test_unknown_or_misfit_output_formats_raise() -> None:
    with pytest.raises(ConfigError, match="output: format 'fp9' is not known"):
        planned("fp9")
    with pytest.raises(ShapeError, match=r"plan: columns must be a multiple of 128 .* got 96"):
        planned("fp8_128")


def test_ends() -> None:
    assert ends_of(planned("fp8", form="absorbed")) == {"absorbed": "project_quantize"}
    chosen = planned("fp8", config=SPARSE, form="chosen")
    assert ends_of(chosen) == {"chosen": "project_quantize"}
    assert ends_of(planned("fp8", form="expanded")) == {"expanded": "quantize_out"}
    chunked = planned("fp8", form="expanded", workspace_tokens=4)
    assert ends_of(chunked) == {"expanded": "merge_quantize"}
    assert {"merge_quantize", "quantize_out", "merge_states"} <= set(chunked.backends)
    assert set(ends_of(planned(None)).values()) == {""}
    assert "quantize_out" not in planned(None).backends
    for options in ({"form": "absorbed"}, {"form": "expanded", "workspace_tokens": 4}):
        gated = planned("fp8", config=replace(DENSE, output_gate="head"), **options)
        assert set(ends_of(gated).values()) == {"quantize_out"}


def test_a_gpu_without_the_fused_kernel_ends_in_two_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups that span heads: rather a product and quantize_out than the reference."""
    needs = problems.Needs(((("paged",), 1, 1, 2),), frozenset(), scores=False, output="nvfp4")
    seen: list[Problem] = []

    def choose(problem: Problem, _: str) -> str:
        seen.append(problem)
        return "reference"

    monkeypatch.setattr(problems, "choose_backend", choose)
    monkeypatch.setattr("openmla.backends.capability", lambda device: None)
    for device, op in (("cuda", "quantize_out"), ("cpu", "project_quantize")):
        where = torch.device(device)
        ends, asked = problems.find_ends(DENSE, where, torch.bfloat16, needs, "auto")
        assert ends["absorbed"] == op
        assert (op in [problem.op for problem in asked]) and len(asked) == 1 + (device == "cpu")
    assert seen[1] == project_quantize_problem(
        torch.device("cpu"), torch.bfloat16, "nvfp4", eight_bits=False, block=32, C=32, V=24
    )
    named = {"project_quantize": "reference"}
    ends, _ = problems.find_ends(DENSE, torch.device("cuda"), torch.bfloat16, needs, named)
    assert ends["absorbed"] == "project_quantize"  # asked for


@pytest.mark.parametrize("rows_at_once", [4, 8, 12, 40])
def test_every_row_ends_once(rows_at_once: int) -> None:
    """Whatever contexts there are: by the chunk that is its last, or alone."""
    for contexts in product((0, 1, 4, 9, 30), repeat=3):
        query_lens = [2, 1, 3]
        seq_lens = [n + S for n, S in zip(query_lens, contexts, strict=True)]
        table = torch.zeros(3, 16, dtype=torch.int32)
        batch = Batch(query_lens, seq_lens, table)
        made = expanded_group(batch, range(3), [0, 2, 3, 6], 4, rows_at_once, quantized=True).part
        assert isinstance(made, Expanded)
        if made.route != "chunked":
            continue
        ended = [0] * 6
        touched: set[int] = set()
        for chunk in reversed(made.chunks):
            (ask,) = chunk.asks
            first, stop = ask.rows.start, ask.rows.stop
            both = [part for part in (chunk.ended, chunk.continued) if part is not None]
            assert [t for part in both for t in range(part.start, part.stop)] == list(
                range(first, stop)
            )
            if chunk.ended is not None:
                for t in range(chunk.ended.start, chunk.ended.stop):
                    ended[t] += 1
                    assert t not in touched
            touched |= set(range(first, stop))
        for part in made.alone:
            for t in range(part.start, part.stop):
                ended[t] += 1
                assert t not in touched
        assert ended == [1] * 6
