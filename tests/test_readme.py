"""The README: its first screen, its code, and where it leads. tests/docs runs its code, too."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "README.md").read_text()


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def test_the_first_screen() -> None:
    """What it is, a picture, the three lines, how to install: before anything else."""
    screen = "\n".join(TEXT.splitlines()[:32])
    places = [screen.index(part) for part in ("![", "```python", "openmla.attach(", "pip install")]
    assert places == sorted(places)


def test_first_block_gives_the_tokens_of_plain_transformers() -> None:
    pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    names: dict[str, Any] = {}
    with torch.inference_mode(False):
        exec(compile(blocks()[0], "README.md", "exec"), names)
    prompt = torch.tensor([list(b"class Stack:\n    def __init__(self")])
    alone = names["AutoModelForCausalLM"].from_pretrained(names["demo"])
    tokens, expected = (
        model.generate(prompt, max_new_tokens=40) for model in (names["model"], alone)
    )
    assert expected.tolist() == tokens.tolist()
    assert bytes(tokens[0].tolist()).decode().startswith("class Stack:\n    def __init__(self, ")


def test_second_block_runs() -> None:
    names: dict[str, Any] = {}
    exec(compile(blocks()[1], "README.md", "exec"), names)
    assert names["out"].shape == (609, 64) and names["out"].isfinite().all()


def test_it_leads_to_the_main_pages() -> None:
    links = set(re.findall(r"\]\(docs/([^)#]+)", TEXT))
    assert {"quickstart.md", "support.md", "benchmarks.md", "troubleshooting.md"} <= links
