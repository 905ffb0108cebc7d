"""Writes the support table of README.md from the tree; tests fail while it is stale."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from openmla.backends import BACKENDS, all_backends

README = Path(__file__).resolve().parent.parent / "README.md"
BEGIN, END = "<!-- support table: make table -->", "<!-- end of support table -->"


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


def with_table(readme: str) -> str:
    """README's text with the part between the markers replaced."""
    head, _, rest = readme.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n{support_table()}\n{END}{tail}"


if __name__ == "__main__":
    README.write_text(with_table(README.read_text()))
