"""`openmla bench`: tables, JSON, and refusals; numbers themselves are never asserted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from openmla.backends import BACKENDS
from openmla.bench.harness import Job, able_backends
from openmla.cli.__main__ import main as openmla
from openmla.ops import rope
from openmla.ops._register import Cost
from openmla.testing import Inputs


@pytest.mark.parametrize("op", BACKENDS)
def test_every_op_has_a_tiny_benchmark(
    op: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.json"
    assert openmla(["bench", op, "--json", str(path)]) == 0
    assert "torch" in capsys.readouterr().out.splitlines()[0]  # the machine line
    saved = json.loads(path.read_text())
    assert saved["rows"] and {row["contender"] for row in saved["rows"]} <= set(BACKENDS[op])
    for row in saved["rows"]:
        assert 0 < row["min_us"] <= row["median_us"] <= row["max_us"] and row["error"] <= 1


def test_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    path = tmp_path / "rows.json"
    assert openmla(["bench", "step", "--keys", "300", "--json", str(path)]) == 0
    text = capsys.readouterr().out
    assert "8.9 x as many" in text and "71.1 x as many" in text and "WRONG" not in text
    saved = json.loads(path.read_text())
    assert len(saved["rows"]) == 4 and saved["plan_us"] > 0


def test_batch_invariant(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from openmla.bench import invariance

    monkeypatch.setattr(invariance, "REQUESTS", (1, 3))
    monkeypatch.setattr(invariance, "HEADS", (4,))
    path = tmp_path / "rows.json"
    command = ["bench", "--batch-invariant", "--json", str(path), "--run-lengths", "32"]
    assert openmla(command) == 0
    text = capsys.readouterr().out
    assert "| decode, 4 heads, 3 x 1 over 256 |" in text and "WRONG" not in text
    assert "projections, 3 tokens" in text and "mqa_paged, us by run length" in text
    assert len(json.loads(path.read_text())["rows"]) == 7


def test_wrong_contenders_are_not_timed(capsys: pytest.CaptureFixture[str]) -> None:
    x = torch.ones(1, 1, 2)
    inputs = Inputs({"x": x}, {}, ())
    calls, _ = able_backends(rope, Job(inputs, Cost(1, 1), lambda _, backend: 1.5))
    assert calls == {} and "WRONG: 1.50 times its error budget" in capsys.readouterr().out


def test_refusals(capsys: pytest.CaptureFixture[str]) -> None:
    assert openmla(["bench", "nothing"]) == 2
    assert "invalid choice: 'nothing' (choose from" in capsys.readouterr().err
    for arguments in (
        ["bench"],
        ["bench", "rope", "--rounds", "3"],
        ["bench", "rope", "no-such-shape"],
        ["bench", "rope", "--baseline", "nobody"],
        ["bench", "rope", "--json", "no/such/folder/rows.json"],
        ["bench", "step", "--keys", "0"],
        ["doctor", "--nonsense"],
    ):
        assert openmla(arguments) == 2
        told = capsys.readouterr().err
        assert told.startswith(f"openmla: {arguments[0]}") and told.count("\n") == 1
