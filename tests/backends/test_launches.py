"""Every kernel is declared by a KernelSpec, from which its launches and its builds follow.

Triton's default for fused multiply-adds changes between versions, and results with it: a spec
states what it wants, so launches and ahead-of-time builds cannot differ.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from openmla.backends import BACKENDS

pytest.importorskip("triton")
FOLDER = Path(__file__).resolve().parents[2] / "openmla" / "backends"
FILES = sorted(path for name in ("gluon", "triton") for path in (FOLDER / name).glob("*.py"))


def specs() -> Iterator[Any]:
    for op, backends in BACKENDS.items():
        for backend in {"gluon", "triton"} & {*backends}:
            yield from import_module(f"openmla.backends.{backend}.{op}").SPECS


def calls(path: Path) -> Iterator[str]:
    """What a file calls, as text: names, attributes and subscripts."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func)


def test_every_kernel_has_a_spec_of_its_op() -> None:
    nodes = [node for path in FILES for node in ast.walk(ast.parse(path.read_text()))]
    functions = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    defined = {name for name in functions if name.endswith("_kernel")}
    assert defined == {spec.kernel.fn.__name__ for spec in specs()}


def test_kernels_are_launched_by_their_specs() -> None:
    """Triton's own launch, kernel[grid], and prepare() are each called in one place."""
    launched = {name for path in FILES for name in calls(path) if "kernel[" in name}
    assert launched == {"self.kernel[grid]"}
    assert [path.stem for path in FILES if "prepare" in calls(path)] == ["_spec"]


def test_every_spec_has_builds_for_its_targets() -> None:
    """With the fp_fusion of its launches; different specs of a kernel agree on it."""
    wanted: dict[str, bool] = {}
    for spec in specs():
        builds = list(spec.builds())
        assert {build.capability for build in builds} == {*spec.targets}, spec.kernel
        for build in builds:
            name = build.kernel.fn.__name__
            assert build.fp_fusion == wanted.setdefault(name, spec.fp_fusion), name
