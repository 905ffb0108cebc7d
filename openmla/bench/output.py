"""Benchmark output: lines or Markdown while it runs, JSON and a plot at the end."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from openmla.bench.titles import in_words
from openmla.cli.pictures import check_plot
from openmla.cli.terminal import Table, shown_time

STANDARD_OUTPUT = "-"  # target of --json without a file; nothing else is printed then


@dataclass(frozen=True)
class Row:
    """One line of a result table; times in microseconds."""

    shape: str
    contender: str
    median_us: float
    min_us: float
    max_us: float
    ratio: float  # baseline's median over this contender's
    baseline: str
    roof: float
    error: float  # share of the error budget used

    @property
    def spread(self) -> str:
        return f"{shown_time(self.min_us / 1e6)} to {shown_time(self.max_us / 1e6)}"

    def text(self) -> str:
        of_peak = f"  {self.roof:>6.1%} of peak" if self.roof else ""
        return (
            f"  {self.contender:<24}{shown_time(self.median_us / 1e6):>11}  "
            f"({self.spread})  {self.ratio:>6.2f}x {self.baseline}{of_peak}  error {self.error:.2g}"
        )


@dataclass(frozen=True)
class LeftOut:
    """A contender that a shape leaves out, and why: not supported, wrong, or failed."""

    shape: str
    contender: str
    why: str


class Output:
    """Where rows go, given the options of argument_parser()."""

    def __init__(self, options: argparse.Namespace, machine: str) -> None:
        check_plot("bench", options.plot)
        self.options, self.machine = options, machine
        self.rows: list[Row] = []
        self.left_out: list[LeftOut] = []
        self.say(machine)

    def say(self, text: str) -> None:
        """Print a line, unless only JSON is requested."""
        if self.options.json != STANDARD_OUTPUT:
            print(text, flush=True)

    def add(self, shape: str, rows: Sequence[Row], left_out: Sequence[LeftOut] = ()) -> None:
        """Add one shape's rows and print its table."""
        self.rows += rows
        self.left_out += left_out
        if self.options.markdown:
            self.say(f"\n**{in_words(shape)}**\n\n{table(rows, left_out).markdown()}")
            return
        self.say(f"\n{shape}")
        for row in rows:
            self.say(row.text())
        for each in left_out:
            self.say(f"  {each.contender:<12} {each.why}")

    def close(self, **more: Any) -> None:
        """Write JSON if requested."""
        left_out = [asdict(each) for each in self.left_out]
        save(self.options.json, self.machine, self.rows, left_out=left_out, **more)

    def draw_bars(self, title: str) -> None:
        if self.options.plot:
            from openmla.bench.pictures import draw_bars

            draw_bars(self.rows, title, self.machine, self.options.plot)

    def draw_lines(self, title: str, unit: str, points: Mapping[str, Mapping[int, float]]) -> None:
        """Plot `points`: for each contender, a value at every number of keys."""
        if self.options.plot:
            from openmla.bench.pictures import draw_lines

            draw_lines(points, title, unit, self.machine, self.options.plot)


def table(rows: Sequence[Row], left_out: Sequence[LeftOut]) -> Table:
    """One shape's table, for Markdown."""
    against = f"x {rows[0].baseline}" if rows else "ratio"
    header = ["contender", "median", "min to max", against, "% of peak", "error"]
    lines = [
        [
            row.contender, shown_time(row.median_us / 1e6), row.spread,
            f"{row.ratio:.2f}", f"{row.roof:.1%}" if row.roof else "-", f"{row.error:.2g}",
        ]
        for row in rows
    ]  # fmt: skip
    lines += [[each.contender, "-", each.why, "-", "-", "-"] for each in left_out]
    return Table(header, lines)


def save(path: str | None, machine: str, rows: Sequence[Row], **more: Any) -> None:
    """Write rows as JSON to a file or to standard output."""
    found = {"machine": machine, "rows": [asdict(row) for row in rows], **more}
    if path == STANDARD_OUTPUT:
        print(json.dumps(found))
    elif path is not None:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(found, file)
