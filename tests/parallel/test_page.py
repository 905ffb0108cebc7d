"""docs/context-parallel.md: its program runs, its numbers are those of the formula in the code."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import torch

from openmla.plan import make_plan
from openmla.plan.options import REFUSALS
from openmla.ranks.merge import sent_bytes
from tests.parallel.processes import Processes

PAGE = Path(__file__).parents[2] / "docs/context-parallel.md"


def run_page(rank: int) -> bytes:
    program = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[1]
    names: dict[str, Any] = {}
    with torch.inference_mode(False):
        exec(compile(program, str(PAGE), "exec"), names)
    assert names["out"].shape == (300, 16, 128) and names["out"].isfinite().all()
    return bytes(names["out"].view(torch.uint8).flatten().tolist())


def test_the_program_runs(two_ranks: Processes) -> None:
    one, other = two_ranks.run(run_page)
    assert one == other, "every rank gets the same bits"


def test_numbers() -> None:
    text, W, H, V, C, D = PAGE.read_text(), 8, 128, 128, 512, 576
    bf16 = torch.bfloat16
    for number in (
        sent_bytes("exchange", "all", (1, H, V), bf16, W),
        sent_bytes("gather", "all", (1, H, V), bf16, W),
        sent_bytes("exchange", "own", (1, H, C), bf16, W),
        (W - 1) * H * 2 * D // W,
    ):
        assert f"{number:,}" in text, number


def test_refusals_over_ranks_are_listed() -> None:
    listed = PAGE.read_text().partition("## Not yet")[2]
    refused = [refusal for refusal in REFUSALS if "ranks" in refusal.what]
    assert refused
    for refusal in refused:
        assert f"- `{refusal.name}=" in listed, refusal.what


def test_the_list_names_options_of_make_plan() -> None:
    """Options that work over ranks are not among them."""
    listed = PAGE.read_text().partition("## Not yet")[2]
    named = set(re.findall(r"^- `(\w+)=", listed, re.MULTILINE))
    assert named and named <= {*inspect.signature(make_plan).parameters}
    assert not named & {"output", "query_dtype", "prefill_dtype", "batch_invariant", "into"}
