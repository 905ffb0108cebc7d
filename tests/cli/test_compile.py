"""`openmla doctor --compile`: kernels for real targets, without a GPU."""

from __future__ import annotations

import pytest

from openmla.cli.__main__ import main

pytest.importorskip("triton")


def test_one_target(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--compile", "sm_90"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["kernel", "target", "registers", "spills", "shared"]
    assert all(line.split()[1] == "sm_90" for line in lines[1:-1])
    assert lines[-1] == f"{len(lines) - 2} kernels compiled, 0 of them too large."


def test_unknown_target(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--compile", "sm_75"]) == 2
    assert "--compile must be all or sm_80" in capsys.readouterr().err
