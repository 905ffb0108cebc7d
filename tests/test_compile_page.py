"""docs/engines-compile.md's code runs as it stands, in the graphs that the page promises."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

PAGE = Path(__file__).resolve().parent.parent / "docs" / "engines-compile.md"


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
def test_the_page_runs() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    torch.compiler.reset()
    counters.clear()
    names: dict[str, Any] = {}
    exec(compile(code, PAGE.name, "exec"), names)
    assert names["out"].shape == (2, 64) and names["out"].isfinite().all()
    assert counters["stats"]["unique_graphs"] == 2  # the prompts, and twenty steps of decode
