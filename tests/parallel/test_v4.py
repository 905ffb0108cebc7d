"""V4's steps over ranks: the outputs of one process, each rank with the entries of its own blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from openmla import Batch, MLAAttentionV4
from openmla.parallel import RankPlan, Ranks, plan_over_ranks, rank_cache
from tests.layers.v4 import RATIOS, Server, make_layer, sequence, tiny_config
from tests.parallel.processes import Processes

BS = 128  # tokens of a block on each rank


class Sharded(Server):
    """A server whose cache is this rank's share; everything else is as of one process."""

    def __init__(self, layer: MLAAttentionV4, sequences: dict[Any, Any], **options: Any) -> None:
        self.ranks = Ranks(dist.group.WORLD, **options.pop("ranks", {}))
        size = self.ranks.shard.size
        super().__init__(layer, sequences, block_size=BS * size, **options)
        assert self.cache.geometry is not None
        geometry = self.cache.geometry
        self.cache = rank_cache(
            layer.config,
            self.ranks,
            num_blocks=geometry.num_blocks,
            block_size=BS,
            layer=RATIOS.index(layer.ratio),
            format=geometry.format,
            index_format=geometry.index_format,
            max_requests=geometry.num_states,
            max_tokens=320,
            window_block_size=geometry.window_block_size,
            rollback=geometry.rollback,
        )
        for part in self.cache.parts:
            part.data.view(torch.uint8).fill_(255)

    def plan(self, batch: Batch, **options: Any) -> RankPlan:  # type: ignore[override]
        chosen = {"dtype": torch.float32, **self.options, **options}
        return plan_over_ranks(batch, self.layer.config, self.cache, self.ranks, **chosen)


STEPS: tuple[Sequence[tuple[str, int]], ...] = (
    (("a", 300), ("b", 2)),  # prompts; one shorter than an entry
    (("a", 1), ("b", 1), ("c", 7)),
    (("c", 290), ("a", 3), ("b", 4)),  # a chunk of a prompt beside drafts
    (("a", 1), ("c", 1), ("b", 1)),
    (("b", 200), ("a", 60)),
    (("a", 1),),
    (("a", 2), ("b", 1), ("c", 5)),
)


def served(rank: int, ratio: int, topk: int) -> None:
    layer = make_layer(tiny_config(topk=topk), ratio)
    sequences = {name: sequence(500, seed) for seed, name in enumerate("abc")}
    size = dist.get_world_size()
    alone, shared = Server(layer, sequences, block_size=BS * size), Sharded(layer, sequences)
    for wanted in STEPS:
        alone.step(wanted)
        plan = shared.step(wanted)
        assert plan.explain() and repr(plan)
    for name in sequences:
        torch.testing.assert_close(
            shared.outputs[name], alone.outputs[name], rtol=1e-4, atol=1e-5, msg=lambda m: m
        )


@pytest.mark.parametrize("topk", [8, 512])
@pytest.mark.parametrize("ratio", RATIOS)
def test_layers(two_ranks: Processes, ratio: int, topk: int) -> None:
    two_ranks.run(served, ratio, topk)
