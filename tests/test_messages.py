"""Error messages as the source has them: where, one or more sentences, and the words of the field.

Tables of calls that raise them are in tests/attention and tests/layers.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "openmla"
ERRORS = {"ShapeError", "ConfigError", "UnsupportedError", "CacheFullError"}
ELSEWHERE = ("ops/", "cli/")
NOT_OURS = (
    "refused", "understood", "must be given", "must not be given", "got none", "is there",
    "quantis", "normalis", "initialis", "eight bits", "recorded", "whole number", "as planned",
    "asked for",
)  # fmt: skip


def template(node: ast.expr) -> str | None:
    """The text of a message, with {} for what it shows; None if it is made elsewhere."""
    if isinstance(node, ast.BinOp):
        return template(node.left)
    if isinstance(node, ast.Constant):
        return str(node.value)
    if not isinstance(node, ast.JoinedStr):
        return None
    return "".join(str(v.value) if isinstance(v, ast.Constant) else "{}" for v in node.values)


def messages() -> Iterator[tuple[str, str]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        if name.startswith(ELSEWHERE):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                continue
            text = template(node.args[0]) if node.func.id in ERRORS and node.args else None
            if text is not None:
                yield f"{name}:{node.lineno}", text


FOUND = list(messages())


def test_messages_are_found() -> None:
    assert len(FOUND) > 300


@pytest.mark.parametrize("place", sorted({place.partition(":")[0] for place, _ in FOUND}))
def test_messages_read_alike(place: str) -> None:
    for where, text in FOUND:
        if not where.startswith(f"{place}:"):
            continue
        assert re.match(r"(\w[\w ]*|\{\})(: |\.)?", text), f"{where} does not say where: {text}"
        assert text[-1] in ".?}\n" and "  " not in text, f"{where} does not end: {text}"
        assert not (words := [word for word in NOT_OURS if word in text]), f"{where}: {words}"
