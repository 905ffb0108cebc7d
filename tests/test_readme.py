"""The README's code runs, with a tiny preset on the CPU in the place of the real thing."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def test_first_screen_runs() -> None:
    text = (ROOT / "README.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert "attach(model)" in blocks[0]  # its own tests run that
    code = blocks[1].replace('"cuda"', '"cpu"').replace("deepseek-v3", "tiny-v3")
    names: dict[str, Any] = {}
    exec(compile(code, "README.md", "exec"), names)
    assert names["out"].shape == (609, 64) and names["out"].isfinite().all()


def test_documents_exist_and_stay_short() -> None:
    """Every page the README links to is there, and none outgrows its 200 lines."""
    text = (ROOT / "README.md").read_text()
    links = re.findall(r"\]\(([^)]+\.md)\)", text)
    assert len(links) >= 6
    for link in links:
        assert len((ROOT / link).read_text().splitlines()) <= 200, link
