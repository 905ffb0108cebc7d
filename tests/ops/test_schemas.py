"""Schemas of all ops: what torch.compile takes from them without running anything."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import openmla.ops  # noqa: F401 - registers them
from openmla.backends import BACKENDS

FOLLOWING = {
    "max_query_len",
    "max_key_len",
    "num_keys",
    "num_words",
    "spans",
    "first_row",
}  # a step's lengths
WRITTEN = {
    "cache_gather": {"out"},
    "cache_write": {"cache", "clamped"},
    "compress_kv": {"cache", "state", "clamped"},
    "index_write": {"cache"},
    "latent_write": {"cache", "q", "kv", "clamped"},
    "merge_quantize": {"values", "scales"},
    "merge_states": {"out", "lse"},
    "quantize_heads": {"values", "row_scale"},
    "quantize_out": {"values", "scales"},
    "project_heads": {"out"},
    "project_quantize": {"scales", "values"},
    "rope": {"x"},
}  # or the compiler would move reads before them, or leave them out


def schema_of(op: str) -> Any:
    return getattr(torch.ops.openmla, op).default._schema


def test_integers_that_follow_lengths_are_symbols() -> None:
    """An `int` would be compiled in, and compiled again for the next step."""
    found = set()
    for op in BACKENDS:
        kinds = {name: kind for kind, name in re.findall(r"(\S+) (\w+)[,)]", str(schema_of(op)))}
        for name in FOLLOWING & kinds.keys():
            assert kinds[name] in ("SymInt", "SymInt[]"), (op, name)
            found.add(name)
    assert found == FOLLOWING


@pytest.mark.parametrize("op", BACKENDS)
def test_what_is_written_is_declared(op: str) -> None:
    """That it is true, check_declaration() shows, in the op's own tests."""
    schema = schema_of(op)
    written = {
        part.name for part in schema.arguments if part.alias_info and part.alias_info.is_write
    }
    assert written == WRITTEN.get(op, set())
    assert bool(schema.returns) != bool(written)
    tests = Path(__file__).with_name(f"test_{op}.py").read_text()
    assert "check_declaration(" in tests or op == "mqa_sparse"
