"""make_plan(into=): every kind of plan fills its buffers, all of them and only at the end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from openmla import (
    PRESETS,
    Batch,
    ConfigError,
    LayerCache,
    MLAConfig,
    allocate_cache,
    make_plan,
    plan_buffers,
)
from openmla.plan.captured import fill
from openmla.plan.sparse import even_chunks, score_chunks
from openmla.plan.workspace import LOGITS_BYTES
from tests.plan import dense, v4

KINDS = ("tiny-v3", "tiny-v3.2", "tiny-minicpm3", 0, 4, 128)  # presets, V4's compress ratios
Step = tuple[Batch, MLAConfig, LayerCache, dict[str, Tensor]]


def make_step(kind: str | int, query_lens: list[int], seq_lens: list[int]) -> Step:
    """A step and buffers for four requests of two tokens."""
    sizes: Any = {"max_requests": 4, "max_tokens": 8, "max_blocks": 6}
    if isinstance(kind, int):
        config, cache = v4.CONFIG, v4.make_cache(kind)
        buffers = plan_buffers(config, cache, **sizes)
        columns = buffers["window_table"].shape[1]
        batch = v4.make_batch(cache, query_lens, seq_lens, window_columns=columns)
    else:
        config, batch = PRESETS[kind], dense.make_batch(query_lens, seq_lens)
        cache = allocate_cache(config, num_blocks=64, block_size=4, format="fp32")
        buffers = plan_buffers(config, cache, **sizes)
    return batch, config, cache, buffers


def tensors_of(node: object) -> Iterator[Tensor]:
    """Every tensor of a plan or of a part of it."""
    if isinstance(node, Tensor):
        yield node
    elif isinstance(node, tuple):
        for part in node:
            yield from tensors_of(part)
    elif is_dataclass(node):
        yield from tensors_of(tuple(vars(node).values()))


@pytest.mark.parametrize("kind", KINDS)
def test_buffers_are_what_the_plan_reads(kind: str | int) -> None:
    """All of it and nothing else."""
    batch, config, cache, buffers = make_step(kind, [1, 2], [9, 20])
    plan = make_plan(batch, config, cache, into=buffers)
    read = {tensor.data_ptr() for tensor in tensors_of(plan)}
    assert read == {tensor.data_ptr() for name, tensor in buffers.items() if name != "ratio"}


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


def test_a_fill_uploads_once(monkeypatch: pytest.MonkeyPatch) -> None:
    uploads: list[Any] = []

    def counted(tree: Any, device: torch.device) -> Any:
        uploads.append(tree)
        return tree

    monkeypatch.setattr("openmla.plan.captured.upload", counted)
    buffers = {"block_table": torch.zeros(3, 4), "query_start_loc": torch.zeros(4)}
    values = {"block_table": torch.ones(2, 1), "query_start_loc": torch.tensor([0.0, 2.0])}
    fill(buffers, values)
    assert len(uploads) == 1 and buffers["query_start_loc"].tolist() == [0, 2, 2, 2]
    assert buffers["block_table"].tolist() == [[1, 0, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]]


@pytest.mark.parametrize("num_keys", [0, 1, 1000, LOGITS_BYTES // 40, LOGITS_BYTES])
def test_even_chunks_are_those_of_equal_rows(num_keys: int) -> None:
    for num_rows in (0, 1, 11, 25):
        for held in (0, 7):
            lens = [num_keys] * num_rows
            assert even_chunks(num_rows, num_keys, held) == score_chunks(lens, held)
