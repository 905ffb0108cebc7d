"""make_selection: another indexer's choice means what select_step's does, and is checked."""

from __future__ import annotations

import pytest
import torch

from openmla import (
    ConfigError,
    IndexInputs,
    LayerCache,
    attend_step,
    make_plan,
    make_selection,
    select_step,
)
from tests.attention.known import SPARSE, Requests
from tests.plan.groups import masked_chunks, num_chosen

MIXED = ([3, 80, 1, 80, 4], [80, 80, 17, 90, 4])  # all but two choose


def test_the_same_step_as_with_our_indexer(device: str) -> None:
    """Chosen and masked rows, and requests too short to choose."""
    requests = Requests(*MIXED, SPARSE, device)
    random = torch.Generator().manual_seed(5)
    cache, batch = requests.part()
    assert SPARSE.indexer is not None and cache.index is not None
    HI, DI, T = SPARSE.indexer.num_heads, SPARSE.indexer.head_dim, requests.q.shape[0]
    cache.index.data.copy_(torch.randn(cache.index.data.shape, generator=random))
    plan = make_plan(batch, SPARSE, cache, dtype=requests.dtype)
    assert plan.select is not None and num_chosen(plan)
    assert masked_chunks(plan) or device != "cpu"
    q_idx, w_idx, k_idx = (
        torch.randn(*shape, generator=random).to(device, requests.dtype)
        for shape in ((T, HI, DI), (T, HI), (T, DI))
    )
    ours = select_step(IndexInputs(q_idx, w_idx, k_idx), cache, plan)
    assert ours is not None
    positions = torch.full((T, 32), -1, dtype=torch.int32, device=device)
    positions[plan.select.rows] = ours.positions
    theirs = make_selection(positions, cache, plan)
    given = (requests.projected, requests.absorbed, cache, plan)
    out = attend_step(*given, selection=ours)
    assert torch.equal(out, attend_step(*given, selection=theirs))
    lens = torch.full((T,), 7, dtype=torch.int32, device=device)  # of columns in any order
    fewer = attend_step(*given, selection=make_selection(positions, cache, plan, lens=lens))
    chosen = [list(range(S - n + i + 1)) for n, S in zip(*MIXED, strict=True) for i in range(n)]
    for t in torch.arange(T, device=device)[plan.select.rows].tolist():
        chosen[t] = [k for k in positions[t, :7].tolist() if k >= 0]
    requests.close([fewer], requests.truth(chosen)[:1])


def test_nothing_to_choose() -> None:
    requests = Requests([3, 1], [30, 17], SPARSE)
    cache, batch = requests.part()
    plan = make_plan(batch, SPARSE, cache)
    assert make_selection(requests.listed(requests.choices()), cache, plan) is None


def test_a_plan_without_scores_scores_nothing() -> None:
    requests = Requests([3, 1], [60, 17], SPARSE)
    whole, batch = requests.part()
    plan = make_plan(batch, SPARSE, LayerCache(latent=whole.latent), form="chosen")
    assert "scores    none: the caller selects" in plan.explain()
    with pytest.raises(ConfigError, match=r"^plan: cache must have index rows for deepseek_v32"):
        make_plan(batch, SPARSE, LayerCache(latent=whole.latent))
