"""Pictures of benchmarks: bars of contenders by shape, lines over the length of the context."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from openmla.bench.titles import in_words

if TYPE_CHECKING:
    from openmla.bench.output import Row

COLOURS = ("#3b5bbf", "#d9822b", "#2e8b57", "#8e44ad", "#7a8794", "#c0392b", "#16a2b8", "#b8860b")


def draw_bars(rows: Sequence[Row], title: str, machine: str, path: str) -> None:
    """One group of bars per shape; each says its time, and how often it is the baseline's speed."""
    from matplotlib import pyplot

    shapes = list(dict.fromkeys(row.shape for row in rows))
    names = list(dict.fromkeys(row.contender for row in rows))
    height = 1.2 + 0.3 * (len(rows) + len(shapes))
    figure, axes = pyplot.subplots(figsize=(10, max(height, 2.5)))
    place, ticks = 0.0, []
    for shape in shapes:
        first = place
        for row in (row for row in rows if row.shape == shape):
            colour = COLOURS[names.index(row.contender) % len(COLOURS)]
            first_of_it = next(each for each in rows if each.contender == row.contender)
            label = row.contender if row is first_of_it else None
            axes.barh(place, row.median_us, 0.8, color=colour, label=label)
            told = f" {row.median_us:,.1f} us, {row.ratio:.2f} x {row.baseline}"
            axes.annotate(told, (row.median_us, place), va="center", fontsize=7)
            place += 1
        ticks.append((first + place - 1) / 2)
        place += 1
    labels = [textwrap.fill(in_words(shape), 30) for shape in shapes]
    axes.set_yticks(ticks, labels, fontsize=8)
    axes.invert_yaxis()
    axes.set(xscale="log", xlabel="median time of one call, us (shorter is better)")
    low, high = axes.get_xlim()
    axes.set_xlim(low, high * (high / low) ** 0.5)  # room for what the bars say
    axes.set_title(f"{title}\n{machine}", fontsize=9)
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1))
    _close(figure, path)


def draw_lines(
    points: Mapping[str, Mapping[int, float]], title: str, unit: str, machine: str, path: str
) -> None:
    """A line per contender over the keys of a context, on logarithmic axes."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2))
    for number, (name, values) in enumerate(points.items()):
        colour = COLOURS[number % len(COLOURS)]
        style = "s--" if name == "transformers" else "o-"
        label = "plain transformers" if name == "transformers" else name
        axes.plot(list(values), list(values.values()), style, color=colour, label=label)
    keys = sorted({key for values in points.values() for key in values})
    axes.set_xscale("log", base=2)
    axes.set_xticks(keys, [_thousands(key) for key in keys])
    axes.minorticks_off()
    axes.set_ylim(0, 1.1 * max(max(values.values()) for values in points.values()))
    axes.set(xlabel="tokens of context", ylabel=unit)
    axes.set_title(f"{title}\n{machine}", fontsize=9)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    _close(figure, path)


def _thousands(keys: int) -> str:
    return f"{keys // 1024}k" if keys % 1024 == 0 else f"{keys:,}"


def _close(figure: object, path: str) -> None:
    from matplotlib import pyplot

    figure.tight_layout()  # type: ignore[attr-defined]
    figure.savefig(path, dpi=120)  # type: ignore[attr-defined]
    pyplot.close(figure)
