"""mqa_sparse: every backend against float64, the reference against plain loops."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from openmla.ops import mqa_sparse
from openmla.ops.mqa_sparse import cost
from openmla.testing import SparseCase, SparseInputs
from tests.ops.contract import backends, check_attention, slow_interpreted
from tests.ops.mqa_sparse_cases import (
    BASE,
    CASES,
    COMPRESSED,
    LOOPED,
    MANY_HEADS,
    RING,
    SINKS,
    WINDOW,
    assert_equals_loops,
)


@pytest.mark.contract
@pytest.mark.parametrize("backend", backends("mqa_sparse"))
@pytest.mark.parametrize("case", slow_interpreted(CASES, MANY_HEADS), ids=str)
def test_contract(case: SparseCase, backend: str, device: str) -> None:
    check_attention(mqa_sparse, case.make(device), backend)


@pytest.mark.parametrize("case", LOOPED, ids=str)
def test_reference_equals_loops(case: SparseCase) -> None:
    assert_equals_loops(replace(case, H=min(case.H, len(SINKS) if case.sink else 2)).make())


def test_reference_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few tokens at a time; the result does not change."""
    inputs = SparseCase("chunks", (7, 5), (40, 5), RING, COMPRESSED, sink=SINKS).make()
    expected = inputs.run(mqa_sparse, backend="reference")
    width = sum(part.width for part in inputs.segments())
    monkeypatch.setattr("openmla.backends.reference.mqa_sparse.ELEMENTS", 5 * width * 40)
    for actual, whole in zip(inputs.run(mqa_sparse, backend="reference"), expected, strict=True):
        torch.testing.assert_close(actual, whole)


def flat_arguments(inputs: SparseInputs) -> tuple[tuple[Tensor | None, ...], dict[str, Any]]:
    """What the registered op takes, for opcheck."""
    names = [
        name + suffix
        for suffix in ("", "_2")
        for name in ("cache", "kv_scale", "block_table", "rows", "row_lens")
    ]
    names = ["q_latent", "query_start_loc", "positions", *names, "sink", "q_scale"]
    scalars = {**inputs.scalars, "run_length": 0, "backend": "reference"}
    parts = scalars.pop("segments")
    for number, name in enumerate(("formats", "kinds", "spans")):
        scalars[name] = [part[number] for part in parts]
    return tuple(inputs.tensors.get(name) for name in names), scalars


@pytest.mark.parametrize(
    "case", [BASE, SparseCase("two", (1, 3), (33, 7), WINDOW, COMPRESSED, sink=SINKS)], ids=str
)
def test_opcheck_and_fullgraph(case: SparseCase, device: str) -> None:
    inputs = case.make(device)
    op = torch.ops.openmla.mqa_sparse.default
    torch.library.opcheck(op, *flat_arguments(inputs))
    torch.compiler.reset()
    compiled = torch.compile(mqa_sparse, fullgraph=True, backend="aot_eager")
    for other in (case, replace(case, query_lens=(5, 2, 1), seq_lens=(44, 9, 3))):
        inputs = other.make(device)
        expected = inputs.run(mqa_sparse, backend="reference")
        for actual, whole in zip(inputs.run(compiled, backend="reference"), expected, strict=True):
            assert torch.equal(actual, whole)


def test_fullgraph_over_several_spans() -> None:
    """V4's kinds of layers differ in the span; one compiled function serves them all."""
    torch.compiler.reset()
    compiled = torch.compile(mqa_sparse, fullgraph=True, backend="aot_eager")
    for span in (4, 8, 128):
        inputs = SparseCase("span", (1, 1), (33, 70), replace(WINDOW, span=span)).make()
        expected = inputs.run(mqa_sparse, backend="reference")
        for actual, whole in zip(inputs.run(compiled, backend="reference"), expected, strict=True):
            assert torch.equal(actual, whole)


def test_cost() -> None:
    decode = cost(2048, 1, H=16, D=576, C=512, format="fp8_ds_mla", itemsize=2)
    assert decode.bytes == 2048 * (656 + 4) + 16 * (1088 * 2 + 4)
    assert decode.flops == 2 * 2048 * 16 * 1088
    assert cost(0, 3, H=1, D=4, C=2, format="bf16", itemsize=2) == (3 * (12 + 4), 0)
