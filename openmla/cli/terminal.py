"""Output besides results: notes and progress bars on stderr; tables on either stream."""

from __future__ import annotations

import logging
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.util import find_spec
from typing import TextIO

_LOGGER = logging.getLogger("openmla.cli")
_DRAWN = ContextVar("drawn", default=False)  # whether a bar is on the screen: only one at a time
Advance = Callable[[str, int], None]  # the current task, and how much of the total is done


class _ErrorStream(logging.Handler):
    """Logs to the current sys.stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        kind = "warning: " if record.levelno >= logging.WARNING else ""
        print(f"openmla: {kind}{record.getMessage()}", file=sys.stderr, flush=True)


_LOGGER.propagate = False
_LOGGER.setLevel(logging.INFO)
_LOGGER.addHandler(_ErrorStream())


def note(text: str) -> None:
    """Print a progress note on stderr."""
    _LOGGER.info("%s", text)


def warn(text: str) -> None:
    """Print a line that --quiet does not suppress."""
    _LOGGER.warning("%s", text)


@contextmanager
def quiet(wanted: bool = True) -> Iterator[None]:
    """Suppress notes and progress bars, but not warnings and errors."""
    before = _LOGGER.level
    if wanted:
        _LOGGER.setLevel(logging.WARNING)
    try:
        yield
    finally:
        _LOGGER.setLevel(before)


def width() -> int:
    """Columns of the terminal, at most 100; 100 if output goes to a file."""
    return min(shutil.get_terminal_size((100, 24)).columns, 100)


def filled(text: str, start: str = "", *, hanging: int | None = None) -> list[str]:
    """Wrap a text after a prefix at the terminal's width, keeping numbers with their units. Later
    lines begin at column `hanging`, by default at the start of the text."""
    held = re.sub(r"(?<=\d) (?=[KMGT]?i?B\b|us\b|ms\b|T?FLOP)", "\0", text)
    lines = textwrap.wrap(
        held, width(), initial_indent=start,
        subsequent_indent=" " * (len(start) if hanging is None else hanging),
        break_on_hyphens=False,
    )  # fmt: skip
    return [line.replace("\0", " ") for line in lines] or [start.rstrip()]


def shown_time(seconds: float) -> str:
    """Format a time with its unit: milliseconds above 1,000 us."""
    us = 1e6 * seconds
    if us > 1e3:
        return f"{us / 1e3:,.2f} ms"
    return f"{us:.1f} us" if us == 0 or us >= 1 else f"{us:.3f} us"


def shows_progress() -> bool:
    """Whether stderr is a terminal, without --quiet and without another bar."""
    return sys.stderr.isatty() and _LOGGER.isEnabledFor(logging.INFO) and not _DRAWN.get()


@contextmanager
def progress(total: int) -> Iterator[Advance]:
    """A progress bar in a terminal, if rich is installed; not inside another bar."""
    if not shows_progress():
        yield lambda what, done: None
        return
    drawn = _DRAWN.set(True)
    try:
        with _bar(total) as advance:
            yield advance
    finally:
        _DRAWN.reset(drawn)


@contextmanager
def _bar(total: int) -> Iterator[Advance]:
    if find_spec("rich") is None:

        def tell(what: str, done: int) -> None:
            filled = "#" * round(30 * done / max(total, 1))
            print(f"\r[{filled:<30}] {what[:44]:<44}", end="", file=sys.stderr, flush=True)

        try:
            yield tell
        finally:
            print("\r" + " " * 78 + "\r", end="", file=sys.stderr, flush=True)
    else:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
        from rich.progress import TimeRemainingColumn as Remaining

        columns = (BarColumn(), MofNCompleteColumn(), Remaining(), TextColumn("{task.description}"))
        screen = Console(stderr=True)
        # results on the same terminal are printed above the bar
        both = sys.stdout.isatty()
        # redrawn on updates, not by a thread, which would disturb measurements
        with Progress(
            *columns, console=screen, transient=True, auto_refresh=False, redirect_stdout=both
        ) as bar:
            task = bar.add_task("", total=total)

            def draw(what: str, done: int) -> None:
                bar.update(task, description=what, completed=done, refresh=True)

            yield draw


def show(value: object, stream: TextIO | None = None) -> None:
    """Print a value, formatted by rich in a terminal if possible, else as text."""
    stream = sys.stdout if stream is None else stream
    if hasattr(value, "__rich__") and stream.isatty() and find_spec("rich") is not None:
        from rich.console import Console

        Console(file=stream).print(value)
    else:
        print(str(value), file=stream, flush=True)


class Table:
    """A header and rows of text: aligned columns, or Markdown. Numbers are right-aligned."""

    def __init__(self, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        self.header, self.rows = list(header), [list(row) for row in rows]

    def _right(self, column: int) -> bool:
        """Whether a column holds numbers, judged by its first nonempty cell."""
        cells = [row[column] for row in self.rows if row[column] not in ("", "-")]
        return bool(cells) and cells[0][:1].isdigit()

    def __str__(self) -> str:
        lines = [self.header, *self.rows]
        widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
        rights = [self._right(column) for column in range(len(widths))]
        shown = (
            "  ".join(
                cell.rjust(width) if right else cell.ljust(width)
                for cell, width, right in zip(line, widths, rights, strict=True)
            ).rstrip()
            for line in lines
        )
        return "\n".join(shown)

    def markdown(self) -> str:
        marks = ["---:" if self._right(column) else "---" for column in range(len(self.header))]
        lines = [self.header, marks, *self.rows]
        escaped = ([cell.replace("|", "\\|") for cell in line] for line in lines)
        return "\n".join(f"| {' | '.join(line)} |" for line in escaped)

    def __rich__(self) -> object:
        from rich import box
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(box=box.SIMPLE_HEAD, pad_edge=False)
        for column, name in enumerate(self.header):
            table.add_column(Text(name), justify="right" if self._right(column) else "left")
        for row in self.rows:
            table.add_row(*map(Text, row))
        return table
