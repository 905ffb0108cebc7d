"""Writes the tables of README.md: ops and backends from the tree, versions from a results file.

Tests fail while they are stale.
"""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

from openmla.backends import BACKENDS, all_backends

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
COMPATIBILITY = ROOT / "bench" / "results" / "compatibility.json"
SUPPORT = "<!-- support table: make table -->", "<!-- end of support table -->"
VERSIONS = "<!-- versions: make table -->", "<!-- end of versions -->"


def support_table() -> str:
    """One row per op, one column per backend: what the tree holds."""
    backends = all_backends()
    lines = ["| op | what it does | " + " | ".join(f"`{name}`" for name in backends) + " |"]
    lines.append("| --- | --- |" + " :-: |" * len(backends))
    for op, names in BACKENDS.items():
        first_line = (import_module(f"openmla.ops.{op}").__doc__ or "").splitlines()[0]
        purpose = first_line.partition(": ")[2].rstrip(".")
        cells = " | ".join("yes" if name in names else "" for name in backends)
        lines.append(f"| `{op}` | {purpose} | {cells} |")
    return "\n".join(lines)


def compatibility_table() -> str:
    """One row per run: versions, machine, the command, and what it said."""
    runs: list[dict[str, Any]] = json.loads(COMPATIBILITY.read_text())["runs"]
    columns = ("python", "torch", "triton", "transformers", "machine", "command", "result")
    lines = ["| " + " | ".join(columns) + " |", "| --- " * len(columns) + "|"]
    for run in runs:
        cells = [
            f"`{run[name]}`" if name == "command" and run[name] else run[name] for name in columns
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def with_tables(readme: str) -> str:
    """README's text with the parts between the markers replaced."""
    for (begin, end), table in ((SUPPORT, support_table()), (VERSIONS, compatibility_table())):
        head, _, rest = readme.partition(begin)
        _, _, tail = rest.partition(end)
        readme = f"{head}{begin}\n{table}\n{end}{tail}"
    return readme


if __name__ == "__main__":
    README.write_text(with_tables(README.read_text()))
