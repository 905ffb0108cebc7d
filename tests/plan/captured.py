"""Steps of every kind of layer with buffers for captured graphs, and the tensors a plan reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Any

from torch import Tensor

from openmla import PRESETS, Batch, LayerCache, MLAConfig, allocate_cache, plan_buffers
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
