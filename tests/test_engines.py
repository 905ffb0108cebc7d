"""docs/engines.md's code runs, block after block."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

PAGE = Path(__file__).resolve().parent.parent / "docs" / "engines.md"


def test_the_page_runs() -> None:
    torch.manual_seed(0)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) >= 6 and len(PAGE.read_text().splitlines()) <= 200
    names: dict[str, Any] = {}
    for number, block in enumerate(blocks):
        exec(compile(block, f"{PAGE.name}, block {number + 1}", "exec"), names)
    assert names["out_latent"].isfinite().all()
