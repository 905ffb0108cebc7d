"""docs/engines-plans.md's code runs, block after block."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parent.parent / "docs" / "engines-plans.md"


def test_the_page_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) >= 4 and len(PAGE.read_text().splitlines()) <= 200
    names: dict[str, Any] = {}
    for number, block in enumerate(blocks):
        exec(compile(block, f"{PAGE.name}, block {number + 1}", "exec"), names)
    assert names["plan"].num_tokens == 4 and not names["out"][2:].any()


def test_the_pages_name_one_another() -> None:
    """And the README all three; none is longer than one sits down to read."""
    names = ("engines.md", "engines-plans.md", "engines-compile.md")
    pages = {name: (PAGE.parent / name).read_text() for name in names}
    readme = (PAGE.parents[1] / "README.md").read_text()
    for name, text in pages.items():
        assert all(f"]({other})" in text for other in names if other != name), name
        assert f"](docs/{name})" in readme and len(text.splitlines()) <= 200
