"""Explanation: a few lines of text, which terminals and notebooks show as a table."""

from __future__ import annotations

import html
import io
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from typing import NamedTuple

PART, OP, DETAIL = 9, 12, 7  # columns that names of such lines take in the text
HEADER = ("part", "what", "why")


def counted(count: int, thing: str) -> str:
    """1 request, 2 requests, 3,000 entries."""
    if count != 1:
        thing = f"{thing[:-1]}ies" if thing[-1] == "y" and thing[-2] not in "aeiou" else f"{thing}s"
    return f"{count:,} {thing}"


class Line(NamedTuple):
    """One thing that a step does. Those below belong to it: text lines as they are, or more."""

    name: str
    text: str
    why: str = ""
    width: int = PART
    below: tuple[Line, ...] = ()

    def written(self) -> Iterator[str]:
        """As text; the reason of an op stands in its line, all others have one of their own."""
        inline = self.width == OP
        lead = f"{self.name:<{self.width}} " if self.name else ""
        yield f"{lead}{self.text}{f' ({self.why})' if self.why and inline else ''}"
        if self.why and not inline:
            yield f"  {'why':<{DETAIL}} {self.why}"
        for line in self.below:
            yield from (f"  {each}" for each in line.written())

    def rows(self, depth: int = 0) -> Iterator[tuple[int, str, str, str]]:
        """Depth, part, what, why; lines without a name go on in the cell above, as they are."""
        below = list(self.below)
        text = [self.text]
        while below and not below[0].name and not below[0].below:
            text.append(below.pop(0).text)
        yield depth, self.name, "\n".join(text), self.why
        for line in below:
            yield from line.rows(depth + 1)


class Explanation(str):
    """Lines for people: str() has them, repr() and a notebook a table of part, what and why."""

    lines: tuple[Line, ...]

    def __new__(cls, lines: Iterable[Line]) -> Explanation:
        kept = tuple(lines)
        made = super().__new__(cls, "\n".join(text for line in kept for text in line.written()))
        made.lines = kept
        return made

    def __getnewargs__(self) -> tuple[tuple[Line, ...]]:  # type: ignore[override]  # of pickle
        return (self.lines,)

    @property
    def rows(self) -> list[tuple[int, str, str, str]]:
        """Depth, part, what, why of every line of the table."""
        return [row for line in self.lines for row in line.rows()]

    def __rich__(self) -> object:
        """A table of rich's, for its consoles; below it lists that have columns of their own."""
        from rich import box
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column(HEADER[0], no_wrap=True)
        table.add_column(HEADER[1], ratio=3)
        if any(why for *_, why in self.rows):
            table.add_column(HEADER[2], ratio=2, style="dim")
        lists = []
        for depth, part, what, why in self.rows:
            first, *more = what.splitlines() or [""]
            cells = (Text("  " * depth + part, style="bold"), Text(first), Text(why))
            table.add_row(*cells[: len(table.columns)])
            if more:
                lists.append(Text(part, style="bold"))
                lists += [Text(f"  {line}") for line in more]
        return Group(table, *lists)

    def __repr__(self) -> str:
        """What an interactive terminal shows: the table, or the lines where rich is missing."""
        if find_spec("rich") is None:
            return str(self)
        from rich.console import Console

        console = Console(file=io.StringIO(), highlight=False)
        with console.capture() as captured:
            console.print(self.__rich__())
        return "\n".join(line.rstrip() for line in captured.get().splitlines()).strip("\n")

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        cell = "text-align: left; vertical-align: top; white-space: pre-wrap"
        head = "".join(f'<th style="{cell}">{name}</th>' for name in HEADER)
        rows = []
        for depth, *cells in self.rows:
            indent = f"; padding-left: {depth + 0.5:g}em"
            mono = f"{cell}; font-family: monospace"  # some cells are lists in columns
            styles = (f"{cell}{indent}; font-weight: bold", mono, cell)
            shown = (html.escape(text) for text in cells)
            filled = (f'<td style="{s}">{text}</td>' for s, text in zip(styles, shown, strict=True))
            rows.append(f"<tr>{''.join(filled)}</tr>")
        body = "\n".join(rows)
        return f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>"
