"""What is the same for all layers of a step is in the plan: no layer works it out again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from openmla import (
    PRESETS,
    Batch,
    BlockPool,
    LayerCache,
    Plan,
    allocate_cache,
    make_plan,
    plan_buffers,
)
from openmla.attention import IndexInputs, Projected, attend_step, select_step
from openmla.layers.weights import absorb
from openmla.plan import groups as planned
from openmla.plan.types import latent_row
from tests.plan.groups import absorbed_of, masked_chunks

CONFIG = PRESETS["tiny-v3.2"]
DERIVING = {"arange", "clamp", "sub", "zeros_like", "_to_copy"}


class Integers(TorchDispatchMode):
    """The names of what makes integers from integers, outside of ops."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.dtype in (torch.int32, torch.int64):
            self.names.add(func.__name__.split(".")[0])
        return out


def run(plan: Plan, cache: LayerCache) -> tuple[Tensor, set[str]]:
    """A layer's output, and what it did with integers."""
    config, T, indexer = plan.config, plan.num_tokens, plan.config.indexer
    assert indexer is not None
    random = torch.Generator().manual_seed(0)

    def make(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random)

    H, P, R = config.num_heads, config.qk_nope_head_dim, config.qk_rope_head_dim
    C, V, HI, DI = config.kv_lora_rank, config.v_head_dim, indexer.num_heads, indexer.head_dim
    projected = Projected(make(T, H, P), make(T, H, R), make(T, C), make(T, R))
    index = IndexInputs(make(T, HI, DI), make(T, HI), make(T, DI))
    absorbed = absorb(make(H * (P + V), C), config)
    with Integers() as integers:
        selection = select_step(index, cache, plan)
        out = attend_step(projected, absorbed, cache, plan, selection=selection)
    return out, integers.names


@pytest.mark.parametrize("captured", [False, True])
def test_sparse_layers(captured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chosen and masked rows, some that see no more than K; at once or in chunks."""
    cache = allocate_cache(CONFIG, num_blocks=64, block_size=4, format="fp32")
    pool = BlockPool(64, 4)
    new, lens = ([5, 1], [70, 60]) if captured else ([5, 1, 80], [70, 60, 80])
    requests = range(len(lens))
    pool.take(dict(zip(requests, lens, strict=True)))
    slots = pool.slot_mapping([(b, lens[b] - new[b], lens[b]) for b in requests])
    batch = Batch(new, lens, pool.block_table(requests), slots)
    outs = []
    for in_chunks in (False, True):
        if in_chunks:
            monkeypatch.setattr(planned, "LOGITS_BYTES", 4 * 4 * 80)
            monkeypatch.setattr(planned, "LATENT_BYTES", 3 * 4 * latent_row(CONFIG))
        buffers = plan_buffers(CONFIG, cache, max_requests=3, max_tokens=15, max_blocks=20)
        into = buffers if captured else None
        plan = make_plan(batch, CONFIG, cache, dtype=torch.float32, into=into)
        assert plan.select is not None and (captured or masked_chunks(plan) or not in_chunks)
        cuts = absorbed_of(plan, "chosen").cuts
        assert (len(plan.select.chunks) > 1) == (len(cuts) > 1) == in_chunks
        out, names = run(plan, cache)
        assert not names & DERIVING, names
        outs.append(out[: sum(new)])
    torch.testing.assert_close(outs[0], outs[1])
