"""The README's code runs: the first block as it stands, the second with a tiny preset on a CPU."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def test_first_block_runs_as_it_stands(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    names: dict[str, Any] = {}
    exec(compile(blocks()[0], "README.md", "exec"), names)
    written = capsys.readouterr().out
    assert written.startswith("class Stack:\n    def __init__(self, ") and len(written) > 60
    alone = names["AutoModelForCausalLM"].from_pretrained(names["demo"])
    expected = alone.generate(names["prompt"], max_new_tokens=40)
    assert expected.tolist() == names["tokens"].tolist()


def test_second_block_runs() -> None:
    code = blocks()[1].replace('"cuda"', '"cpu"').replace("deepseek-v3", "tiny-v3")
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
