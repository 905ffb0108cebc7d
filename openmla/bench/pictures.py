"""Plots of benchmarks: bars of contenders by shape, lines over the context length."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from openmla.bench.titles import in_words
from openmla.cli.pictures import COLORS, picture
from openmla.cli.terminal import shown_time

if TYPE_CHECKING:
    from openmla.bench.output import Row


def draw_bars(rows: Sequence[Row], title: str, machine: str, path: str) -> None:
    """One panel per shape, with an axis that begins at 0; each bar shows its time and its ratio to
    the baseline. Panels have separate scales: times of two shapes are not compared."""
    names = list(dict.fromkeys(row.contender for row in rows))
    panels = {shape: [row for row in rows if row.shape == shape] for shape in
              dict.fromkeys(row.shape for row in rows)}  # fmt: skip
    sizes = [len(panel) + 0.9 for panel in panels.values()]
    baselines = ", ".join(dict.fromkeys(row.baseline for row in rows))
    told = f"{title}\n{machine}\nmedian time of one call, speed relative to {baselines}"
    with picture(path, 1.0 + 0.28 * sum(sizes), told) as figure:
        grid = figure.subplots(len(panels), 1, squeeze=False, height_ratios=sizes)
        for (axes,), (shape, panel) in zip(grid, panels.items(), strict=True):
            times = [row.median_us for row in panel]
            colors = [COLORS[names.index(row.contender) % len(COLORS)] for row in panel]
            axes.barh([row.contender for row in panel], times, 0.75, color=colors)
            for place, row in enumerate(panel):
                text = f" {shown_time(row.median_us / 1e6)}, {row.ratio:.2f}x"
                axes.annotate(text, (row.median_us, place), va="center", fontsize=9)
            axes.set_xlim(0, 1.4 * max(times))  # room for the labels of the bars
            axes.invert_yaxis()
            axes.set_title(textwrap.fill(in_words(shape), 80), loc="left")
            axes.tick_params(bottom=False, labelbottom=False, left=False)
            axes.spines["bottom"].set_visible(False)


def draw_lines(
    points: Mapping[str, Mapping[int, float]], title: str, unit: str, machine: str, path: str
) -> None:
    """One line per contender over the keys of a context."""
    with picture(path, 4.4, f"{title}\n{machine}") as figure:
        axes = figure.subplots()
        for number, (name, values) in enumerate(points.items()):
            color = COLORS[number % len(COLORS)]
            style = "s--" if name == "transformers" else "o-"
            label = "plain transformers" if name == "transformers" else name
            axes.plot(list(values), list(values.values()), style, color=color, label=label)
        keys = sorted({key for values in points.values() for key in values})
        axes.set_xscale("log", base=2)
        axes.set_xticks(keys, [_thousands(key) for key in keys])
        axes.minorticks_off()
        axes.set_ylim(0, 1.1 * max(max(values.values()) for values in points.values()))
        axes.set(xlabel="tokens of context", ylabel=unit)
        axes.grid()
        figure.legend(loc="outside lower center", ncols=2)


def _thousands(keys: int) -> str:
    return f"{keys // 1024}k" if keys % 1024 == 0 else f"{keys:,}"
