"""Steps over a group of NCCL's on a GPU, eager and recorded with their collectives.

The group has one rank, for several cannot share a GPU: the collectives are launched and captured,
what they carry stays here. What several ranks add up is tested by gloo groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from openmla import (
    PRESETS,
    Batch,
    BlockPool,
    IndexInputs,
    LayerCache,
    MLAConfig,
    Projected,
    absorb,
    allocate_cache,
    attach,
    attend_step,
    detach,
    make_plan,
    select_step,
)
from openmla.parallel import (
    Ranks,
    attend_over_ranks,
    plan_over_ranks,
    rank_buffers,
    select_over_ranks,
)
from tests.layers.v4 import make_layer, real_config, relative_error
from tests.parallel.v4 import STEPS, Both

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="NCCL is of GPUs")
BS, BLOCKS, LENS = 64, 64, ([70, 500, 1], [71, 501, 2], [900, 65, 64])


@pytest.fixture
def nccl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")  # one rank talks to itself
    store = f"file://{tmp_path}/store"
    device = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group("nccl", init_method=store, rank=0, world_size=1, device_id=device)
    yield dist.group.WORLD
    dist.destroy_process_group()


def recorded(step: Callable[[Any], Tensor], plan: Any) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    for _ in range(2):  # kernels are compiled, communicators set up
        step(plan)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL has threads
        out = step(plan)
    return graph, out


def filled_caches(config: MLAConfig, **options: Any) -> list[LayerCache]:
    """Two, of the same random rows."""
    caches = []
    for _ in range(2):
        cache = allocate_cache(
            config, num_blocks=BLOCKS, block_size=BS, format="bf16", device="cuda", **options
        )
        for number, part in enumerate(cache.parts):
            random = torch.Generator("cuda").manual_seed(number)
            rows = torch.randn(part.data.shape, device="cuda", generator=random)
            part.data.copy_(rows.to(part.data.dtype))
        caches.append(cache)
    return caches


def decode_batch(seq_lens: list[int]) -> Batch:
    pool = BlockPool(BLOCKS, BS)
    pool.take(dict(enumerate(seq_lens)))
    slots = pool.slot_mapping([(b, S - 1, S) for b, S in enumerate(seq_lens)])
    B = len(seq_lens)
    return Batch([1] * B, seq_lens, pool.block_table(range(B)), slots)


def random_step(config: MLAConfig, T: int) -> tuple[Projected, Any]:
    H, P, R = config.num_heads, config.qk_nope_head_dim, config.qk_rope_head_dim
    C, V = config.kv_lora_rank, config.v_head_dim
    q = torch.randn(T, H, P + R, device="cuda").bfloat16()
    row = torch.randn(T, C + R, device="cuda").bfloat16()
    weight = torch.randn(H * (P + V), C, device="cuda").bfloat16() * 0.05
    return Projected(q[..., :P], q[..., P:], row[:, :C], row[:, C:]), absorb(weight, config)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", ["all", "own"])
@pytest.mark.parametrize("schedule", ["gather", "exchange"])
def test_a_graph_with_collectives(nccl: Any, heads: str, schedule: str) -> None:
    """Recorded once, replayed for other lengths: the outputs of one process."""
    ranks = Ranks(nccl, heads=heads, schedule=schedule)
    config = MLAConfig.from_numbers(
        num_heads=16, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
    )
    torch.manual_seed(0)
    mine, alone = filled_caches(config)
    projected, absorbed = random_step(config, 3)
    buffers = rank_buffers(config, mine, ranks, max_tokens=3, max_blocks=16)
    graph, out = None, torch.empty(0)
    try:
        for seq_lens in LENS:
            batch = decode_batch(seq_lens)
            expected = attend_step(projected, absorbed, alone, make_plan(batch, config, alone))
            plan = plan_over_ranks(batch, config, mine, ranks, into=buffers)
            if graph is None:
                graph, out = recorded(partial(attend_over_ranks, projected, absorbed, mine), plan)
            out.fill_(torch.nan)
            graph.replay()
            torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)
    finally:
        if graph is not None:
            graph.reset()  # before its communicator goes


@pytest.mark.gpu
@pytest.mark.parametrize("heads", ["all", "own"])
def test_a_graph_that_chooses(nccl: Any, heads: str) -> None:
    """The same of V3.2: candidates are exchanged in the graph, too."""
    ranks, wide = Ranks(nccl, heads=heads), PRESETS["deepseek-v3.2"]
    assert wide.indexer is not None
    config = replace(wide, num_heads=16, indexer=replace(wide.indexer, topk=64))
    assert config.indexer is not None
    HI, DI = config.indexer.num_heads, config.indexer.head_dim
    torch.manual_seed(0)
    mine, alone = filled_caches(config, index_format="index_bf16")
    projected, absorbed = random_step(config, 3)
    index = IndexInputs(
        torch.randn(3, HI, DI, device="cuda").bfloat16(),
        torch.randn(3, HI, device="cuda"),
        torch.randn(3, DI, device="cuda").bfloat16(),
    )

    def step(plan: Any) -> Tensor:
        selection = select_over_ranks(index, mine, plan)
        return attend_over_ranks(projected, absorbed, mine, plan, selection=selection)

    buffers = rank_buffers(config, mine, ranks, max_tokens=3, max_blocks=16)
    graph, out = None, torch.empty(0)
    try:
        for seq_lens in LENS:
            batch = decode_batch(seq_lens)
            plan = make_plan(batch, config, alone, form="absorbed")
            selection = select_step(index, alone, plan)
            expected = attend_step(projected, absorbed, alone, plan, selection=selection)
            own = plan_over_ranks(batch, config, mine, ranks, into=buffers)
            if graph is None:
                graph, out = recorded(step, own)
            out.fill_(torch.nan)
            graph.replay()
            torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)
    finally:
        if graph is not None:
            graph.reset()


@pytest.mark.gpu
@pytest.mark.parametrize("context", ["place", "gather"])
def test_v4_layers(nccl: Any, context: str) -> None:
    """V4's rows as they are: entries attended to here, or gathered from everyone, who is here."""
    for format, index_format in (("fp8_dsv4", "index_fp8"), ("bf16", "index_bf16")):
        formats: dict[str, Any] = {"format": format, "index_format": index_format}
        layer = make_layer(real_config(), 4).to("cuda")
        both = Both(layer, context=context, device="cuda", **formats)
        for wanted in STEPS:
            T = sum(n for _, n in wanted)
            out, expected, plan = both.step(wanted, padding=2)
            assert (plan.bring is not None) == (context == "gather")
            assert not out[T:].any() and relative_error(out[:T], expected[:T]) < 1e-4


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["dense", "sparse", "v4"])
def test_an_attached_model(nccl: Any, kind: str) -> None:
    """The tokens of one process, eager and recorded."""
    pytest.importorskip("transformers")
    from openmla.integrations.transformers import attachment_of
    from tests.integrations.models import MAKERS, VOCAB

    model = MAKERS[kind]().to("cuda")
    ids = torch.randint(1, VOCAB, (3, 290), device="cuda")
    asked: dict[str, Any] = {
        "attention_mask": torch.ones_like(ids), "max_new_tokens": 20, "do_sample": False,
    }  # fmt: skip
    attach(model)
    expected = model.generate(ids, **asked)
    detach(model)
    for capture in (False, True):
        attach(model, group=nccl, capture=capture)
        try:
            assert torch.equal(model.generate(ids, **asked), expected), f"capture={capture}"
            captured = attachment_of(model).captured
            assert (captured is not None) == capture
            if captured is not None:
                graphs = [each.graph for each in captured.recorded.values()]
                assert graphs and all(graph is not None for graph in graphs)
                del graphs
        finally:
            detach(model)  # its graphs go before their communicator
