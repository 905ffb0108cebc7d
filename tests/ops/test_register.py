"""What all ops share: the device they run on, their first tensor's, and checks of scalars."""

from __future__ import annotations

import inspect
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import openmla.ops
from openmla.backends import BACKENDS
from openmla.errors import ShapeError
from openmla.ops import cache_write, mha_ragged, mqa_paged, mqa_sparse
from openmla.ops._register import on_its_device
from openmla.testing import Inputs, PagedCase, RaggedCase, SparseCase, SparseInputs


def test_an_op_goes_to_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    current = [0]

    @contextmanager
    def switch(device: torch.device) -> Any:
        before, current[0] = current[0], device.index
        yield
        current[0] = before

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", switch)
    where = on_its_device("op", lambda _: current[0])
    for index in (0, 1):
        assert where(SimpleNamespace(device=torch.device("cuda", index))) == index
    assert where(torch.zeros(1)) == 0 and current == [0]


@pytest.mark.parametrize("scale", [0.0, -0.3, float("nan")])
def test_scales_are_positive(scale: float) -> None:
    """Of every op that attends, before anything is computed."""
    ragged = RaggedCase("", (3,), (9,)).make()
    paged = PagedCase("", (1,), (9,)).make()
    sparse = SparseCase("", (1,), (9,)).make()
    cases: list[tuple[Any, Inputs | SparseInputs]]
    cases = [(mha_ragged, ragged), (mqa_paged, paged), (mqa_sparse, sparse)]
    for op, inputs in cases:
        inputs.scalars["scale"] = scale
        with pytest.raises(ShapeError, match=f"{op.__name__}: scale must be positive, got {scale}"):
            inputs.run(op, backend="reference")


@pytest.mark.parametrize("op", [op for op in BACKENDS if op != "mqa_sparse"])
def test_public_functions_have_the_signature_of_their_op(op: str) -> None:
    """But for Segments, which mqa_sparse takes apart."""
    function = getattr(openmla.ops, op)
    parameters = inspect.signature(function).parameters
    schema = getattr(torch.ops.openmla, op).default._schema
    assert set(parameters) - {"base"} == {argument.name for argument in schema.arguments}
    assert parameters["backend"].default == "auto"
    assert function.__doc__ and function.__module__ == f"openmla.ops.{op}"


def test_an_optional_tensor_is_a_tensor() -> None:
    cache, row = torch.zeros(1, 2, 8), torch.ones(1, 4)
    slots, one = torch.zeros(1, dtype=torch.long), torch.ones(())
    wrong: Any = 2.0
    with pytest.raises(ShapeError, match="cache_write: rope_ratio must be a tensor, got float"):
        cache_write(cache, row, row, slots, one, wrong, format="bf16")
    assert not cache.any()
