"""V4's steps over ranks beside those of one process: what tests over gloo and NCCL share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from openmla import (
    Batch,
    CompressedInputs,
    MLAAttentionV4,
    MLAConfig,
    RawProjections,
    attend_compressed,
)
from openmla.parallel import RankPlan, Ranks, attend_over_ranks, plan_over_ranks, rank_cache
from tests.layers.v4 import RATIOS, Server, sequence

BS = 128  # tokens of a block on each rank
Wanted = Sequence[tuple[str, int]]
STEPS: tuple[Wanted, ...] = (
    (("a", 300), ("b", 2)),  # prompts; one shorter than an entry
    (("a", 1), ("b", 1), ("c", 7)),
    (("c", 290), ("a", 3), ("b", 4)),  # a chunk of a prompt beside drafts
    (("a", 1), ("c", 1), ("b", 1)),
    (("b", 200), ("a", 60)),
    (("a", 2), ("b", 1), ("c", 5)),
)


class Sharded(Server):
    """A server whose cache is this rank's share; its pool is that of one process."""

    def __init__(self, layer: MLAAttentionV4, sequences: Any, **options: Any) -> None:
        self.ranks = Ranks(dist.group.WORLD, **options.pop("ranks", {}))
        super().__init__(layer, sequences, block_size=BS * self.ranks.shard.size, **options)
        geometry = self.cache.geometry
        assert geometry is not None
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
            device=self.device,
        )
        for part in self.cache.parts:
            part.data.view(torch.uint8).fill_(255)  # NaN

    def plan(self, batch: Batch, **options: Any) -> RankPlan:
        chosen = {"dtype": torch.float32, **self.options, **options}
        config = own_config(self.layer.config, self.ranks)
        return plan_over_ranks(batch, config, self.cache, self.ranks, **chosen)


def own_config(config: MLAConfig, ranks: Ranks) -> MLAConfig:
    if ranks.heads == "all":
        return config
    return replace(config, num_heads=config.num_heads // ranks.shard.size)


def inputs_of(
    layer: MLAAttentionV4, hidden: Tensor, positions: Tensor, plan: Any, own: slice
) -> CompressedInputs:
    """What the layer hands to attention, of some of its heads."""
    config, table = layer.config, layer.rope_table.table
    H, D = config.num_heads, config.latent_dim
    q_resid = layer.q_a_norm(layer.q_a_proj(hidden))
    q = layer.q_b_proj(q_resid).view(-1, H, D)[:, own].contiguous()
    rows = layer.kv_proj(hidden)
    norm = layer.kv_norm.weight
    raw = RawProjections(
        q, rows, norm, positions, table, "pairs", config.latent_eps, norm_queries=True
    )
    if layer.compressor is None:
        return CompressedInputs(q, rows, raw, table)
    indexer, index, index_pool_inputs = getattr(layer.compressor, "indexer", None), None, None
    if indexer is not None:
        index_pool_inputs = indexer(hidden)
        if plan.chooses:
            index = indexer.queries(hidden, q_resid, positions, table, plan)
    pool_inputs = layer.compressor(hidden)
    return CompressedInputs(
        q, rows, raw, table, pool_inputs, index, index_pool_inputs, indexer is not None
    )


class Both:
    """One process and this rank over the same steps, before outputs are projected."""

    def __init__(self, layer: MLAAttentionV4, *, length: int = 500, **options: Any) -> None:
        sequences = {name: sequence(length, seed) for seed, name in enumerate("abc")}
        ranks = {"ranks": options.pop("ranks", {}), "context": options.pop("context", "place")}
        size = dist.get_world_size()
        self.layer = layer
        self.alone = Server(layer, sequences, block_size=BS * size, **options)
        self.shared = Sharded(layer, sequences, **options, **ranks)
        H = layer.config.num_heads
        own = H // size if self.shared.ranks.heads == "own" else H
        first = dist.get_rank() * own if own < H else 0
        self.own, self.sink = slice(first, first + own), layer.sinks.float()

    def step(
        self, wanted: Wanted, padding: int = 0, into: dict[str, Tensor] | None = None
    ) -> tuple[Tensor, Tensor, RankPlan]:
        """Their outputs, of this rank's heads."""
        columns = 0 if into is None else into["window_table"].shape[1]
        batches = [
            replace(server.batch(wanted, window_columns=columns), padding=padding)
            for server in (self.alone, self.shared)
        ]
        hidden, positions = torch.zeros(0, 64), torch.zeros(0, dtype=torch.int64)
        if wanted:
            hidden, positions = self.alone.tokens(wanted)
        hidden = torch.cat([hidden, hidden.new_full((padding, hidden.shape[1]), torch.nan)])
        positions = torch.cat([positions, positions.new_zeros(padding)])
        plan = self.alone.plan(batches[0])
        given = inputs_of(self.layer, hidden, positions, plan, slice(None))
        expected = attend_compressed(
            cache=self.alone.cache, plan=plan, sink=self.sink, **vars(given)
        )
        mine = self.shared.plan(batches[1], into=into)
        given = inputs_of(self.layer, hidden, positions, mine, self.own)
        out = attend_over_ranks(given, None, self.shared.cache, mine, sink=self.sink[self.own])
        return out, expected[:, self.own], mine

    def check(self, wanted: Wanted, padding: int = 0) -> RankPlan:
        out, expected, plan = self.step(wanted, padding)
        T = sum(n for _, n in wanted)
        assert not out[T:].any()
        if plan.bring is not None and self.shared.ranks.heads == "all":
            assert torch.equal(out[:T], expected[:T]), "gathered, the bits are those of one process"
        torch.testing.assert_close(out[:T], expected[:T], rtol=1e-4, atol=1e-5)
        assert plan.explain() and repr(plan)
        return plan
