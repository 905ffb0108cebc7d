"""One table of model types: whoever asks about a family reads its entry."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import openmla
from openmla.config.families import FAMILIES, MODEL_TYPES, NO_CLASS, REFUSED, SUPPORTED

PACKAGE = Path(openmla.__file__).parent
ROOMS = ("config", "cache", "plan", "attention", "layers", "integrations")
SOURCES = ("families.py", "presets.py", "sources.py")  # the table, models, what wrappers mean
MODULES = sorted(path for room in ROOMS for path in (PACKAGE / room).rglob("*.py"))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_a_family_is_named_in_one_place(path: Path) -> None:
    if path.parent.name == "config" and path.name in SOURCES:
        return
    constants = (n.value for n in ast.walk(ast.parse(path.read_text())) if hasattr(n, "value"))
    named = {value for value in constants if isinstance(value, str) and value in MODEL_TYPES}
    assert not named, f"{path.name} asks for {sorted(named)}: an entry of the table should say it"


def test_every_model_type_is_read_attached_or_refused() -> None:
    assert {*FAMILIES, *REFUSED} == set(MODEL_TYPES) and not set(FAMILIES) & set(REFUSED)
    elsewhere = {name for name, family in FAMILIES.items() if family.unattached == NO_CLASS}
    assert elsewhere == {"gigachat3_5", "pangu_ultra_moe", "sarvam_mla"}
    # the others are known to transformers under the name that they are read as
    refused = {name for name, family in FAMILIES.items() if family.unattached}
    assert list(SUPPORTED) == sorted(set(FAMILIES) - refused - {"dots3_note", "kimi_k2"})
    assert all(family.reads_as in ("", *SUPPORTED) for family in FAMILIES.values())


def test_the_integration_has_the_same_lists() -> None:
    theirs = pytest.importorskip("openmla.integrations.transformers")
    assert theirs.SUPPORTED is SUPPORTED and theirs.REFUSED is REFUSED
