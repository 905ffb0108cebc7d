"""make_plan(into=): every kind of plan fills its buffers, all of them and only at the end."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from openmla import ConfigError, make_plan
from openmla.plan.captured import _send, fill
from openmla.plan.groups import even_chunks, score_chunks
from openmla.plan.workspace import LOGITS_BYTES
from tests.plan.captured import KINDS, make_step, tensors_of


@pytest.mark.parametrize("kind", KINDS)
def test_buffers_are_what_the_plan_reads(kind: str | int) -> None:
    """All of it and nothing else; V4's layers that select nothing have empty ones for that."""
    batch, config, cache, buffers = make_step(kind, [1, 2], [9, 20])
    plan = make_plan(batch, config, cache, into=buffers)
    read = {tensor.data_ptr() for tensor in tensors_of(plan) if tensor.numel()}
    held = {name: tensor for name, tensor in buffers.items() if name != "ratio" and tensor.numel()}
    assert read == {tensor.data_ptr() for tensor in held.values()} and len(read) == len(held)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_is_refused_last_leaves_the_buffers_alone(kind: str | int) -> None:
    batch, config, cache, buffers = make_step(kind, [1, 2], [9, 20])
    before = {name: tensor.clone() for name, tensor in buffers.items()}
    with pytest.raises(ConfigError, match="plan: backend 'nobody' is not known"):
        make_plan(batch, config, cache, into=buffers, backend="nobody")
    assert all(torch.equal(before[name], buffers[name]) for name in buffers)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_left_of_an_earlier_step(kind: str | int) -> None:
    batch, config, cache, fresh = make_step(kind, [2], [7])
    others, _, _, used = make_step(kind, [2, 2, 2, 2], [23, 8, 12, 16])
    make_plan(others, config, cache, into=used)
    for buffers in (fresh, used):
        make_plan(batch, config, cache, into=buffers)
    assert all(torch.equal(fresh[name], used[name]) for name in fresh)


@pytest.mark.parametrize("on_host", [True, False])
def test_a_fill_pads(on_host: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the device what is there already; the rest on the host, then uploaded at once."""
    uploads: list[Any] = []

    def sent(tree: Any, device: torch.device) -> Any:
        uploads.append(tree)
        return tree

    monkeypatch.setattr("openmla.plan.captured.upload", sent)
    buffers = {
        "block_table": torch.full((3, 4), 7, dtype=torch.int32),
        "query_start_loc": torch.full((4,), 7, dtype=torch.int32),
        "slot_mapping": torch.full((3,), 7),
    }
    values = {
        "block_table": torch.ones((2, 1), dtype=torch.int32),
        "query_start_loc": torch.tensor([0, 2], dtype=torch.int32),
        "slot_mapping": torch.tensor([5, 6]),
    }
    (_send if on_host else fill)(buffers, values)
    assert len(uploads) == on_host
    assert buffers["block_table"].tolist() == [[1, 0, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]]
    assert buffers["query_start_loc"].tolist() == [0, 2, 2, 2]
    assert buffers["slot_mapping"].tolist() == [5, 6, -1]


@pytest.mark.parametrize("num_keys", [0, 1, 1000, LOGITS_BYTES // 40, LOGITS_BYTES])
def test_even_chunks_are_those_of_equal_rows(num_keys: int) -> None:
    for num_rows in (0, 1, 11, 25):
        for held in (0, 7):
            lens = [num_keys] * num_rows
            assert even_chunks(num_rows, num_keys, held) == score_chunks(lens, held)
