"""Versions of packages that backends need: too old, untested, missing, and what people are told."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from openmla.backends import Problem, choose_backend, forget_choices, requirements, why_not
from openmla.backends.requirements import REQUIRES, explain_failure, missing, warn_of_reference
from openmla.errors import ShapeError, UnsupportedError
from openmla.ops._register import on_its_device
from openmla.plan.problems import chosen

ON_A_GPU = Problem("cache_gather", device="cuda", capability=(9, 0), format="bf16", D=576, C=512)


@pytest.fixture(autouse=True)
def nothing_said_yet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(requirements, "_SAID", set())
    forget_choices()
    yield
    forget_choices()


def with_triton(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    """As if this Triton were installed, or none."""
    found = None if version is None else object()
    monkeypatch.setattr(requirements, "find_spec", lambda name: found if name == "triton" else None)
    monkeypatch.setattr(requirements, "version_of", lambda package: version)


@pytest.mark.parametrize("version", ["3.6.0", "3.7.1", "3.8.0", "3.9.0", "3.9.1+git1234"])
def test_tested_versions(
    version: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with_triton(monkeypatch, version)
    assert missing("triton") is None and not requirements.untested("triton")
    assert not caplog.records


@pytest.mark.parametrize("version", ["3.10.0", "3.10.0a0+git", "4.0.0"])
def test_a_newer_version_is_tried_with_one_warning(
    version: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with_triton(monkeypatch, version)
    assert [missing("triton") for _ in range(3)] == [None] * 3
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert f"triton {version} is newer than those tested, 3.6 to 3.9" in record.message


def test_an_older_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with_triton(monkeypatch, "3.5.1")
    assert why_not(ON_A_GPU, "triton") == "needs triton>=3.6, this is 3.5.1"
    with pytest.raises(UnsupportedError, match=r"needs triton>=3\.6, this is 3\.5\.1"):
        choose_backend(ON_A_GPU, "triton")


@pytest.mark.parametrize(
    "version, reason",
    [("3.5.1", "needs triton>=3.6, this is 3.5.1"), (None, "package triton is not installed")],
)
def test_the_reference_on_a_gpu_is_told_once_with_its_cure(
    version: str | None,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with_triton(monkeypatch, version)
    for _ in range(2):
        assert chosen([ON_A_GPU], "auto") == {"cache_gather": "reference"}
    (record,) = caplog.records
    assert record.message == (
        "plan: running on a GPU without kernels, by the reference, which is many times slower: "
        f'{reason}. pip install "openmla[triton]"'
    )
    chosen([replace(ON_A_GPU, device="cpu", capability=None)], "auto")
    chosen([ON_A_GPU], "reference")  # asked for
    assert len(caplog.records) == 1
    warn_of_reference("attach", "cuda")
    assert caplog.records[1].message.startswith("attach: running on a GPU without kernels")


def test_nothing_is_said_where_kernels_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with_triton(monkeypatch, "3.9.0")
    warn_of_reference("attach", "cuda")
    assert not caplog.records


class CompilationError(Exception):
    """As Triton's own, which say where they are from."""


CompilationError.__module__ = "triton.compiler.errors"


@pytest.mark.parametrize("error", [CompilationError("at 3:7"), AttributeError("async_load")])
def test_a_kernel_that_fails_with_a_newer_triton(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(_: Any) -> None:
        raise error

    started = on_its_device("mqa_paged", run)
    with_triton(monkeypatch, "3.9.0")
    with pytest.raises(type(error)):  # a bug here, shown as it is
        started(torch.zeros(1))
    with_triton(monkeypatch, "3.11.2")
    with pytest.raises(UnsupportedError) as told:
        started(torch.zeros(1))
    assert str(told.value) == (
        "mqa_paged: a kernel failed with triton 3.11.2, which is newer than the tested versions, "
        f'3.6 to 3.9: {error}. Run pip install "triton<=3.9.*".'
    )
    assert told.value.__cause__ is error


def test_other_errors_are_nobody_elses_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    with_triton(monkeypatch, "3.11.2")
    explain_failure("mqa_paged", ShapeError("mqa_paged: too wide"))
    explain_failure("mqa_paged", RuntimeError("CUDA out of memory"))


def test_found_by_import_whatever_the_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    """ROCm's and XPU's wheels have other names: nobody asks which was installed."""
    pytest.importorskip("triton")
    code = (
        "import importlib.metadata as m\n"
        "def none(name): raise m.PackageNotFoundError(name)\n"
        "m.version = m.distribution = none\n"
        "from openmla.backends.requirements import missing\n"
        "assert missing('triton') is None"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_extra_allows_what_is_tested() -> None:
    """pyproject.toml's range: nothing older than the oldest, and no upper end."""
    from pathlib import Path

    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert f"triton = [\"triton>={REQUIRES['triton'].oldest}; sys_platform == 'linux'\"]" in text
