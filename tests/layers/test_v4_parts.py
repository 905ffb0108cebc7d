"""V4's step in parts: window and entries merged, the sink last, another indexer's entries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from openmla import (
    AbsorbedWeights,
    CompressedInputs,
    LayerCache,
    OpenMLAError,
    Plan,
    Projected,
    Selection,
    apply_sink,
    attend_compressed,
    attend_latent,
    attend_partial,
    make_selection,
    ops,
)
from openmla.layers import mla_v4
from tests.layers.engine import assert_true, describe, make_setting, plan_of, tokens_of
from tests.layers.v4 import CLOSE, LENGTH, RATIOS, TOPK, Server, known, relative_error

Attend = Callable[[CompressedInputs, LayerCache, Plan, Tensor], Tensor]
LENS = [150, 1, 3, 1, 40, 1]  # a prompt, single tokens, several


def served(monkeypatch: pytest.MonkeyPatch, ratio: int, attend: Attend, device: str) -> None:
    """The layer's outputs, its attention done by `attend`, are the equations'."""
    layer, hidden, dense = known(32, ratio)

    def attend_compressed(
        q: Tensor, rows: Tensor, cache: LayerCache, plan: Plan, *, sink: Tensor, **rest: Any
    ) -> Tensor:
        return attend(CompressedInputs(q, rows, **rest), cache, plan, sink)

    monkeypatch.setattr(mla_v4, "attend_compressed", attend_compressed)
    server = Server(layer, {"r": hidden, "s": hidden}, device=device)
    for n in LENS:
        server.step([("r", n), ("s", n)])
    for name in ("r", "s"):
        length = len(server.outputs[name])
        assert length == sum(LENS) < LENGTH
        assert relative_error(server.outputs[name], dense.out[:length]) < CLOSE
    layer.to("cpu")  # which tests share


def in_parts(inputs: CompressedInputs, cache: LayerCache, plan: Plan) -> tuple[Tensor, Tensor]:
    """Both parts, merged."""
    out, lse = attend_partial(inputs, None, cache, plan, keys="window")
    finished = replace(inputs, raw=None)  # q was normalised and rotated in place
    entries = attend_partial(finished, None, cache, plan, keys="entries", write=False)
    assert lse.dtype == entries[1].dtype == torch.float32
    if not plan.ratio:
        assert not entries[0].any() and (entries[1] == -torch.inf).all()
    ops.merge_states(out, lse, *entries)
    return out, lse


@pytest.mark.parametrize("ratio", RATIOS)
def test_window_and_entries(ratio: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(inputs: CompressedInputs, cache: LayerCache, plan: Plan, sink: Tensor) -> Tensor:
        out, lse = in_parts(inputs, cache, plan)
        whole = attend_partial(replace(inputs, raw=None), None, cache, plan, write=False)
        torch.testing.assert_close((out, lse), whole, rtol=1e-4, atol=1e-5)
        return apply_sink(out, lse, sink)

    served(monkeypatch, ratio, attend, device)


@pytest.mark.parametrize("ratio", RATIOS)
def test_latent_queries(ratio: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And entries that another indexer chose: here, the equations themselves."""
    chosen = known(32, ratio)[2].chosen

    def attend(inputs: CompressedInputs, cache: LayerCache, plan: Plan, sink: Tensor) -> Tensor:
        step = plan.shared
        assert step is not None
        whole = attend_partial(inputs, None, cache, plan)  # which writes
        positions = torch.full((plan.num_tokens, TOPK), -1, dtype=torch.int32)
        lens = torch.zeros(plan.num_tokens, dtype=torch.int32)
        for t, p in enumerate(step.positions.tolist()):
            if plan.select is not None:
                lens[t] = len(chosen[p])
                positions[t, : len(chosen[p])] = torch.tensor(sorted(chosen[p]))
        given = positions.to(device), cache, plan
        selection = make_selection(*given, lens=lens.to(device))
        assert (selection is None) == (plan.select is None)
        part = attend_latent(inputs.q, cache, plan, selection=selection)
        torch.testing.assert_close(part, whole, rtol=1e-4, atol=1e-5)
        finished = CompressedInputs(inputs.q)
        selection = make_selection(*given)
        part = attend_partial(finished, None, cache, plan, selection=selection, write=False)
        torch.testing.assert_close(part, whole, rtol=1e-4, atol=1e-5)
        return apply_sink(*part, sink)

    served(monkeypatch, ratio, attend, device)


@pytest.mark.parametrize("ratio", RATIOS)
def test_out(ratio: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Into a buffer whose tokens are apart."""

    def attend(inputs: CompressedInputs, cache: LayerCache, plan: Plan, sink: Tensor) -> Tensor:
        T, H, D = inputs.q.shape
        assert inputs.rows is not None
        wide = torch.full((T, H * D + 4), 7.0, device=device)
        for wrong in (wide, wide[:, 4:].unflatten(1, (H, D)).double()):
            with pytest.raises(OpenMLAError, match=r"^step: out must be "):
                attend_compressed(
                    inputs.q, inputs.rows, cache, plan, sink=sink, **rest(inputs), out=wrong
                )
        out = wide[:, 4:].unflatten(1, (H, D))
        given = attend_compressed(
            inputs.q, inputs.rows, cache, plan, sink=sink, **rest(inputs), out=out
        )
        assert given is out and (wide[:, :4] == 7).all()
        return out

    served(monkeypatch, ratio, attend, device)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("ratio", RATIOS)
def test_padding(ratio: int, compiled: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every part 0 and lse -inf, although its queries and rows are NaN."""
    setting, padding = make_setting(ratio, device), 3

    def attend(q: Tensor, rows: Tensor, *given: Any, sink: Tensor, **rest: Any) -> Tensor:
        assert q[-padding:].isnan().any()
        out, lse = in_parts(CompressedInputs(q, rows, **rest), *given)
        for part in ("window", "entries", "all"):
            inputs = CompressedInputs(q, index=rest.get("index"))
            some = attend_partial(inputs, None, *given, keys=part, write=False)
            assert not some[0][-padding:].any() and (some[1][-padding:] == -torch.inf).all()
        torch.testing.assert_close((out, lse), some, rtol=1e-4, atol=1e-5)
        return apply_sink(out, lse, sink)

    monkeypatch.setattr(mla_v4, "attend_compressed", attend)
    for wanted in ([("a", 160), ("b", 0)], [("a", 1), ("b", 40)], [("c", 0)], []):
        batch = describe(setting, wanted, padding=padding)
        plan = plan_of(setting, batch, compiled=compiled)
        tokens, positions = tokens_of(setting, batch)
        hidden = torch.cat([tokens, tokens.new_full((padding, tokens.shape[1]), torch.nan)])
        places = torch.cat([positions, positions.new_zeros(padding)])
        with torch.inference_mode():
            out = setting.server.layer(hidden, places, setting.server.cache, plan)
        assert_true(setting, out, positions)
    setting.server.layer.to("cpu")  # which tests share


def rest(inputs: CompressedInputs) -> dict[str, Any]:
    return {name: value for name, value in vars(inputs).items() if name not in ("q", "rows")}


@pytest.mark.parametrize("ratio", RATIOS)
def test_refusals_write_nothing(ratio: int, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, hidden, _ = known(32, ratio)
    server = Server(layer, {"r": hidden})
    server.step([("r", 100)])
    taken: list[tuple[CompressedInputs, LayerCache, Plan]] = []

    def attend_compressed(
        q: Tensor, rows: Tensor, cache: LayerCache, plan: Plan, *, sink: Tensor, **rest: Any
    ) -> Tensor:
        taken.append((CompressedInputs(q, rows, **rest), cache, plan))
        return torch.zeros_like(q)

    monkeypatch.setattr(mla_v4, "attend_compressed", attend_compressed)
    server.step([("r", 40)])
    inputs, cache, plan = taken[0]
    before, q = server.bytes(), inputs.q.clone()
    finished = replace(inputs, raw=None)
    projected = Projected(q, q, inputs.q[:, 0], inputs.q[:, 0])
    weights = AbsorbedWeights(q, q, q)
    positions = torch.full((40, TOPK), -1, dtype=torch.int32)
    selection = make_selection(positions, cache, plan)
    cases: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
        ((inputs, None), {"keys": "raw"}, "keys must be 'all', 'window' or 'entries', got 'raw'"),
        ((inputs, None), {"write": False}, "raw must be None where no row is written"),
        ((inputs, None), {"write": 1}, "write must be True or False, got 1"),
        ((inputs, weights), {}, "absorbed must be None with CompressedInputs, got AbsorbedWeights"),
        ((finished, None), {"raw": inputs.raw}, "raw must be None with CompressedInputs"),
        ((projected, weights), {}, "projected must be CompressedInputs for deepseek_v4, got Pro"),
        ((replace(finished, rows=None), None), {}, "rows must be"),
        ((replace(finished, q=q[:9]), None), {"write": False}, "q must be"),
    ]
    if ratio == 4:
        other = make_selection(positions, cache, server.plan(server.batch([("r", 40)])))
        bare = CompressedInputs(finished.q)
        cases += [
            ((bare, None), {"write": False}, "index is missing: tokens of this plan select"),
            ((finished, None), {"selection": selection}, "selection must be None when index"),
            ((bare, None), {"write": False, "selection": other}, "selection must be made with"),
            ((bare, None), {"write": False, "selection": selection, "keys": "window"},
             "selection must be None where no token selects"),
        ]  # fmt: skip
        with pytest.raises(OpenMLAError, match=r"^selection: positions of a token that sees 25"):
            make_selection(torch.full_like(positions, 99), cache, plan)
    else:
        assert selection is None
        cases.append(
            (
                (finished, None),
                {"selection": unasked(plan)},
                "selection must be None where no token selects",
            )
        )
    for given, options, message in cases:
        with pytest.raises(OpenMLAError, match=f"^step: {message}"):
            attend_partial(given[0], given[1], cache, plan, **options)
    assert server.unchanged(before) and torch.equal(q, inputs.q)


def unasked(plan: Plan) -> Selection:
    """A selection nobody asked for."""
    nothing = plan.slot_mapping.int()
    return Selection(nothing[:, None], nothing, nothing[:, None], nothing)
