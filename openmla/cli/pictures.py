"""The style of the commands' pictures: transparent, and legible on light and dark pages.

Text stays legible when a picture is shown 500 pixels wide.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from openmla.cli.terminal import note
from openmla.errors import UnsupportedError

WIDTH = 6.2  # inches; at 500 pixels a point has 1.1 pixels
INK = "#797979"  # equal contrast on white and on the dark pages of code hosts
COLORS = (
    "#3b7dd8", "#e08a1e", "#2ca05a", "#a35bd6", "#d9483b", "#17a2b8", "#b58a00", "#e06ab8",
    "#8c6d5a", "#6fbf3a", "#5560c8", "#909090",
)  # fmt: skip
STYLE = {
    **dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK
    ),
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": INK,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "font.size": 10,
    "axes.titlesize": 10,
    "figure.titlesize": 11,
    "legend.fontsize": 9,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
}


def check_plot(command: str, path: str | None) -> None:
    """Raise if a picture is requested that this installation cannot draw."""
    if path and find_spec("matplotlib") is None:
        raise UnsupportedError(f'{command}: --plot needs matplotlib: pip install "openmla[plot]".')


@contextmanager
def picture(path: str | Path, height: float, title: str, *, width: float = WIDTH) -> Iterator[Any]:
    """A matplotlib figure with a title, written on exit."""
    from matplotlib import pyplot

    with pyplot.rc_context(STYLE):
        figure = pyplot.figure(figsize=(width, height), layout="constrained")
        try:
            figure.suptitle(
                "\n".join(textwrap.fill(line, round(11 * width)) for line in title.splitlines())
            )
            yield figure
            figure.savefig(path, dpi=160)
        finally:
            pyplot.close(figure)
    note(f"wrote {Path(path).name}")


def label_decades(axis: Any, text: Callable[[float], str]) -> None:
    """Label a logarithmic axis in words: powers of ten, with 2 and 5 if there are few."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axis.get_view_interval()
    subs = (1.0,) if high / low > 1e3 else (1.0, 2.0, 5.0)
    axis.set_major_locator(LogLocator(subs=subs))
    axis.set_major_formatter(FuncFormatter(lambda value, _: text(value)))
    axis.set_minor_formatter(NullFormatter())


def short_count(value: float) -> str:
    """500, 20k, 3M, 1G."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"


def short_time(us: float) -> str:
    """20 us, 5 ms, 1 s."""
    for size, unit in ((1e6, "s"), (1e3, "ms")):
        if us >= size:
            return f"{us / size:g} {unit}"
    return f"{us:g} us"
