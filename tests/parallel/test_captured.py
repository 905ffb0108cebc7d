"""Steps over fixed buffers: those of plans made anew; on a GPU, replayed with their collectives."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from openmla import (
    Batch,
    BlockPool,
    ConfigError,
    MLAConfig,
    Projected,
    absorb,
    allocate_cache,
    attend_step,
    make_plan,
)
from openmla.parallel import Ranks, attend_over_ranks, plan_over_ranks, rank_buffers
from tests.parallel.processes import Processes
from tests.parallel.stories import Story

STEPS: tuple[tuple[list[int], list[int]], ...] = (
    ([1, 1, 1], [37, 16, 1]),
    ([2, 1], [9, 41]),
    ([3], [30]),
    ([], []),
)
MOST = 5  # tokens


def replayed(rank: int) -> None:
    """One set of buffers for all steps, larger than any; what fills up gets 0."""
    for heads, schedule in product(("all", "own"), ("gather", "exchange")):
        buffers: dict[str, Tensor] | None = None
        addresses: list[int] = []
        for query_lens, seq_lens in STEPS:
            story = Story(query_lens, seq_lens, padding=MOST - sum(query_lens))
            peer, _ = story.over_ranks(heads=heads, schedule=schedule, form="absorbed")
            story = Story(query_lens, seq_lens, padding=MOST - sum(query_lens))
            config = story.planned(heads, schedule)[0].config
            ranks = Ranks(dist.group.WORLD, heads=heads, schedule=schedule)
            if buffers is None:
                sizes = {"max_tokens": MOST, "max_blocks": 7}
                buffers = rank_buffers(config, story.mine, ranks, **sizes)
                addresses = [tensor.data_ptr() for tensor in buffers.values()]
            out, plan = story.over_ranks(heads=heads, schedule=schedule, into=buffers)
            assert plan.absorbed is not None and plan.num_tokens == MOST
            assert addresses == [tensor.data_ptr() for tensor in buffers.values()]
            torch.testing.assert_close(out, peer, rtol=1e-5, atol=1e-5)
            assert not out[sum(query_lens) :].any()
        with pytest.raises(ConfigError, match="tokens must be at most 5 to replay, got 6"):
            Story([6], [9]).over_ranks(heads=heads, schedule=schedule, into=buffers)
        with pytest.raises(ConfigError, match="form must be auto or absorbed with into="):
            Story([1], [9]).planned(heads, schedule, into=buffers, form="expanded")


def test_fixed_buffers(two_ranks: Processes) -> None:
    two_ranks.run(replayed)


@pytest.fixture
def one_rank(tmp_path: Any) -> Iterator[Ranks]:
    """A group of NCCL's with one rank: several cannot share a GPU."""
    store = f"file://{tmp_path}/store"
    dist.init_process_group("nccl", init_method=store, rank=0, world_size=1)
    yield Ranks(dist.group.WORLD)
    dist.destroy_process_group()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs are of a GPU")
@pytest.mark.parametrize("heads", ["all", "own"])
@pytest.mark.parametrize("schedule", ["gather", "exchange"])
def test_a_graph_with_collectives(one_rank: Ranks, heads: str, schedule: str) -> None:
    """Recorded once, replayed for other lengths: the outputs of one process."""
    ranks = Ranks(one_rank.group, heads=heads, schedule=schedule)
    config, B, BS = (
        MLAConfig.from_numbers(
            num_heads=16,
            kv_lora_rank=512,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
        ),
        3,
        64,
    )
    caches = [
        allocate_cache(config, num_blocks=64, block_size=BS, format="bf16", device="cuda")
        for _ in range(2)
    ]
    torch.manual_seed(0)
    for cache in caches:
        assert cache.latent is not None
        rows = torch.Generator("cuda").manual_seed(1)
        cache.latent.data.copy_(torch.randn(cache.latent.data.shape, device="cuda", generator=rows))
    absorbed = absorb(torch.randn(16 * 256, 512, device="cuda").bfloat16() * 0.05, config)
    q = torch.randn(B, 16, 192, device="cuda").bfloat16()
    row = torch.randn(B, 576, device="cuda").bfloat16()
    projected = Projected(q[..., :128], q[..., 128:], row[:, :512], row[:, 512:])
    buffers = rank_buffers(config, caches[0], ranks, max_tokens=B, max_blocks=16)
    graph: torch.cuda.CUDAGraph | None = None
    out = torch.empty(0)
    for seq_lens in ([70, 500, 1], [71, 501, 2], [900, 65, 64]):
        pool = BlockPool(64, BS)
        pool.take(dict(enumerate(seq_lens)))
        slots = pool.slot_mapping([(b, S - 1, S) for b, S in enumerate(seq_lens)])
        batch = Batch([1] * B, seq_lens, pool.block_table(range(B)), slots)
        alone = attend_step(projected, absorbed, caches[1], make_plan(batch, config, caches[1]))
        plan = plan_over_ranks(batch, config, caches[0], ranks, into=buffers)
        if graph is None:
            for _ in range(2):  # kernels are compiled, communicators set up
                attend_over_ranks(projected, absorbed, caches[0], plan)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL has threads
                out = attend_over_ranks(projected, absorbed, caches[0], plan)
        out.fill_(torch.nan)
        graph.replay()
        torch.testing.assert_close(out, alone, rtol=2e-2, atol=2e-2)
