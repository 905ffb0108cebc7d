"""docs/context-parallel.md: its program runs, its numbers are those of the formula in the code."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import torch

from openmla.parallel import plan_over_ranks
from openmla.parallel.merge import sent_bytes
from openmla.plan import make_plan
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


def test_what_is_missing_is_listed() -> None:
    """Options of make_plan() that plan_over_ranks() does not take; `beside` is its own affair."""
    taken = {*inspect.signature(plan_over_ranks).parameters, "beside"}
    missing = {*inspect.signature(make_plan).parameters} - taken
    listed = PAGE.read_text().partition("## Not yet")[2]
    assert missing and all(f"`{name}=" in listed for name in missing), missing
