"""docs/quantized-outputs.md's code runs, block after block, and names what there is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from openmla import OUTPUT_FORMATS, decode_output

PAGE = Path(__file__).resolve().parent.parent / "docs" / "quantized-outputs.md"


def test_the_page_runs() -> None:
    text = PAGE.read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 2 and len(text.splitlines()) <= 200
    names: dict[str, Any] = {}
    for number, block in enumerate(blocks):
        exec(compile(block, f"{PAGE.name}, block {number + 1}", "exec"), names)
    assert bool(decode_output(names["out"]).isfinite().all())
    assert "output    nvfp4: " in names["plan"].explain()


def test_the_page_has_every_format() -> None:
    assert all(f"`{name}`" in PAGE.read_text() for name in OUTPUT_FORMATS)
