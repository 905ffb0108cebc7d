"""Notes, bars and tables of the command line: where they go, and when they stay away."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from openmla.cli import terminal
from openmla.cli.terminal import Table, note, progress, quiet, show, shows_progress, warn

ROWS = Table(["name", "us", "why"], [["a|b", "1.5", "slow"], ["c", "-", ""], ["d", "20.0", ""]])


def test_quiet_leaves_warnings(capsys: pytest.CaptureFixture[str]) -> None:
    with quiet():
        note("hidden")
        warn("shown")
        with quiet(False):
            note("hidden, too")
    note("here again")
    told = capsys.readouterr()
    assert told.err == "openmla: warning: shown\nopenmla: here again\n" and told.out == ""


@pytest.mark.parametrize("rich", [True, False])
def test_progress_is_shown_only_in_a_terminal(
    rich: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if rich:
        pytest.importorskip("rich")
    else:
        monkeypatch.setattr(terminal, "find_spec", lambda name: None)

    def told() -> tuple[str, str]:
        with progress(4) as tell:
            tell("half of it", 2)
            print("a result")
        return capsys.readouterr()

    assert told() == ("a result\n", "")  # a file or another program reads it
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    out, err = told()
    assert out == "a result\n" and "half of it" in err
    with quiet():
        assert not shows_progress() and told() == ("a result\n", "")


def test_one_bar_at_a_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What runs within a command that shows its own progress draws none."""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with progress(2) as outer:
        assert not shows_progress()
        with progress(3) as inner:
            inner("inside", 1)
        outer("outside", 1)
    assert shows_progress()
    told = capsys.readouterr().err
    assert "outside" in told and "inside" not in told


def test_tables_align_numbers_and_escape_markdown() -> None:
    assert str(ROWS).splitlines() == [
        "name    us  why",
        "a|b    1.5  slow",
        "c        -",
        "d     20.0",
    ]
    assert ROWS.markdown().splitlines() == [
        "| name | us | why |",
        "| --- | ---: | --- |",
        "| a\\|b | 1.5 | slow |",
        "| c | - |  |",
        "| d | 20.0 |  |",
    ]


def test_show_is_rich_only_in_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("rich")
    show(ROWS)
    assert capsys.readouterr().out == f"{ROWS}\n"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    show(ROWS)
    assert "─" in capsys.readouterr().out
    calls: list[Any] = []
    monkeypatch.setattr(terminal, "find_spec", lambda name: calls.append(name))
    show(ROWS, sys.stdout)
    assert capsys.readouterr().out == f"{ROWS}\n" and calls == ["rich"]
