"""Recorded steps share one pool of memory, and no more than the largest of them needs."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
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
        self.failures = 0  # of the next recordings
        self.capturing = False
        self.litter: Callable[[], Any] = lambda: None  # called as a recording begins

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
        self.capturing = True
        self.litter()
        yield
        self.capturing = False
        if self.failures:
            self.failures -= 1
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
    where = "openmla.integrations.transformers.graphs.keep_workspace"
    monkeypatch.setattr(where, lambda stream: None)
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
    report = attachment_of(model).memory()
    assert (report.graph_bytes, report.num_graphs) == (8 << 20, 3)
    assert "graphs    8.0 MiB, shared by 3 captured decode steps" in str(report)


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
    cuda.failures = 2
    with pytest.raises(UnsupportedError, match="cannot be captured: operation not permitted when"):
        decode(model, rows=2)
    assert captured(model).memory is None
    decode(model, rows=2)
    assert len(set(cuda.pools)) == len(cuda.pools) == 3 and captured(model).recordings == 2


def test_a_capture_that_failed_is_tried_once_more(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    """In another pool, and the model stays captured; nobody asked, so a failure would be a
    warning and the model's own forward from then on."""
    monkeypatch.setattr("openmla.integrations.transformers.install._on_gpu", lambda module: True)
    model = make_model("deepseek_v3")
    attach(model, block_size=4, num_blocks=400)
    decode(model, rows=3)
    cuda.failures = 1
    decode(model, rows=2, steps=3)
    assert not recwarn.list and captured(model).recordable
    assert len(cuda.pools) == 3 and len(set(cuda.pools)) == 2
    assert cuda.replays == 1 + 3 and cuda.alive(cuda.pools[-1]) == 1
    assert gc.isenabled()
    cuda.failures = 2
    with pytest.warns(UserWarning, match="cannot be captured: operation not permitted when"):
        decode(model, rows=1)
    assert not captured(model).recordable and gc.isenabled()


@pytest.mark.parametrize("failures", [0, 1])
def test_the_collector_destroys_no_graph_during_a_capture(cuda: FakeCuda, failures: int) -> None:
    """Graphs of a model that is gone are in a cycle, and the collector runs at any allocation."""
    destroyed: list[bool] = []

    class Old:
        def __init__(self) -> None:
            self.model = self

        def __del__(self) -> None:
            destroyed.append(cuda.capturing)

    model = make_model("deepseek_v3")
    attach(model, block_size=4, num_blocks=400, capture=True)
    cuda.litter, cuda.failures, threshold = Old, failures, gc.get_threshold()
    gc.set_threshold(1)
    try:
        decode(model, rows=2)
    finally:
        gc.set_threshold(*threshold)
    gc.collect()
    assert destroyed == [False] * (1 + failures)
    gc.disable()
    try:
        decode(model, rows=1)
        assert not gc.isenabled()  # as it was found
    finally:
        gc.enable()


def test_graph_memory_holds_steps_of_fewer_rows_and_blocks() -> None:
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
def test_graphs_of_several_sizes_give_the_same_tokens(family: str, device: str) -> None:
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


def with_large_experts() -> Any:
    """12 MiB each, 8 of them; a step copies two for every row, in float32."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    sizes = {"hidden_size": 1024, "intermediate_size": 256, "moe_intermediate_size": 1024}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "v_head_dim": 24}
    ranks = {"q_lora_rank": None, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8}
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    ends = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None, "vocab_size": 97}
    layers = {"num_hidden_layers": 2, "first_k_dense_replace": 1}
    config = DeepseekV3Config(**sizes, **heads, **ranks, **experts, **ends, **layers)
    torch.manual_seed(0)
    return DeepseekV3ForCausalLM(config).eval().requires_grad_(False).to("cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="nothing is recorded elsewhere")
def test_no_more_than_the_largest_needs_on_cuda() -> None:
    """However many were recorded; and all of it is given back with detach()."""
    model = with_large_experts()

    def held() -> int:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    def run(rows: list[int], capture: bool, *, first: bool = False) -> tuple[int, list[Tensor]]:
        """Bytes that stay while it is attached, and the tokens. At first, more stays: cuBLAS keeps
        a workspace of 32 MiB for the stream that records."""
        before = held()
        attach(model, num_blocks=64, capture=capture)
        tokens = []
        for n in rows:
            ids, mask = (part.to("cuda") for part in prompts((20,) * n, seed=n))
            tokens.append(new_tokens(model, ids, mask, n=4))
        taken = held() - before
        report = attachment_of(model).memory()
        assert report.held_bytes <= taken + (4 << 20)
        assert (report.num_graphs > 0) == capture
        detach(model)
        assert first or held() <= before + (4 << 20)
        return taken, tokens

    rows = [1, 2, 16, 8, 4, 2, 1, 15, 16, 3, 5]
    for capture in (False, True):  # what libraries keep from their first call on
        run([16], capture, first=True)
    without, expected = run(rows, False)
    one, _ = run([16], True)
    assert one - without > 300 << 20
    several, tokens = run(rows, True)
    assert several <= one + (8 << 20)
    assert all(torch.equal(a, b) for a, b in zip(tokens, expected, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="nothing is recorded elsewhere")
def test_steps_outlive_the_workspaces_of_cublas_on_cuda() -> None:
    """torch.compile with CUDA graphs releases them all, and others may get their memory."""
    model = with_large_experts()
    attach(model, num_blocks=64, capture=True)
    ids, mask = (part.to("cuda") for part in prompts((20,) * 3, seed=3))
    tokens = new_tokens(model, ids, mask, n=4)
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    others = [torch.full((1 << 20,), 7, device="cuda") for _ in range(16)]
    assert torch.equal(new_tokens(model, ids, mask, n=4), tokens)
    assert captured(model).recordings == 1
    assert all((other == 7).all() for other in others)
    detach(model)


def test_attachments_do_not_share(cuda: FakeCuda) -> None:
    """Each model has a lock of its own, so its graphs have a pool of their own."""
    for _ in range(2):
        model = make_model("deepseek_v3")
        attach(model, block_size=4, num_blocks=64, capture=True)
        decode(model, rows=2)
        assert attachment_of(model).handles
    assert len(set(cuda.pools)) == 2
