"""The device an op runs on; its first tensor's, whichever is current."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from openmla.ops import merge_states
from openmla.ops._register import on_its_device


def test_an_op_goes_to_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    current = [0]

    @contextmanager
    def switch(device: torch.device) -> Any:
        before, current[0] = current[0], device.index
        yield
        current[0] = before

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", switch)
    where = on_its_device(lambda _: current[0])
    for index in (0, 1):
        assert where(SimpleNamespace(device=torch.device("cuda", index))) == index
    assert where(torch.zeros(1)) == 0 and current == [0]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_triton_on_the_second_gpu() -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(3, 2, 8), torch.randn(3, 2), torch.randn(3, 2, 8), torch.randn(3, 2)]
    moved = [tensor.to("cuda:1") for tensor in tensors]
    merge_states(*moved, backend="triton")
    merge_states(*tensors, backend="reference")
    torch.testing.assert_close(moved[0].cpu(), tensors[0])
