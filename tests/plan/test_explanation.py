"""explain() as text, as a table in a terminal, and as HTML in a notebook."""

from __future__ import annotations

import copy
import pickle
from xml.etree import ElementTree

import pytest

from openmla.plan.explanation import DETAIL, OP, Explanation, Line

TOLD = Explanation(
    [
        Line("absorbed", "2 requests", "cost: <8 & no more", below=(Line("holds", "1 MiB"),)),
        Line("cache", "in blocks", below=(Line("", "ratio  layers"), Line("", "    4      12"))),
        Line("mqa_paged", "triton", "not gluon: needs SM90", width=OP),
        Line("", "context of 3 tokens", below=(Line("rope", "triton", width=OP),)),
    ]
)


def test_text_is_the_lines() -> None:
    assert isinstance(TOLD, str)
    assert TOLD.splitlines() == [
        "absorbed  2 requests",
        "  why     cost: <8 & no more",
        "  holds     1 MiB",
        "cache     in blocks",
        "  ratio  layers",
        "      4      12",
        "mqa_paged    triton (not gluon: needs SM90)",
        "context of 3 tokens",
        "  rope         triton",
    ]
    holds = Explanation([Line("", "x", below=(Line("holds", "1 MiB", width=DETAIL),))])
    assert holds == "x\n  holds   1 MiB"


def test_an_explanation_keeps_its_rows_when_copied() -> None:
    assert TOLD.rows == [
        (0, "absorbed", "2 requests", "cost: <8 & no more"),
        (1, "holds", "1 MiB", ""),
        (0, "cache", "in blocks\nratio  layers\n    4      12", ""),
        (0, "mqa_paged", "triton", "not gluon: needs SM90"),
        (0, "", "context of 3 tokens", ""),
        (1, "rope", "triton", ""),
    ]
    for other in (copy.deepcopy(TOLD), pickle.loads(pickle.dumps(TOLD))):
        assert other == TOLD and other.rows == TOLD.rows


def test_a_notebook_gets_a_table_with_everything_escaped() -> None:
    markup = TOLD._repr_html_()
    table = ElementTree.fromstring(markup)  # which takes no stray < or &
    assert [cell.text for cell in table.findall("thead/tr/th")] == ["part", "what", "why"]
    cells = [[cell.text or "" for cell in row] for row in table.findall("tbody/tr")]
    assert cells == [list(row[1:]) for row in TOLD.rows]
    assert "&lt;8 &amp; no more" in markup


def test_a_terminal_gets_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    monkeypatch.setenv("COLUMNS", "60")
    lines = repr(TOLD).splitlines()
    assert lines[0].split() == ["part", "what", "why"] and max(map(len, lines)) <= 60
    assert any(line.split()[:2] == ["mqa_paged", "triton"] for line in lines)
    assert lines[-2:] == ["  ratio  layers", "      4      12"]  # lists keep their columns
    bracketed = Explanation([Line("a", "[bold]x[/bold]", "[red]")])  # no markup of rich's
    assert "[bold]x[/bold]" in repr(bracketed) and "[red]" in repr(bracketed)


def test_without_rich_a_terminal_gets_the_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openmla.plan.explanation.find_spec", lambda name: None)
    assert repr(TOLD) == str(TOLD)
