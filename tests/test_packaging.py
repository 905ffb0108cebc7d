"""Source distribution and wheel hold what `make demo` needs, and the licences of all of it."""

from __future__ import annotations

import re
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
LICENCES = ("LICENSE", "openmla/demo/LICENSE-PYTHON.txt")
DEMO = ("config.json", "generation_config.json", "heldout.txt", "model.safetensors")
NEEDED = (
    "Makefile",
    "constraints.txt",
    "pyproject.toml",
    "tools/setup_env.py",
    *LICENCES,
    *(f"openmla/demo/{name}" for name in DEMO),
)
ALWAYS = ("LICENSE", "pyproject.toml")  # hatchling takes these by itself


@pytest.fixture(scope="module")
def settings() -> Any:
    tomllib = pytest.importorskip("tomllib")  # since Python 3.11
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_what_is_included_is_there_and_enough(settings: Any) -> None:
    included = settings["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    assert all((ROOT / entry.removeprefix("/")).exists() for entry in included)
    links = re.findall(r"\]\(([^)#]+)\)", (ROOT / "README.md").read_text())
    for name in {*NEEDED, *links} - set(ALWAYS):
        assert (ROOT / name).is_file()
        covered = [entry for entry in included if f"/{name}/".startswith(f"{entry}/")]
        assert covered, f"the source distribution lacks {name}"


def test_licences_are_named(settings: Any) -> None:
    project = settings["project"]
    assert project["license"] == "Apache-2.0 AND PSF-2.0"
    assert tuple(project["license-files"]) == LICENCES
    text = (ROOT / LICENCES[1]).read_text()
    assert "PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2" in text
    assert not any(
        "License ::" in each for each in project["classifiers"]
    )  # the expression says it


def test_built_files_hold_it_all(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    from hatchling.builders.sdist import SdistBuilder
    from hatchling.builders.wheel import WheelBuilder

    (source,) = SdistBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    with tarfile.open(source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert set(NEEDED) <= names
    (wheel,) = WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name for name in NEEDED if name.startswith("openmla/")} <= names
    assert "openmla_command.py" in names  # what the command runs
    kept = {name.partition(".dist-info/licenses/")[2] for name in names}
    assert set(LICENCES) <= kept
