"""Recorded steps share one pool of memory, and no more than the largest of them needs."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from openmla.errors import UnsupportedError
from openmla.integrations.transformers import attach, attachment_of, detach
from openmla.integrations.transformers.captured import KEPT
from openmla.integrations.transformers.graphs import GraphMemory
from tests.integrations.generation import captured, new_tokens, prompts
from tests.integrations.models import make_model, make_v4, model_of

CPU = torch.device("cpu")


class FakeCuda:
    """torch.cuda's graphs as far as they are called, with the law that a pool which was used must
    have a live graph to be used again."""

    def __init__(self) -> None:
        self.pools: list[Any] = []  # of recordings, in order
        self.graphs: list[weakref.ref[Any]] = []
        self.streams: list[Any] = []
        self.handles = self.replays = 0
        self.failing = False

    def alive(self, pool: Any) -> int:
        graphs = (graph() for graph in self.graphs)
        return sum(graph is not None and graph.pool == pool for graph in graphs)

    def graph_pool_handle(self) -> tuple[int, int]:
        self.handles += 1
        return (0, self.handles)

    @contextlib.contextmanager
    def graph(
        self, graph: Any, *, pool: Any, stream: Any, capture_error_mode: str
    ) -> Iterator[None]:
        assert capture_error_mode == "thread_local"
        assert pool not in self.pools or self.alive(pool), "torch would not take this pool"
        self.pools.append(pool)
        self.streams.append(stream)
        yield
        if self.failing:
            raise RuntimeError("operation not permitted when stream is capturing\nadvice")
        graph.pool = pool
        self.graphs.append(weakref.ref(graph))


class FakeStream:
    def __init__(self, device: Any = None) -> None: ...

    def wait_stream(self, other: Any) -> None: ...


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()

    class FakeGraph:
        pool: Any = None

        def replay(self) -> None:
            fake.replays += 1

    def nothing(*_: Any) -> Any:
        return contextlib.nullcontext()

    def snapshot(pool: Any) -> list[dict[str, Any]]:
        parts = [(pool, 5 << 20), (pool, 3 << 20), ((0, 99), 1 << 30)]
        return [{"segment_pool_id": owner, "total_size": size} for owner, size in parts]

    parts = {
        "graph": fake.graph,
        "graph_pool_handle": fake.graph_pool_handle,
        "CUDAGraph": FakeGraph,
        "Stream": FakeStream,
        "current_stream": FakeStream,
        "stream": nothing,
        "device": nothing,
        "get_allocator_backend": lambda: "native",
        "memory_snapshot": snapshot,
    }
    for name, part in parts.items():
        monkeypatch.setattr(torch.cuda, name, part)
    where = "openmla.integrations.transformers.captured.has_graphs"
    monkeypatch.setattr(where, lambda device: True)
    return fake


def decode(model: Any, rows: int, length: int = 8, steps: int = 1) -> Any:
    """A prompt of so many rows, then steps of one token."""
    ids = torch.arange(2, 2 + rows * length).view(rows, length) % 90 + 2
    past = model(input_ids=ids, use_cache=True).past_key_values
    for step in range(steps):
        positions = torch.full((rows, 1), length + step)
        model(input_ids=ids[:, :1], position_ids=positions, past_key_values=past)
    return past


def test_smaller_steps_share_the_pool_of_a_larger_one(cuda: FakeCuda) -> None:
    model = make_model("deepseek_v3")
    attach(model, block_size=4, num_blocks=400, capture=True)
    decode(model, rows=6, steps=3)
    decode(model, rows=2)
    decode(model, rows=1, length=20)  # longer, but all of it is less
    assert len(set(cuda.pools)) == 1 and len(cuda.pools) == 3 and cuda.alive(cuda.pools[0]) == 3
    assert len(set(map(id, cuda.streams))) == 1  # to which the pool's memory belongs
    decode(model, rows=6)
    decode(model, rows=2)
    assert captured(model).recordings == 3 and cuda.replays == 3 + 2 + 2
    memory = captured(model).memory
    assert memory is not None and memory.num_bytes == 8 << 20


def test_a_larger_step_takes_the_place_of_all(cuda: FakeCuda) -> None:
    """More rows, or longer ones: what was there is let go before, not after."""
    model = make_model("deepseek_v3")
    attach(model, block_size=4, num_blocks=400, capture=True)
    for rows, length in ((1, 8), (2, 8), (3, 8), (3, 40), (3, 8), (2, 8)):
        before = len(cuda.pools)
        decode(model, rows=rows, length=length)
        for pool in set(cuda.pools[before:]) - set(cuda.pools[:before]):
            assert cuda.alive(pool) == sum(graph() is not None for graph in cuda.graphs)
    assert len(set(cuda.pools)) == 4 and len(cuda.pools) == 5  # (3, 8) replays what (3, 40) left


def test_only_the_last_graphs_are_kept(cuda: FakeCuda) -> None:
    model = make_model("deepseek_v3")
    attach(model, block_size=4, num_blocks=400, capture=True)
    for rows in range(KEPT + 2, 0, -1):
        decode(model, rows=rows)
    decode(model, rows=KEPT)  # used again: stays
    decode(model, rows=KEPT + 2)
    assert set(captured(model).recorded) == {1, 2, KEPT, KEPT + 2}
    assert len(set(cuda.pools)) == 1 and cuda.alive(cuda.pools[0]) == KEPT


def test_graphs_go_with_detach_and_with_moved_caches(cuda: FakeCuda) -> None:
    model = make_model("deepseek_v3")
    attach(model, block_size=4, capture=True)
    kept = decode(model, rows=2)
    decode(model, rows=1)
    decode(model, rows=3, length=200)  # the pool grows
    assert cuda.alive(cuda.pools[0]) == 0 and len(set(cuda.pools)) == 2
    decode(model, rows=2)
    assert captured(model).recordings == 4
    detach(model)
    assert kept is not None and not any(graph() is not None for graph in cuda.graphs)


def test_a_pool_that_a_recording_failed_in_is_left(cuda: FakeCuda) -> None:
    model = make_model("deepseek_v3")
    attach(model, block_size=4, num_blocks=400, capture=True)
    cuda.failing = True
    with pytest.raises(UnsupportedError, match="cannot be recorded: operation not permitted when"):
        decode(model, rows=2)
    assert captured(model).memory is None
    cuda.failing = False
    decode(model, rows=2)
    assert len(set(cuda.pools)) == 2 and captured(model).recordings == 2


def test_what_is_smaller() -> None:
    memory = GraphMemory.__new__(GraphMemory)
    memory.device, memory.rows, memory.blocks = CPU, 8, 16
    assert memory.holds(CPU, 8, 16) and memory.holds(CPU, 1, 128)
    assert not memory.holds(CPU, 9, 1) and not memory.holds(CPU, 8, 32)
    assert not memory.holds(CPU, 1, 129) and not memory.holds(torch.device("meta"), 1, 1)


def by_turns(model: Any, device: str) -> list[Tensor]:
    """Generations of several numbers of rows, some more than once and not in order."""
    out = []
    for rows in (3, 1, 3, 4, 1):
        ids, mask = (part.to(device) for part in prompts((9, 4, 7, 2)[:rows], seed=rows))
        out.append(new_tokens(model, ids, mask, n=4))
    return out


@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v32", "deepseek_v4"])
def test_rows_by_turns(family: str, device: str) -> None:
    """Several recorded steps at a time give the tokens of the model alone."""
    model = (make_v4() if family == "deepseek_v4" else model_of(family)).to(device)
    attach(model, capture=False)
    alone = by_turns(model, device)
    detach(model)
    attach(model, capture=True)
    ours = by_turns(model, device)
    assert all(torch.equal(a, b) for a, b in zip(alone, ours, strict=True))
    fresh = 1 if device == "cuda" else 0  # for four rows all the others go
    assert captured(model).recordings == 3 + fresh


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="nothing is recorded elsewhere")
def test_the_pool_is_no_larger_than_the_largest_needs_on_cuda() -> None:
    """And torch gives it back when the graphs are gone."""

    def pool_bytes(rows: list[int]) -> int:
        model = make_model("deepseek_v3").to("cuda")
        attach(model, num_blocks=64, capture=True)
        most = 0
        for n in rows:
            ids, mask = (part.to("cuda") for part in prompts((20,) * n))
            new_tokens(model, ids, mask, n=4)
            memory = captured(model).memory
            assert memory is not None and memory.num_bytes is not None
            most = max(most, memory.num_bytes)
        handle = memory.handle
        detach(model)
        torch.cuda.empty_cache()
        left = [part for part in torch.cuda.memory_snapshot() if part["segment_pool_id"] == handle]
        assert not left
        return most

    alone = pool_bytes([32])
    assert 0 < pool_bytes([1, 2, 32, 16, 8, 4, 2, 1, 31, 32]) <= alone + (4 << 20)


def test_attachments_do_not_share(cuda: FakeCuda) -> None:
    """Each model has a lock of its own, so its graphs have a pool of their own."""
    for _ in range(2):
        model = make_model("deepseek_v3")
        attach(model, block_size=4, num_blocks=64, capture=True)
        decode(model, rows=2)
        assert attachment_of(model).handles
    assert len(set(cuda.pools)) == 2
