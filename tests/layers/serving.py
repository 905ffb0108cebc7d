"""A small serving loop: requests in a pool, steps of any mixture, outputs put back together."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from openmla import (
    Batch,
    BlockPool,
    LayerCache,
    LayerScales,
    MLAAttention,
    Plan,
    allocate_cache,
    make_plan,
)
from openmla.testing import poison


def sequence(length: int, seed: int = 1) -> Tensor:
    """Hidden states of the tiny layers."""
    return torch.randn(length, 64, generator=torch.Generator().manual_seed(seed))


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


def record(step: Callable[[], Tensor], device: str) -> tuple[Callable[[], None], Tensor]:
    """A function that runs the step again, and where its result is then."""
    out = step()
    if device == "cpu":

        def again() -> None:
            out.copy_(step())

        return again, out
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    return graph.replay, out


class Server:
    """Feeds a layer with parts of known sequences and keeps what it answers."""

    def __init__(
        self,
        layer: MLAAttention,
        sequences: Mapping[Any, Tensor],
        *,
        block_size: int = 4,
        format: str = "fp32",
        kv_scale: float | LayerScales = 1.0,
        index_format: str = "index_fp32",
        num_blocks: int = 200,
        device: str = "cpu",
        **options: Any,
    ) -> None:
        self.layer, self.options, self.device = layer.to(device), options, device
        self.sequences = {name: hidden.to(device) for name, hidden in sequences.items()}
        self.pool = BlockPool(num_blocks, block_size)
        self.cache: LayerCache = allocate_cache(
            layer.config,
            num_blocks=num_blocks,
            block_size=block_size,
            format=format,
            kv_scale=kv_scale,
            index_format=index_format,
            device=device,
        )
        for part in (self.cache.latent, self.cache.index):
            if part is not None:
                raw = part.data.view(torch.uint8)
                raw.copy_(poison(raw.shape, torch.uint8, device))
        self.outputs: dict[Hashable, list[Tensor]] = {name: [] for name in sequences}
        self.plans: list[Plan] = []

    def batch(self, wanted: Sequence[tuple[Any, int]]) -> Batch:
        """Takes blocks for the new tokens and describes the step."""
        before = {name: self.pool.seq_len(name) for name, _ in wanted}
        copies = self.pool.take(dict(wanted))
        for part in (self.cache.latent, self.cache.index):
            if part is not None:
                part.copy_blocks(copies)
        spans = [(name, before[name], before[name] + n) for name, n in wanted]
        return Batch(
            query_lens=[n for _, n in wanted],
            seq_lens=[self.pool.seq_len(name) for name, _ in wanted],
            block_table=self.pool.block_table([name for name, _ in wanted], num_columns=3),
            slot_mapping=self.pool.slot_mapping(spans),
        )

    def plan(self, batch: Batch, **options: Any) -> Plan:
        chosen = {"dtype": torch.float32, **self.options, **options}
        return make_plan(batch, self.layer.config, self.cache, **chosen)

    def step(self, wanted: Sequence[tuple[Any, int]], **options: Any) -> Plan:
        """One forward of the layer over the next tokens of each wanted request."""
        starts = {name: self.pool.seq_len(name) for name, _ in wanted}
        plan = self.plan(self.batch(wanted), **options)
        parts = [self.sequences[name][starts[name] : starts[name] + n] for name, n in wanted]
        positions = torch.cat([torch.arange(starts[name], starts[name] + n) for name, n in wanted])
        out = self.layer(torch.cat(parts), positions.to(self.device), self.cache, plan)
        for (name, _), rows in zip(wanted, out.split([n for _, n in wanted]), strict=True):
            self.outputs[name].append(rows)
        self.plans.append(plan)
        return plan

    def output(self, name: Hashable) -> Tensor:
        return torch.cat(self.outputs[name]).cpu()
