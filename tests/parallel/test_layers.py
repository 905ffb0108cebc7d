"""MLAAttention over ranks: a plan of plan_over_ranks in the place of make_plan's, its outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from openmla import PRESETS, Batch, ConfigError, MLAAttention, MLAConfig, allocate_cache
from openmla.parallel import RankPlan, Ranks, plan_over_ranks
from tests.layers.serving import Server, sequence
from tests.parallel.processes import Processes

BS = 4
STEPS: tuple[Sequence[tuple[str, int]], ...] = (
    (("a", 30), ("b", 1)),
    (("a", 1), ("b", 2), ("c", 17)),
    (("b", 20), ("a", 3)),
    (("c", 1), ("b", 1), ("a", 1)),
)


class Sharded(Server):
    """A server whose cache is this rank's share."""

    def __init__(self, layer: MLAAttention, sequences: dict[str, Any], **options: Any) -> None:
        self.ranks = Ranks(dist.group.WORLD, interleave=2)
        super().__init__(layer, sequences, block_size=BS * self.ranks.shard.size, **options)
        self.cache = allocate_cache(
            layer.config, num_blocks=200, block_size=BS, format="fp32", index_format="index_fp32"
        )
        for part in self.cache.parts:
            part.data.fill_(torch.nan)

    def plan(self, batch: Batch, **options: Any) -> RankPlan:
        chosen = {"dtype": torch.float32, **self.options, **options}
        return plan_over_ranks(batch, self.layer.config, self.cache, self.ranks, **chosen)


def config_of(name: str) -> MLAConfig:
    config = replace(PRESETS[name], hidden_size=64, max_positions=256)
    if config.indexer is None:
        return config
    return replace(config, indexer=replace(config.indexer, topk=8))


def served(rank: int, name: str, absorbed_format: str | None) -> None:
    config = config_of(name)
    torch.manual_seed(0)
    layer = MLAAttention(config, absorbed_format=absorbed_format)
    sequences = {name: sequence(60, seed) for seed, name in enumerate("abc")}
    alone = Server(layer, sequences, block_size=BS * dist.get_world_size())
    shared = Sharded(layer, sequences)
    # chosen keys are gathered token by token over ranks; prompts expand by unrounded weights
    forms = ("absorbed",) if config.indexer is not None else ("absorbed", "auto", "expanded")
    for form in forms:
        for wanted in STEPS:
            alone.step(wanted, form=form)
            shared.step(wanted, form=form)
        for server in (alone, shared):
            for request in list(server.pool.requests):
                server.pool.free(request)
    for request in sequences:
        torch.testing.assert_close(
            shared.output(request), alone.output(request), rtol=1e-3, atol=1e-4
        )


@pytest.mark.parametrize("absorbed_format", [None, "fp8"])
@pytest.mark.parametrize("name", ["tiny-v3", "tiny-v3.2"])
def test_layers(two_ranks: Processes, name: str, absorbed_format: str | None) -> None:
    two_ranks.run(served, name, absorbed_format)


def shared_choice(rank: int) -> None:
    """A layer without an indexer of its own takes the choice of the one before."""
    config = config_of("tiny-glm-5.2")
    assert config.indexer is not None and any(config.indexer.shared)
    first, second = (config.indexer.shared.index(shares) for shares in (False, True))
    torch.manual_seed(0)
    layers = [MLAAttention(config, layer=number) for number in (first, second)]
    hidden, outs = sequence(40), []
    for make in (Server, Sharded):
        options: dict[str, Any] = (
            {"block_size": BS * dist.get_world_size()} if make is Server else {}
        )
        servers = [make(layer, {"a": hidden}, **options) for layer in layers]
        batch = servers[0].batch([("a", 40)])
        plan = servers[0].plan(batch, form="absorbed")
        positions = torch.arange(40)
        out, selection = layers[0].attend(hidden, positions, servers[0].cache, plan)
        with pytest.raises(ConfigError, match="selection is missing: this layer has no indexer"):
            layers[1].attend(out, positions, servers[1].cache, plan)
        outs.append(layers[1].attend(out, positions, servers[1].cache, plan, selection)[0])
    torch.testing.assert_close(outs[1], outs[0], rtol=1e-3, atol=1e-4)


def test_layers_that_share_a_choice(two_ranks: Processes) -> None:
    two_ranks.run(shared_choice)
