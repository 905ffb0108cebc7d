"""attend_step: both forms against float64 without a cache, and what must not change the answer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from openmla import (
    PRESETS,
    Batch,
    BlockPool,
    LayerCache,
    PagedCache,
    allocate_cache,
    make_plan,
    plan_buffers,
)
from openmla.attention import Projected, attend_step
from openmla.layers.weights import absorb

CONFIG = PRESETS["tiny-v3"]
H, P, R, V, C = 4, 16, 8, 24, 32
QUERY_LENS, SEQ_LENS = [3, 1, 20, 1], [30, 17, 41, 1]


class Step:
    """A step over requests whose context is in the cache already; everything random."""

    def __init__(self, dtype: torch.dtype = torch.float64, BS: int = 4, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.rows = [torch.randn(S, C + R, generator=generator, dtype=dtype) for S in SEQ_LENS]
        T = sum(QUERY_LENS)
        self.q = torch.randn(T, H, P + R, generator=generator, dtype=dtype)
        self.weight = torch.randn(H * (P + V), C, generator=generator, dtype=dtype) * C**-0.5
        self.pool = BlockPool(num_blocks=60, block_size=BS)
        for b in (2, 0, 3, 1):  # blocks out of order
            self.pool.take({b: SEQ_LENS[b]})
        self.cache = self.fresh_cache()

    def fresh_cache(self) -> LayerCache:
        """fp64 is no cache format; fp32 values are exact in it, so rows are rounded first."""
        cache = allocate_cache(
            CONFIG, num_blocks=60, block_size=self.pool.block_size, format="fp32"
        )
        assert cache.latent is not None
        cache.latent.data.fill_(torch.nan)
        for b, rows in enumerate(self.rows):
            self.rows[b] = rows.float().to(rows.dtype)
            context = SEQ_LENS[b] - QUERY_LENS[b]
            slots = self.pool.slot_mapping([(b, 0, context)])
            cache.latent.data.flatten(0, 1)[slots] = self.rows[b][:context].float()
        return cache

    def batch(self, order: list[int]) -> Batch:
        spans = [(b, SEQ_LENS[b] - QUERY_LENS[b], SEQ_LENS[b]) for b in order]
        return Batch(
            [QUERY_LENS[b] for b in order],
            [SEQ_LENS[b] for b in order],
            self.pool.block_table(order),
            self.pool.slot_mapping(spans),
        )

    def run(self, order: list[int] | None = None, **options: Any) -> Tensor:
        """attend_step's output, back in the order of QUERY_LENS."""
        order = order or [0, 1, 2, 3]
        plan = make_plan(self.batch(order), CONFIG, self.cache, dtype=self.q.dtype, **options)
        queries = self.q.split(QUERY_LENS)
        q = torch.cat([queries[b] for b in order])
        new = torch.cat([self.rows[b][SEQ_LENS[b] - QUERY_LENS[b] :] for b in order])
        padding = plan.num_tokens - q.shape[0]
        q = torch.cat([q, q.new_full((padding, H, P + R), torch.nan)])
        new = torch.cat([new, new.new_full((padding, C + R), torch.nan)])
        projected = Projected(q[..., :P], q[..., P:], new[:, :C], new[:, C:])
        out = attend_step(projected, absorb(self.weight, CONFIG), self.cache, plan)
        self.padding = out[out.shape[0] - padding :]
        parts = out[: out.shape[0] - padding].split([QUERY_LENS[b] for b in order])
        return torch.cat([parts[order.index(b)] for b in range(4)])

    def truth(self) -> Tensor:
        """Expanded keys and values, one query at a time, no cache, no plan."""
        outs = []
        per_head = self.weight.view(H, P + V, C)
        for q, rows, n in zip(self.q.split(QUERY_LENS), self.rows, QUERY_LENS, strict=True):
            kv = torch.einsum("sc,hdc->shd", rows[:, :C], per_head)
            k = torch.cat([kv[..., :P], rows[:, None, C:].expand(-1, H, -1)], dim=-1)
            for i in range(n):
                seen = len(rows) - n + i + 1
                logits = CONFIG.scale * torch.einsum("he,she->hs", q[i], k[:seen])
                outs.append(torch.einsum("hs,shv->hv", logits.softmax(-1), kv[:seen, :, P:]))
        return torch.stack(outs)


@pytest.mark.parametrize("form", ["auto", "absorbed", "expanded"])
@pytest.mark.parametrize("workspace_tokens", [4, 20, 1000])
@pytest.mark.parametrize("BS", [2, 4, 16])
def test_equals_attention_without_a_cache(form: str, workspace_tokens: int, BS: int) -> None:
    step = Step(BS=BS)
    out = step.run(form=form, workspace_tokens=max(workspace_tokens, BS))
    torch.testing.assert_close(out, step.truth(), rtol=1e-12, atol=1e-12)


def test_nothing_but_meaning_matters() -> None:
    """Order of requests, chunk size, splits, form: the same answer to float64's rounding."""
    step = Step()
    expected = step.truth()
    for options in (
        {"order": [3, 1, 0, 2]},
        {"order": [2, 3, 1, 0], "form": "expanded", "workspace_tokens": 8},
        {"form": "expanded", "workspace_tokens": 12},
        {"form": "absorbed", "batch_invariant": True},
        {"order": [1, 2, 3, 0], "form": "auto", "workspace_tokens": 5000},
    ):
        out = step.run(**options)
        torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)


def test_moved_blocks() -> None:
    step = Step()
    before = step.run(form="auto")
    assert step.cache.latent is not None
    data = step.cache.latent.data
    order = torch.randperm(60, generator=torch.Generator().manual_seed(2))
    moved = torch.empty_like(data)
    moved[order] = data
    step.cache = LayerCache(latent=PagedCache(moved, "fp32", step.cache.latent.kv_scale))
    step.pool._blocks = {b: order[blocks].tolist() for b, blocks in step.pool._blocks.items()}
    torch.testing.assert_close(step.run(form="auto"), before, rtol=0, atol=0)


def test_replayed_buffers_leave_padding_alone() -> None:
    """A step smaller than its buffers: padded tokens write nothing and attend to nothing."""
    step = Step()
    kept = plan_buffers(CONFIG, step.cache, max_requests=6, max_tokens=120, max_blocks=20)
    out = step.run(form="absorbed", into=kept)
    torch.testing.assert_close(out, step.truth(), rtol=1e-12, atol=1e-12)
    assert step.padding.shape[0] == 95 and (step.padding == 0).all()
    again = step.run(order=[2, 0, 3, 1], form="absorbed", into=kept)
    torch.testing.assert_close(again, out, rtol=1e-12, atol=1e-12)


def test_new_rows_are_written() -> None:
    step = Step()
    step.run()
    assert step.cache.latent is not None
    flat = step.cache.latent.data.flatten(0, 1)
    for b, rows in enumerate(step.rows):
        slots = step.pool.slot_mapping([(b, 0, SEQ_LENS[b])])
        assert torch.equal(flat[slots], rows.float())
