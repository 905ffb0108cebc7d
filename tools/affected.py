"""Finds the test files that a change can affect, by what each file imports.

Errs on the safe side: a changed file of which nothing is known affects every test.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterable
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("openmla", "tests", "bench", "tools", "examples")
# Files that no test on a GPU reads.
PROSE = (".md", ".svg", ".png")
UNREAD = (".ci/", ".github/", "docs/", "bench/results/", "LICENSE", "mkdocs.yml")
# Implementations are loaded by the name of their op, which these files list without loading one.
TABLES = ROOT / "openmla" / "backends"
DOTTED = re.compile(r"\w+(\.\w+)+")


def changed_since(base: str) -> list[str] | None:
    """Files that differ from the commit where this tree left `base`; None if git cannot tell."""
    found: list[str] = []
    for asked in (
        ["git", "diff", "--name-only", "--no-renames", "--merge-base", base],
        ["git", "ls-files", "--others", "--exclude-standard"],
    ):
        said = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True)
        if said.returncode:
            return None
        found += said.stdout.splitlines()
    return found


def affected(tests: Iterable[Path], changed: Iterable[str]) -> list[Path]:
    """Those of `tests` that a change of the files `changed` can affect."""
    tests = list(tests)
    read = [name for name in changed if not (name.endswith(PROSE) or name.startswith(UNREAD))]
    code = {ROOT / name for name in read}
    for path in code:
        # data, a setting, a module that is gone, or a package, which every import of it runs
        if path.suffix != ".py" or not path.exists() or path.name == "__init__.py":
            return tests
    return [path for path in tests if reached(path) & code]


def reached(test: Path) -> set[Path]:
    """Files that a test file runs: itself, what it imports and so on, and conftest files."""
    found: set[Path] = set()
    left = [test, *(folder / "conftest.py" for folder in test.parents)]
    while left:
        path = left.pop()
        if path not in found and path.exists():
            found.add(path)
            left += imports(path)
    return found


@cache
def imports(path: Path) -> frozenset[Path]:
    """Files that a file imports, by a statement or by a string."""
    found: set[Path] = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            for name in node.names:
                found |= modules(name.name)
        elif isinstance(node, ast.ImportFrom):
            for name in node.names:
                found |= source_of(node.module or "", name.name)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= named(node.value, path)
    return frozenset(found)


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def modules(name: str) -> set[Path]:
    """The file of a module or package of this tree."""
    if name.partition(".")[0] not in PACKAGES:
        return set()
    path = ROOT / name.replace(".", "/")
    return {file for file in (path.with_suffix(".py"), path / "__init__.py") if file.exists()}


def source_of(module: str, name: str) -> set[Path]:
    """The file that defines what `from module import name` imports."""
    if submodule := modules(f"{module}.{name}"):
        return submodule
    for path in modules(module):
        if path.name == "__init__.py":
            for node in parsed(path).body:
                if isinstance(node, ast.ImportFrom) and name in {each.name for each in node.names}:
                    return source_of(node.module or "", name)
    return modules(module)


def named(text: str, path: Path) -> set[Path]:
    """Files that load(), import_module() or a process imports, given a string of this file."""
    found: set[Path] = set()
    if path.parent != TABLES:
        found |= implementations().get(text, set())
    if DOTTED.fullmatch(text):
        found |= modules(text) or modules(text.rpartition(".")[0])
    return found


@cache
def implementations() -> dict[str, set[Path]]:
    """Files of each op in all backends."""
    found: dict[str, set[Path]] = {}
    for path in TABLES.glob("*/[!_]*.py"):
        found.setdefault(path.stem, set()).add(path)
    return found
