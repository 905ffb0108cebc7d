"""The set-up: stamped, idempotent, plain about what is missing; its requirements resolve."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools import setup_env

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def playground(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The tool pointed at an empty folder, its commands recorded; venv creation is real."""
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "setup_env.py").write_bytes((ROOT / "tools/setup_env.py").read_bytes())
    venv = tmp_path / ".venv"
    monkeypatch.setattr(setup_env, "ROOT", tmp_path)
    monkeypatch.setattr(setup_env, "VENV", venv)
    monkeypatch.setattr(setup_env, "VENV_PYTHON", venv / "bin" / "python")
    monkeypatch.setattr(setup_env, "STAMP", venv / "openmla-setup")
    monkeypatch.setattr(setup_env, "announce_torch", lambda: None)
    commands: list[list[str]] = []

    def run(command: list[str], what: str) -> None:
        commands.append(command)
        if "pip" not in command:
            subprocess.run(command, check=True)

    monkeypatch.setattr(setup_env, "run", run)
    return commands


def test_second_run_does_nothing(playground: list[list[str]]) -> None:
    setup_env.main()
    assert len(playground) == 2 and "--without-pip" in playground[0] and "install" in playground[1]
    setup_env.main()
    assert len(playground) == 2


def test_changed_requirements_install_again(playground: list[list[str]]) -> None:
    setup_env.main()
    (setup_env.ROOT / "constraints.txt").write_text("torch==2.13.0\n# other\n")
    setup_env.main()
    assert len(playground) == 3 and "install" in playground[2]


def test_half_made_environment_is_rebuilt(
    playground: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    (setup_env.VENV / "bin").mkdir(parents=True)
    leftover = setup_env.VENV / "leftover"
    leftover.touch()
    setup_env.main()
    assert not leftover.exists() and len(playground) == 2
    assert "half-made .venv" in capsys.readouterr().out
    setup_env.VENV_PYTHON.unlink()
    setup_env.main()
    assert len(playground) == 4


def test_missing_pip_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(SystemExit):
        setup_env.require_pip()
    assert "pip is missing" in capsys.readouterr().out


def test_requirements_resolve_without_local_wheels(tmp_path: Path) -> None:
    """As a new machine would see them: no local wheels, so torch may be the GPU build."""
    environment = {**os.environ, "PIP_FIND_LINKS": str(tmp_path)}  # empty would mean "as set"
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed"]
    command += ["--quiet", "--report", "-", "-c", "constraints.txt", ".[triton,hf,dev]"]
    resolved = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if "Connection" in resolved.stderr or "Temporary failure" in resolved.stderr:
        pytest.skip(f"no package index in reach: {resolved.stderr.strip().splitlines()[-1]}")
    assert resolved.returncode == 0, resolved.stderr
    versions = {
        item["metadata"]["name"].lower(): item["metadata"]["version"]
        for item in json.loads(resolved.stdout)["install"]
    }
    assert versions["torch"].split("+")[0] == "2.13.0"
    assert versions["transformers"] == "5.17.0"
    assert versions["triton"].startswith(("3.6.", "3.7."))
