"""Tokens of no request and requests of no tokens, through every function of a step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from openmla import (
    Batch,
    MLAConfig,
    Plan,
    Projected,
    Selection,
    absorb,
    allocate_cache,
    attend_latent,
    attend_partial,
    attend_step,
    make_plan,
    make_selection,
)
from openmla.ops import merge_states
from tests.attention.known import DENSE, SPARSE, C, H, R, Requests, V, latent_bits

QUERY_LENS, SEQ_LENS = [3, 0, 1, 0], [40, 9, 50, 0]
PADDING, T = 3, 4
CASES = [
    (DENSE, "absorbed"),
    (DENSE, "expanded"),
    (DENSE, "auto"),
    (SPARSE, "chosen"),
    (SPARSE, "expanded"),
    (SPARSE, "auto"),
]


def padded(tensor: Tensor, value: float = torch.nan) -> Tensor:
    return torch.cat([tensor, tensor.new_full((PADDING, *tensor.shape[1:]), value)])


def with_padding(batch: Batch) -> Batch:
    slots = None
    if batch.causal:
        assert batch.slot_mapping is not None
        slots = torch.cat([batch.slot_mapping, torch.full((PADDING,), -1)])
    return replace(batch, slot_mapping=slots, padding=PADDING)


def select(requests: Requests, cache: Any, plan: Plan) -> Selection | None:
    if requests.config.indexer is None:
        return None
    return make_selection(padded(requests.listed(requests.choices()), -1), cache, plan)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("config", "form"), CASES)
def test_a_step(config: MLAConfig, form: str, compiled: bool, device: str) -> None:
    """Padding is NaN, and so is a caller's buffer before; what comes out is 0, lse -inf."""
    requests = Requests(QUERY_LENS, SEQ_LENS, config, device)
    cache, batch = requests.part(latent_only=form == "chosen")
    options: Any = {"dtype": requests.dtype, "form": form, "compiled": compiled}
    plan = make_plan(with_padding(batch), config, cache, **options)
    selection = select(requests, cache, plan)
    projected = Projected(*map(padded, requests.projected))
    out, lse = requests.truth(requests.choices() if config is SPARSE else None)
    out, lse = padded(out, 0), padded(lse, -torch.inf)
    buffer = requests.q.new_full((T + PADDING, H * V + 1), torch.nan)
    weights, inside = requests.absorbed, buffer[:, 1:].unflatten(1, (H, V))
    attend_step(projected, weights, cache, plan, selection=selection, out=inside)
    assert buffer[:, 0].isnan().all()
    before = latent_bits(cache)
    part = attend_partial(projected, weights, cache, plan, selection=selection, write=False)
    requests.close((inside, *part), (out, out, lse))
    if form in ("absorbed", "chosen"):
        q_latent = padded(requests.q_latent)
        out_latent, latent_lse = attend_latent(q_latent, cache, plan, selection=selection)
        requests.close((requests.out_of_latent(out_latent), latent_lse), (out, lse))
    assert torch.equal(latent_bits(cache), before)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("config", "form"), CASES)
def test_parts(config: MLAConfig, form: str, compiled: bool, device: str) -> None:
    """Context in one cache, the new rows in another, both padded alike."""
    requests, choices = Requests(QUERY_LENS, SEQ_LENS, config, device), None
    cut, parts = [20, 5, 30, 0], []
    projected = Projected(*map(padded, requests.projected))
    for firsts, stops in ((None, cut), (cut, None)):
        cache, batch = requests.part(firsts, stops)
        options: Any = {"dtype": requests.dtype, "compiled": compiled}
        last = stops is None  # whose requests are short, and choose all the same
        options["form"] = "chosen" if config is SPARSE and last else form
        plan = make_plan(with_padding(batch), config, cache, **options)
        selection = None
        if config is SPARSE:
            choices = requests.choices()
            first, stop = firsts or [0] * 4, stops or SEQ_LENS
            numbers = [
                [k - first[b] if first[b] <= k < stop[b] else -1 for k in keys]
                for keys, b in zip(choices, (0, 0, 0, 2), strict=True)
            ]
            selection = make_selection(padded(requests.listed(numbers), -1), cache, plan)
        weights = requests.absorbed
        parts.append(attend_partial(projected, weights, cache, plan, selection=selection))
    (out, lse), other = parts
    merge_states(out, lse, *other)
    true_out, true_lse = requests.truth(choices)
    requests.close((out, lse), (padded(true_out, 0), padded(true_lse, -torch.inf)))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("query_lens", [[], [0], [0, 0]])
@pytest.mark.parametrize(("config", "form"), CASES)
def test_nothing_but_padding(
    config: MLAConfig, form: str, query_lens: list[int], compiled: bool
) -> None:
    cache = allocate_cache(config, num_blocks=4, block_size=4, format="fp32")
    B = len(query_lens)
    table, slots = torch.zeros(B, 1, dtype=torch.int32), torch.full((PADDING,), -1)
    batch = Batch(query_lens, [40] * B, table, slots, padding=PADDING)
    plan = make_plan(batch, config, cache, form=form, compiled=compiled)
    requests = Requests([1], [1], config)
    tokens = (torch.full((PADDING, *each.shape[1:]), torch.nan) for each in requests.projected)
    weights = absorb(requests.weight.float(), config)
    selection = None
    if config.indexer is not None:
        chosen = torch.full((PADDING, config.indexer.topk), -1, dtype=torch.int32)
        selection = make_selection(chosen, cache, plan)
    before, latent = latent_bits(cache), torch.full((PADDING, H, C + R), torch.nan)
    out, lse = attend_partial(Projected(*tokens), weights, cache, plan, selection=selection)
    assert out.shape == (PADDING, H, V) and not out.any() and (lse == -torch.inf).all()
    out, lse = attend_latent(latent, cache, plan, selection=selection)
    assert out.shape == (PADDING, H, C) and not out.any() and (lse == -torch.inf).all()
    assert torch.equal(latent_bits(cache), before)
