"""`openmla doctor --compile`: kernels for real targets, without a GPU."""

from __future__ import annotations

import pytest

from openmla.cli.__main__ import main
from openmla.cli.gpus import TARGETS

pytest.importorskip("triton")


def test_one_target(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A few kernels: tests/backends/test_triton.py compiles them all."""
    from openmla.backends.triton._build import builds_of

    few = [build for op in ("cache_gather", "latent_write") for build in builds_of(op, "triton")]
    monkeypatch.setattr("openmla.backends.triton._build.all_builds", lambda: iter(few))
    assert main(["doctor", "--compile", "sm_90"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["kernel", "target", "registers", "spills", "shared"]
    assert all(line.split()[1] == "sm_90" for line in lines[1:-1])
    assert len(lines) > 5 and lines[-1].startswith(f"{len(lines) - 2} kernels compiled, 0 of them")


def test_unknown_target(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--compile", "sm_75"]) == 2
    told = capsys.readouterr().err
    assert "--compile must be" in told and "sm_80" in told and "'sm_75'" in told


def test_every_target_that_compiles_has_a_gpu() -> None:
    from openmla.backends.triton._build import SHARED_MEMORY, target_name

    assert set(TARGETS) == set(map(target_name, SHARED_MEMORY))
