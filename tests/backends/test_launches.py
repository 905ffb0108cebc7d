"""Launches and ahead-of-time builds of one kernel say the same; read from the sources.

Triton's default for fused multiply-adds changes between versions, and results with it: every launch
states what it wants, and its build is compiled so.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
FOLDER = Path(__file__).resolve().parents[2] / "openmla" / "backends"
FILES = sorted(path for name in ("gluon", "triton") for path in (FOLDER / name).glob("*.py"))


def launches(tree: ast.AST) -> Iterator[ast.Call]:
    """Calls of prepare(kernel, ...); `kernel` or a name that ends so. No other launch is there."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
            assert ast.unparse(node.func.value) in ("self.kernel", "Iterator"), ast.unparse(node)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "prepare":
            assert "kernel" in ast.unparse(node.args[0]).rpartition(".")[2]
            yield node


def functions() -> Iterator[tuple[Path, ast.FunctionDef]]:
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                yield path, node


def specs() -> Iterator[Any]:
    """Kernels that are declared once: a launch and its builds have one fp_fusion."""
    from openmla.backends.triton._spec import KernelSpec

    for path in FILES:
        module = import_module(f"openmla.backends.{path.parent.name}.{path.stem}")
        yield from (each for each in vars(module).values() if isinstance(each, KernelSpec))


def launchers() -> Iterator[tuple[Path, ast.FunctionDef, ast.Call]]:
    for path, function in functions():
        if path.stem != "_spec":
            yield from ((path, function, call) for call in launches(function))


def named_kernels(tree: ast.AST) -> set[str]:
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    names |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return {name for name in names if name.startswith("_") and name.endswith("_kernel")}


def kernels_of(path: Path, function: ast.FunctionDef) -> set[str]:
    """The kernels a function names, of which it launches one or another; those of its file and of
    the files that import it where it is handed one."""
    kernels = named_kernels(function)
    module = f"openmla.backends.{path.parent.name}.{path.stem}"
    if not kernels:
        kernels = named_kernels(ast.parse(path.read_text()))
        for tree in (ast.parse(file.read_text()) for file in FILES):
            if module in imported(tree):
                kernels |= named_kernels(tree)
    return kernels


def imported(tree: ast.AST) -> set[str | None]:
    return {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}


def test_every_launch_states_fp_fusion() -> None:
    launched = {spec.kernel.fn.__name__ for spec in specs()}
    for path, function, call in launchers():
        launched |= kernels_of(path, function)
        stated = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        where = f"{path.name}: {function.name}"
        assert stated.get("enable_fp_fusion") == "FP_FUSION", f"{where} must pass FP_FUSION"
    defined = {function.name for _, function in functions() if function.name.endswith("_kernel")}
    assert launched == defined  # none is missed here


def test_builds_have_the_fp_fusion_of_their_launch() -> None:
    from openmla.backends.triton._build import all_builds

    wanted = {spec.kernel.fn.__name__: spec.fp_fusion for spec in specs()}
    for path, function, _ in launchers():
        own = import_module(f"openmla.backends.{path.parent.name}.{path.stem}").FP_FUSION
        for kernel in kernels_of(path, function):
            assert wanted.setdefault(kernel, own) == own, kernel
    built = {(build.kernel.fn.__name__, build.fp_fusion) for build in all_builds()}
    assert built == set(wanted.items())
