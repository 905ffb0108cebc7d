"""attend_step into the caller's buffer, and over rows that the caller has written."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from openmla import (
    attend_partial,
    attend_step,
    make_plan,
    make_selection,
    plan_buffers,
)
from tests.attention.known import DENSE, SPARSE, H, P, R, Requests, V, latent_bits
from tests.plan.groups import masked_chunks, num_chosen

MIXED = ([3, 1, 60, 1], [60, 17, 140, 90])  # the third is expanded where that is cheaper
FORMS = ["auto", "absorbed", "expanded"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("with_sink", [False, True])
def test_out(form: str, with_sink: bool, device: str) -> None:
    """Contiguous, or with tokens apart in a wider buffer, whose other columns stay."""
    requests = Requests(*MIXED, device=device)
    cache, batch = requests.part()
    plan = make_plan(batch, DENSE, cache, dtype=requests.dtype, form=form)
    sink = torch.randn(H, generator=torch.Generator().manual_seed(1)).to(device)
    given: dict[str, Any] = {"sink": sink if with_sink else None}
    usual = (requests.projected, requests.absorbed, cache, plan)
    expected = attend_step(*usual, **given)
    wide = torch.full((65, H * V + 8), 7.0, dtype=requests.dtype, device=device)
    for out in (torch.full_like(expected, 7.0).contiguous(), wide[:, 8:].unflatten(1, (H, V))):
        assert attend_step(*usual, **given, out=out) is out
        assert torch.equal(out, expected)
    assert (wide[:, :8] == 7).all()


def test_out_may_be_where_the_queries_are(device: str) -> None:
    """Everything is read before the first token is written."""
    requests = Requests(*MIXED, device=device)
    cache, batch = requests.part()
    plan = make_plan(batch, DENSE, cache, dtype=requests.dtype)
    expected = attend_step(requests.projected, requests.absorbed, cache, plan)
    assert P + R == V and plan.group("absorbed") is not None
    assert plan.group("expanded") is not None or device != "cpu"
    out = attend_step(requests.projected, requests.absorbed, cache, plan, out=requests.q)
    assert torch.equal(out, expected)


def test_out_of_a_replayed_step(device: str) -> None:
    requests = Requests([1, 1], [30, 17], device=device)
    cache, batch = requests.part()
    kept = plan_buffers(DENSE, cache, max_requests=4, max_tokens=4, max_blocks=8)
    plan = make_plan(batch, DENSE, cache, dtype=requests.dtype, into=kept)
    padded = [torch.cat([t, t.new_full(t.shape, torch.nan)]) for t in requests.projected]
    out = torch.full((4, H, V), torch.nan, dtype=requests.dtype, device=device)
    attend_step(type(requests.projected)(*padded), requests.absorbed, cache, plan, out=out)
    requests.close([out[:2]], requests.truth()[:1])
    assert not out[2:].any()


@pytest.mark.parametrize("form", FORMS)
def test_rows_that_are_there(form: str, device: str) -> None:
    """The same bits as if the step had written them; no byte of the cache changes."""
    requests = Requests(*MIXED, device=device)
    outs = []
    for written in (False, True):
        cache, batch = requests.part(written=written)
        plan = make_plan(batch, DENSE, cache, dtype=requests.dtype, form=form, workspace_tokens=8)
        before, given = latent_bits(cache), (requests.projected, requests.absorbed, cache, plan)
        step = attend_step(*given, write=not written)
        outs.append((step, *attend_partial(*given, write=not written)))
        assert torch.equal(before, latent_bits(cache)) == written
    for one, other in zip(*outs, strict=True):
        assert torch.equal(one, other)
    requests.close(outs[0][1:], requests.truth())


def test_sparse_rows_that_are_there(device: str) -> None:
    requests = Requests([3, 80, 1], [80, 80, 17], SPARSE, device)
    chosen, outs = requests.choices(), []
    for written in (False, True):
        cache, batch = requests.part(written=written)
        plan = make_plan(batch, SPARSE, cache, dtype=requests.dtype)
        assert plan.select is not None and num_chosen(plan)
        assert masked_chunks(plan) or device != "cpu"
        selection, before = make_selection(requests.listed(chosen), cache, plan), latent_bits(cache)
        given = (requests.projected, requests.absorbed, cache, plan)
        outs.append(attend_step(*given, selection=selection, write=not written))
        assert torch.equal(before, latent_bits(cache)) == written
    assert torch.equal(*outs)
    requests.close(outs[:1], requests.truth(chosen)[:1])


@pytest.mark.parametrize("form", FORMS)
def test_a_lossy_cache(form: str) -> None:
    """Expanded requests take their new rows from the projections, absorbed ones from the cache:
    what is there counts for the latter, and for the former not."""
    requests = Requests([3, 60], [30, 140])
    cache, batch = requests.part(written=True)
    plan = make_plan(batch, DENSE, cache, dtype=torch.float64, form=form)
    given = (requests.projected, requests.absorbed, cache, plan)
    before = attend_step(*given, write=False)
    new = batch.slot_mapping
    assert cache.latent is not None and new is not None
    cache.latent.data.flatten(0, 1)[new] *= 1.5
    same = [
        torch.equal(*pair) for pair in zip(before, attend_step(*given, write=False), strict=True)
    ]
    absorbed = {"auto": 3, "absorbed": 63, "expanded": 0}[form]  # the first request's, or all
    assert same == [t >= absorbed for t in range(63)]
