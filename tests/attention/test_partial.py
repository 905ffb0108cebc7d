"""attend_partial: keys in two parts, merged, are the whole; dense, sparse and V4."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from openmla import (
    Batch,
    MLAConfig,
    apply_sink,
    attend_partial,
    attend_step,
    make_plan,
    make_selection,
    ops,
    plan_buffers,
)
from tests.attention.known import DENSE, SPARSE, H, Requests, V, latent_bits
from tests.plan.groups import routes_of

STEPS = {
    "decode": ([1, 1, 1, 1], [30, 17, 9, 1]),
    "several": ([3, 1, 4, 2], [30, 17, 41, 2]),
    "prefill": ([20, 9, 30], [30, 40, 30]),
}


def merged(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    out, lse = (tensor.clone(memory_format=torch.contiguous_format) for tensor in parts[0])
    for part in parts[1:]:
        ops.merge_states(out, lse, *part)
    return out, lse


@pytest.mark.parametrize("form", ["auto", "absorbed", "expanded"])
@pytest.mark.parametrize("step", STEPS)
def test_dense(step: str, form: str, device: str) -> None:
    """Two parts of context and one with the new rows; some hold less than there are new tokens, one
    request nothing. Whole contexts at once and in chunks."""
    requests = Requests(*STEPS[step], device=device)
    contexts = [S - n for n, S in zip(*STEPS[step], strict=True)]
    cuts = [[0] * len(contexts), [min(2, S) for S in contexts], [S // 2 + S % 2 for S in contexts]]
    for rows_at_once in (4, 1000):
        parts = []
        for firsts, stops in ((cuts[0], cuts[1]), (cuts[1], cuts[2]), (cuts[2], None)):
            if stops is not None:  # a part must not begin after it ends
                firsts = [min(pair) for pair in zip(firsts, stops, strict=True)]
            cache, batch = requests.part(firsts, stops)
            plan = make_plan(
                batch, DENSE, cache, dtype=requests.dtype, form=form, workspace_tokens=rows_at_once
            )
            assert plan.explain()
            before = latent_bits(cache)
            parts.append(attend_partial(requests.projected, requests.absorbed, cache, plan))
            assert torch.equal(before, latent_bits(cache)) == (stops is not None)
        requests.close(merged(parts), requests.truth())
        requests.close(merged(parts[::-1]), requests.truth())


@pytest.mark.parametrize("form", ["absorbed", "expanded"])
def test_a_part_without_keys(form: str, device: str) -> None:
    requests = Requests([5, 1], [30, 17], device=device)
    cache, batch = requests.part([3, 3], [3, 3])
    plan = make_plan(batch, DENSE, cache, dtype=requests.dtype, form=form)
    out, lse = attend_partial(requests.projected, requests.absorbed, cache, plan)
    assert out.shape == (6, H, V) and not out.any() and (lse == -torch.inf).all()
    cache, batch = requests.part([0, 3], [2, 3])  # beside one that has some
    plan = make_plan(batch, DENSE, cache, dtype=requests.dtype, form=form)
    out, lse = attend_partial(requests.projected, requests.absorbed, cache, plan)
    assert lse[:5].isfinite().all() and not out[5:].any() and (lse[5:] == -torch.inf).all()


@pytest.mark.parametrize("form", ["auto", "absorbed", "expanded", "chosen"])
def test_a_sparse_part_without_keys(form: str, device: str) -> None:
    """And beside one that has some, of which nothing was chosen."""
    requests = Requests([40, 1], [70, 17], SPARSE, device)
    for stops in ([0, 0], [20, 0]):
        cache, batch = requests.part([0, 0], stops)
        plan = make_plan(batch, SPARSE, cache, dtype=requests.dtype, form=form)
        nothing = torch.full((41, 32), -1, dtype=torch.int32, device=device)
        selection = make_selection(nothing, cache, plan)
        given = (requests.projected, requests.absorbed, cache, plan)
        out, lse = attend_partial(*given, selection=selection)
        assert plan.explain() and not out.any() and (lse == -torch.inf).all()


def test_replayed(device: str) -> None:
    """A part over buffers, as a captured graph has it: the padding sees nothing."""
    requests = Requests([3, 1, 4, 2], [30, 17, 41, 2], device=device)
    halves = [S // 2 for S in (27, 16, 37, 0)]
    parts = []
    for firsts, stops in (([0] * 4, halves), (halves, None)):
        cache, batch = requests.part(firsts, stops)
        kept = plan_buffers(DENSE, cache, max_requests=5, max_tokens=20, max_blocks=12)
        plan = make_plan(batch, DENSE, cache, dtype=requests.dtype, into=kept)
        padded = [torch.cat([t, t.new_full((10, *t.shape[1:]), torch.nan)]) for t in
                  requests.projected]  # fmt: skip
        given = type(requests.projected)(*padded)
        out, lse = attend_partial(given, requests.absorbed, cache, plan)
        assert not out[10:].any() and (lse[10:] == -torch.inf).all()
        parts.append((out[:10], lse[:10]))
    requests.close(merged(parts), requests.truth())


@pytest.mark.parametrize("captured", [False, True])
def test_lengths_that_only_the_device_knows(captured: bool, device: str) -> None:
    """Of a part, too: none, fewer than the tokens, all that the bound allows."""
    requests = Requests([3, 1, 4, 2], [30, 17, 41, 9], device=device)
    stops = [2, 0, 37, 4]
    cache, batch = requests.part([0] * 4, stops)
    bounds = [min(S + 9, 37) for S in stops]
    table = batch.block_table.new_zeros(4, 10)
    table[:, : batch.block_table.shape[1]] = batch.block_table.clamp_min(0)
    lens = torch.tensor(stops, dtype=torch.int32, device=device)
    bounded = Batch([3, 1, 4, 2], bounds, table, device_seq_lens=lens, causal=False)
    into = None
    if captured:
        into = plan_buffers(DENSE, cache, max_requests=4, max_tokens=16, max_blocks=10)
    parts = []
    for one, kept in ((batch, None), (bounded, into)):
        plan = make_plan(one, DENSE, cache, dtype=requests.dtype, into=kept)
        given = [torch.cat([t, t.new_zeros(plan.num_tokens - 10, *t.shape[1:])]) for t in
                 requests.projected]  # fmt: skip
        part = attend_partial(type(requests.projected)(*given), requests.absorbed, cache, plan)
        parts.append([tensor[:10] for tensor in part])
    requests.close(*parts)


@pytest.mark.parametrize("form", ["chosen", "auto", "expanded"])
def test_parts_of_selected_keys_merge_into_the_whole(form: str, device: str) -> None:
    """Each token's choice split between the parts, few of a part's keys; "expanded" masks them."""
    query_lens, seq_lens = [3, 40, 1, 50], [80, 90, 70, 130]
    requests = Requests(query_lens, seq_lens, SPARSE, device)
    chosen = requests.choices()
    cut = 10 if form == "chosen" else 35  # the last part's form goes by its length
    parts, routes = [], set()
    for first, stop in ((0, cut), (cut, None)):
        firsts = [min(first, S - n) for n, S in zip(query_lens, seq_lens, strict=True)]
        stops = None if stop is None else [
            min(stop, S - n) for n, S in zip(query_lens, seq_lens, strict=True)
        ]  # fmt: skip

        def number(b: int, k: int, firsts: list[int] = firsts, stops: Any = stops) -> int:
            here = k >= firsts[b] if stops is None else k < stops[b]
            return k - firsts[b] if here else -1

        cache, batch = requests.part(firsts, stops, latent_only=form == "chosen")
        plan = make_plan(batch, SPARSE, cache, dtype=requests.dtype, form=form)
        assert plan.explain()
        selection = make_selection(requests.listed(chosen, number), cache, plan)
        routes |= {name for name, those in routes_of(plan).items() if those}
        parts.append(
            attend_partial(requests.projected, requests.absorbed, cache, plan, selection=selection)
        )
    wanted = {"chosen": {"chosen"}, "auto": {"chosen", "masked"}, "expanded": {"masked"}}
    assert routes == wanted[form] or (form == "auto" and device != "cpu")
    requests.close(merged(parts), requests.truth(chosen))


def test_sink_is_applied_after_all_parts_are_merged(device: str) -> None:
    requests = Requests([3, 1], [30, 17], device=device)
    sink = torch.randn(H, generator=torch.Generator().manual_seed(3)).to(device)
    cache, batch = requests.part()
    plan = make_plan(batch, DENSE, cache, dtype=requests.dtype)
    whole = attend_step(requests.projected, requests.absorbed, cache, plan, sink=sink)
    parts = []
    for firsts, stops in (([0, 0], [8, 9]), ([8, 9], None)):
        cache, batch = requests.part(firsts, stops)
        plan = make_plan(batch, DENSE, cache, dtype=requests.dtype)
        parts.append(attend_partial(requests.projected, requests.absorbed, cache, plan))
    requests.close([apply_sink(*merged(parts), sink)], [whole])
    empty = apply_sink(torch.zeros(2, H, V), torch.full((2, H), -torch.inf), sink.cpu() - 1e9)
    assert not empty.any()


def test_a_softmax_scale_of_ones_own() -> None:
    requests = Requests([1], [9])
    cache, batch = requests.part()
    scaled: MLAConfig = replace(DENSE, softmax_scale=2 * DENSE.scale)
    plan = make_plan(batch, scaled, cache, dtype=requests.dtype)
    requests.config = scaled
    requests.close(
        attend_partial(requests.projected, requests.absorbed, cache, plan), requests.truth()
    )
