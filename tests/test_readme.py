"""The README: its first screen, its code and numbers, its links."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tools.benchmarks_page import GROUPS, Results

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "README.md").read_text()


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def test_the_first_screen() -> None:
    """Install, code, its output, numbers, the picture and its conditions, what was run where."""
    screen = "\n".join(TEXT.splitlines()[:75])
    parts = ("pip install", "```python", "openmla.attach(", "```text", "FlashMLA", "![", "random w",
             "never been run", "| run |")  # fmt: skip
    places = [screen.index(part) for part in parts[:5]]
    assert places == sorted(places)
    places = [screen.rindex(part) for part in parts[5:]]
    assert places == sorted(places)


def test_first_block_gives_the_tokens_of_plain_transformers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    names: dict[str, Any] = {}
    with torch.inference_mode(False):
        exec(compile(blocks()[0], "README.md", "exec"), names)
        alone = names["AutoModelForCausalLM"].from_pretrained(names["demo"])
        expected = alone.generate(names["prompt"], max_new_tokens=40)
    printed = capsys.readouterr().out
    assert printed == bytes(expected[0].tolist()).decode() + "\n"
    (shown,) = re.findall(r"```text\n(.*?)```", TEXT, re.DOTALL)
    assert shown == printed


def test_second_block_runs() -> None:
    names: dict[str, Any] = {}
    exec(compile(blocks()[1], "README.md", "exec"), names)
    assert names["out"].shape == (609, 64) and names["out"].isfinite().all()


def test_numbers_are_those_of_the_results() -> None:
    results = Results(ROOT / "bench" / "results")
    for title in ("sparse decode, fp8_ds_mla, top 2048", "dense decode, bf16"):
        (group,) = (group for group in GROUPS if group.title == title)
        ratios = sorted(duel.ratio for duel in results.duels(group))
        low, middle, high = ratios[0], ratios[len(ratios) // 2], ratios[-1]
        faster = sum(ratio >= 1 for ratio in ratios)
        row = f"| {middle:.2f} ({low:.2f} to {high:.2f}) | {faster} of {len(ratios)} shapes |"
        assert row in TEXT, row
    rows = {row["contender"]: row for row in results.rows("generate_h200")}
    for name in ("openmla", "captured"):
        assert f"{rows[name]['ratio']:.2f}x" in TEXT, name


def test_it_leads_to_the_main_pages() -> None:
    links = set(re.findall(r"\]\(docs/([^)#]+)", TEXT))
    assert {"quickstart.md", "support.md", "benchmarks.md", "troubleshooting.md"} <= links
