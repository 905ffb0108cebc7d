"""attend_latent: absorbed queries over the cache, all keys or chosen ones; nothing is written."""

from __future__ import annotations

import pytest
import torch

from openmla import (
    MLAConfig,
    attend_latent,
    make_plan,
    make_selection,
    plan_buffers,
)
from tests.attention.known import DENSE, SPARSE, C, H, P, R, Requests, V, latent_bits
from tests.plan.groups import absorbed_of

MIXED = ([3, 1, 20, 1], [60, 17, 41, 90])


def test_equals_attention_without_a_cache(device: str) -> None:
    requests = Requests(*MIXED, device=device)
    cache, batch = requests.part(written=True)
    before = latent_bits(cache)
    kept = plan_buffers(DENSE, cache, max_requests=4, max_tokens=80, max_blocks=23)
    for options in ({"form": "absorbed"}, {"form": "absorbed", "batch_invariant": True},
                    {"into": kept}):  # fmt: skip
        plan = make_plan(batch, DENSE, cache, dtype=requests.dtype, **options)
        q, T = requests.q_latent, requests.q.shape[0]
        q = torch.cat([q, q.new_full((plan.num_tokens - T, *q.shape[1:]), torch.nan)])
        out, lse = attend_latent(q, cache, plan)
        assert not out[T:].any() and (lse[T:] == -torch.inf).all()
        requests.close((requests.out_of_latent(out[:T]), lse[:T]), requests.truth())
    assert torch.equal(before, latent_bits(cache))


def test_an_engines_config(device: str) -> None:
    """From numbers alone, a scale of its own, a part of the keys."""
    config = MLAConfig.from_numbers(
        num_heads=H, kv_lora_rank=C, qk_nope_head_dim=P, qk_rope_head_dim=R, v_head_dim=V, scale=0.3
    )
    requests = Requests([1, 2], [30, 17], config, device)
    cache, batch = requests.part(written=True)
    plan = make_plan(batch, config, cache, dtype=requests.dtype, form="absorbed")
    assert "cache_write" in plan.explain() and "latent_write" not in plan.explain()
    out, lse = attend_latent(requests.q_latent, cache, plan)
    requests.close((requests.out_of_latent(out), lse), requests.truth())
    cache, batch = requests.part([0, 0], [0, 9])
    plan = make_plan(batch, config, cache, dtype=requests.dtype, form="absorbed")
    out, lse = attend_latent(requests.q_latent, cache, plan)
    assert not out[0].any() and (lse[0] == -torch.inf).all() and lse[1:].isfinite().all()


@pytest.mark.parametrize("form", ["chosen", "absorbed"])
def test_chosen_positions(form: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all requests, or of those with more keys than K beside others that attend to all; in one
    chunk of queries and in several."""
    requests = Requests(*MIXED, SPARSE, device)
    chosen = requests.choices(8)
    if form == "absorbed":  # 17 keys are not chosen from
        chosen[3] = list(range(17))
    cache, batch = requests.part(written=True, latent_only=form == "chosen")
    before = latent_bits(cache)
    for in_chunks in (False, True):
        if in_chunks:
            monkeypatch.setattr("openmla.plan.groups.LATENT_BYTES", 8 * 8 * H * (2 * C + C + R))
        plan = make_plan(batch, SPARSE, cache, dtype=requests.dtype, form=form)
        assert plan.select is not None
        assert (len(absorbed_of(plan, "chosen").cuts) > 1) == in_chunks
        lens = torch.tensor([len(keys) for keys in chosen], dtype=torch.int32).to(device)
        for given in (None, lens):
            positions = requests.listed(chosen)
            if given is not None:  # columns that do not count may hold anything
                positions[positions == -1] = 10**6
            selection = make_selection(positions, cache, plan, lens=given)
            out, lse = attend_latent(requests.q_latent, cache, plan, selection=selection)
            requests.close((requests.out_of_latent(out), lse), requests.truth(chosen))
    assert torch.equal(before, latent_bits(cache))


def test_replayed_choices(device: str) -> None:
    """A captured step's own shape: tokens of no request choose nothing."""
    requests = Requests([3, 1], [60, 17], SPARSE, device)
    cache, batch = requests.part(written=True, latent_only=True)
    kept = plan_buffers(SPARSE, cache, max_requests=3, max_tokens=9, max_blocks=15)
    plan = make_plan(batch, SPARSE, cache, dtype=requests.dtype, form="chosen", into=kept)
    chosen = requests.choices(8)
    positions = torch.full((9, 32), -1, dtype=torch.int32, device=device)
    positions[:4] = requests.listed(chosen)
    selection = make_selection(positions, cache, plan)
    q = torch.cat([requests.q_latent, requests.q_latent.new_zeros(5, H, C + R)])
    out, lse = attend_latent(q, cache, plan, selection=selection)
    requests.close((requests.out_of_latent(out[:4]), lse[:4]), requests.truth(chosen))
    assert not out[4:].any() and (lse[4:] == -torch.inf).all()


def test_no_tokens() -> None:
    requests = Requests([0, 0], [5, 0])
    cache, batch = requests.part(written=True)
    plan = make_plan(batch, DENSE, cache, dtype=torch.float64, form="absorbed")
    out, lse = attend_latent(requests.q_latent, cache, plan)
    assert out.shape == (0, H, C) and lse.shape == (0, H)
