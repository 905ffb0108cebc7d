"""Reports what bisect found: a table, one sentence, and a plot."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from openmla.bisect.judge import Verdict
from openmla.cli.pictures import INK, WIDTH, picture
from openmla.plan.explanation import counted

SHOWN_ROWS = 4  # ranges of tokens to list


def table(verdicts: Sequence[Verdict]) -> str:
    """One line per component: its worst layer, and how many layers exceed the budget."""
    lines = [f"{'component':<18}{'worst layer':>12}{'error':>11}{'budget':>11}{'used':>10}"]
    for name, found in by_component(verdicts).items():
        judged = [verdict for verdict in found if verdict.judged]
        if not judged:
            lines.append(f"{name:<18}{'-':>12}  {found[0].note}")
            continue
        worst = max(judged, key=lambda verdict: verdict.used)
        wrong = sum(verdict.wrong for verdict in judged)
        mark = f"  outside in {wrong} of {len(judged)} layers" if wrong else ""
        numbers = f"{number(worst.error):>11}{number(worst.budget):>11}{number(worst.used):>10}"
        lines.append(f"{name:<18}{worst.layer:>12}{numbers}{mark}")
    return "\n".join(lines)


def by_component(verdicts: Sequence[Verdict]) -> dict[str, list[Verdict]]:
    """Group verdicts by component, in order of computation; layers may differ in components."""
    longest = max(_layers(verdicts).values(), key=len, default=[])
    found: dict[str, list[Verdict]] = {verdict.component.name: [] for verdict in longest}
    for verdict in verdicts:
        found.setdefault(verdict.component.name, []).append(verdict)
    return found


def _layers(verdicts: Sequence[Verdict]) -> dict[int, list[Verdict]]:
    layers: dict[int, list[Verdict]] = {}
    for verdict in verdicts:
        layers.setdefault(verdict.layer, []).append(verdict)
    return layers


def sentence(verdicts: Sequence[Verdict], subject: str) -> str:
    """Name the first component that exceeds its budget, by how much, and the likely cause."""
    judged = [verdict for verdict in verdicts if verdict.judged]
    wrong = next((verdict for verdict in judged if verdict.wrong), None)
    if not judged:
        return f"Nothing could be judged: {subject} has no output together with its inputs."
    if wrong is None:
        closest = max(judged, key=lambda verdict: verdict.used)
        layers = len(_layers(judged))
        return (
            f"All {counted(len(judged), 'component')} of {counted(layers, 'layer')} are within "
            f"their budgets. The closest is {closest.component.name} of layer {closest.layer}, "
            f"which uses {number(closest.used)} of its budget."
        )
    component = wrong.component
    parts = [
        f"The first component outside its budget is {component.name} ({component.title}) of layer "
        f"{wrong.layer}."
    ]
    if math.isfinite(wrong.used):
        parts.append(
            f"Its error is {number(wrong.error)}, {number(wrong.used)}x its budget of "
            f"{number(wrong.budget)}; values are about {number(wrong.size)}."
        )
    if wrong.note:
        parts.append(f"It looks {wrong.note}." if wrong.note.startswith("as if") else
                     f"{wrong.note[0].upper()}{wrong.note[1:]}.")  # fmt: skip
    if wrong.rows:
        parts.append(f"Affected rows: {stretches(wrong.rows)}.")
    return " ".join(parts)


def stretches(rows: Sequence[int]) -> str:
    """Format rows as ranges: 0 to 15, 32, and so on."""
    runs: list[list[int]] = []
    for row in rows:
        if runs and row == runs[-1][1] + 1:
            runs[-1][1] = row
        else:
            runs.append([row, row])
    texts = [str(first) if first == last else f"{first} to {last}" for first, last in runs]
    more = len(texts) - SHOWN_ROWS
    return ", ".join(texts[:SHOWN_ROWS]) + (
        f" and {counted(more, 'more range')}" if more > 0 else ""
    )


def number(value: float) -> str:
    """Format with three digits, whatever the magnitude."""
    return "any" if math.isinf(value) else f"{value:.3g}"


def draw(verdicts: Sequence[Verdict], path: Path, title: str) -> None:
    """Plot error by layer and component, as log10 of the share of the budget: below 0 is within."""
    found = by_component(verdicts)
    names = [name for name, each in found.items() if any(verdict.judged for verdict in each)]
    layers = sorted(_layers(verdicts))
    least, most = -2.0, 2.0
    grid = [[math.nan] * len(names) for _ in layers]
    for column, name in enumerate(names):
        for verdict in found[name]:
            if verdict.judged:
                power = math.log10(verdict.used) if verdict.used > 0 else least
                grid[layers.index(verdict.layer)][column] = min(max(power, least), most)
    height, width = 2.8 + 0.28 * min(len(layers), 80), max(2.5 + 0.42 * len(names), WIDTH)
    with picture(path, height, title, width=width) as figure:
        axes = figure.subplots()
        image = axes.imshow(grid, cmap="RdYlGn_r", vmin=least, vmax=most, aspect="auto")
        axes.set_xticks(range(len(names)), names, rotation=60, ha="right")
        step = -(-len(layers) // 40)
        axes.set_yticks(range(0, len(layers), step), [str(layer) for layer in layers[::step]])
        axes.set_ylabel("layer")
        wrong = next((verdict for verdict in verdicts if verdict.wrong), None)
        if wrong is not None:
            place = (names.index(wrong.component.name), layers.index(wrong.layer))
            axes.plot(*place, "o", mfc="none", mec="black", ms=13, mew=2, label="first outside")
            figure.legend(loc="outside lower left", labelcolor=INK)
        bar = figure.colorbar(image, ax=axes, ticks=[-2, -1, 0, 1, 2])
        bar.ax.set_yticklabels(["1% or less", "10%", "all of it", "10 times", "100 times or more"])
        bar.set_label("error, as a share of its budget")
