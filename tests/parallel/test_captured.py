"""Steps over fixed buffers: those of plans made anew. test_nccl.py replays them on a GPU."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from openmla import ConfigError
from openmla.parallel import Ranks, rank_buffers
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
            assert plan.group("absorbed") is not None and plan.num_tokens == MOST
            assert addresses == [tensor.data_ptr() for tensor in buffers.values()]
            torch.testing.assert_close(out, peer, rtol=1e-5, atol=1e-5)
            assert not out[sum(query_lens) :].any()
        with pytest.raises(ConfigError, match=r"tokens must be at most 5 .* got 6"):
            Story([6], [9]).over_ranks(heads=heads, schedule=schedule, into=buffers)
        with pytest.raises(ConfigError, match="form must be auto or absorbed with into="):
            Story([1], [9]).planned(heads, schedule, into=buffers, form="expanded")


def test_fixed_buffers(two_ranks: Processes) -> None:
    two_ranks.run(replayed)
