"""merge_states: the formula, empty and corrupt sides, any order, and what hypothesis finds."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from openmla.errors import ShapeError
from openmla.ops import merge_states
from openmla.ops.merge_states import cost
from openmla.testing import Inputs, assert_within_budget, strided
from tests.ops.contract import backends, run_or_skip
from tests.ops.declared import check_declaration

CORRUPT = (torch.inf, torch.nan)  # of lse; an empty side has -inf


def make(
    *,
    T: int = 9,
    H: int = 17,
    V: int = 20,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
    seed: int = 0,
) -> Inputs:
    """Random partials; the first rows have every combination of empty and live sides."""
    generator = torch.Generator().manual_seed(seed)
    sides = {}
    for name, kinds in (
        ("", (-torch.inf, 0.0, -torch.inf)),
        ("other_", (0.0, -torch.inf, -torch.inf)),
    ):
        out = torch.randn(T, H, V, generator=generator)
        lse = 5 * torch.randn(T, H, generator=generator)
        for row, kind in enumerate(kinds[: T // 2]):
            lse[row] += kind
        lse[4:5, ::4] = -torch.inf  # both sides empty, beside live heads
        empty = ~lse.isfinite()
        out[empty] = torch.nan
        sides[f"{name}out"] = strided(out.to(device, dtype))
        # lse of other packages comes transposed
        sides[f"{name}lse"] = lse.to(device).T.contiguous().T
    return Inputs(sides, {}, tuple(sides))


def merged(inputs: Inputs, backend: str) -> tuple[Tensor, Tensor]:
    run_or_skip(merge_states, inputs, backend)
    return inputs["out"], inputs["lse"]


@pytest.mark.contract
@pytest.mark.parametrize("backend", backends("merge_states"))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(9, 17, 20), (1, 1, 128), (64, 4, 512), (0, 4, 8)], ids=str)
def test_contract(
    shape: tuple[int, int, int], dtype: torch.dtype, backend: str, device: str
) -> None:
    T, H, V = shape
    inputs = make(T=T, H=H, V=V, dtype=dtype, device=device)
    actual = merged(inputs.clone(), backend)
    exact = merged(inputs.double(), "reference")
    peer = merged(inputs.clone(), "reference")
    assert_within_budget(actual, exact, peer)


def test_reference_equals_scalars() -> None:
    inputs = make().double()
    before = inputs.clone()
    out, lse = merged(inputs, "reference")
    for t in range(out.shape[0]):
        for h in range(out.shape[1]):
            sides = [
                (float(before[f"{side}lse"][t, h]), before[f"{side}out"][t, h])
                for side in ("", "other_")
            ]
            live = [(value, row) for value, row in sides if math.isfinite(value)]
            if not live:
                assert lse[t, h] == -torch.inf and (out[t, h] == 0).all()
                continue
            total = math.log(sum(math.exp(value) for value, _ in live))
            assert math.isclose(lse[t, h], total, rel_tol=1e-12, abs_tol=1e-12)
            expected = sum(math.exp(value - total) * row for value, row in live)
            torch.testing.assert_close(out[t, h], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backend", backends("merge_states"))
def test_merging_with_itself(backend: str, device: str) -> None:
    """out and other_out may be the same tensor: the same values, one ln 2 more weight."""
    inputs = make(dtype=torch.float32, device=device)
    out, lse = inputs["out"].clone(), inputs["lse"].clone()
    inputs.tensors["other_out"], inputs.tensors["other_lse"] = inputs["out"], inputs["lse"]
    merged(inputs, backend)
    live = lse.isfinite()
    torch.testing.assert_close(inputs["out"][live], out[live])
    torch.testing.assert_close(inputs["lse"][live], lse[live] + math.log(2))
    assert (inputs["lse"][~live] == -torch.inf).all() and (inputs["out"][~live] == 0).all()


@pytest.mark.contract
@pytest.mark.parametrize("backend", backends("merge_states"))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shared", [0.0, 1e5, -1e7])
def test_parts_of_ones_stay_ones(
    shared: float, dtype: torch.dtype, backend: str, device: str
) -> None:
    """Weights are divided by their own sum. The rounded lse in its place is off by as much as lse
    rounds, 1 at 1e7."""
    wide = torch.promote_types(dtype, torch.float32)
    out = torch.ones(3, 2, 16, dtype=dtype, device=device)
    lse = torch.full((3, 2), shared, dtype=wide, device=device)
    sides = {"out": out, "lse": lse, "other_out": out.clone(), "other_lse": lse.clone()}
    for _ in range(16):
        merged(Inputs(sides, {}, ()), backend)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(out, torch.ones_like(out), rtol=0, atol=16 * eps)
    assert dtype != torch.bfloat16 or bool((out == 1).all())


@pytest.mark.contract
@pytest.mark.parametrize("backend", backends("merge_states"))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", CORRUPT)
def test_corrupt_lse_makes_its_row_nan(
    kind: float, dtype: torch.dtype, backend: str, device: str
) -> None:
    """Whichever side has it and whether the other is live or empty; other rows are as without."""
    inputs = make(dtype=dtype, device=device)
    before = merged(inputs.clone(), backend)
    rows = torch.zeros_like(inputs["lse"], dtype=torch.bool)
    # live beside live, live beside empty, empty beside live, both corrupt
    for t, h, names in ((5, 3, ("lse",)), (5, 8, ("other_lse",)), (1, 2, ("lse",)),
                        (0, 4, ("other_lse",)), (6, 0, ("lse", "other_lse"))):  # fmt: skip
        rows[t, h] = True
        for name in names:
            inputs[name][t, h] = kind
    out, lse = merged(inputs, backend)
    assert out[rows].isnan().all() and lse[rows].isnan().all()
    assert torch.equal(out[~rows], before[0][~rows]) and torch.equal(lse[~rows], before[1][~rows])


@pytest.mark.contract
@pytest.mark.parametrize("backend", backends("merge_states"))
def test_nan_of_a_side_without_weight_is_seen(backend: str, device: str) -> None:
    """It saw keys, whatever is left of its weight."""
    out, lse = torch.ones(1, 2, 16, device=device), torch.zeros(1, 2, device=device)
    other, other_lse = torch.full_like(out, torch.nan), lse - 1e4
    sides = {"out": out, "lse": lse, "other_out": other, "other_lse": other_lse}
    merged(Inputs(sides, {}, ()), backend)
    assert out.isnan().all() and (lse == 0).all()


lse_values = st.one_of(
    st.sampled_from((-torch.inf, *CORRUPT)), st.floats(-60, 60), st.floats(-1e30, 1e30)
)


@given(values=st.lists(lse_values, min_size=2, max_size=5), data=st.data())
def test_any_order_gives_one_attention(values: list[float], data: st.DataObject) -> None:
    """However partials are ordered, merging them equals one softmax over all."""
    with torch.inference_mode():
        outs = torch.randn(len(values), 3, dtype=torch.float64)
        lses = torch.tensor(values, dtype=torch.float64)
        live = lses != -torch.inf
        order = data.draw(st.permutations(range(len(values))))
        out, lse = outs[order[0]].reshape(1, 1, 3).clone(), lses[order[0]].reshape(1, 1).clone()
        for i in order[1:]:
            merge_states(out, lse, outs[i].reshape(1, 1, 3), lses[i].reshape(1, 1))
        if not live.any():
            assert lse.item() == -torch.inf and (out == 0).all()
            return
        if not lses[live].isfinite().all():
            assert lse.isnan().all() and out.isnan().all()
            return
        # a weight is exp of a difference of lse: it errs by as much as lse rounds
        rounding = torch.finfo(torch.float64).eps * max(float(lses[live].abs().max()), 1.0)
        tolerance = 4 * len(values) * rounding * float(outs[live].abs().max() + 1)
        expected = lses[live].softmax(0) @ outs[live]
        torch.testing.assert_close(out.flatten(), expected, rtol=0, atol=tolerance)
        total = lses[live].logsumexp(0)
        torch.testing.assert_close(lse.flatten()[0], total, rtol=0, atol=tolerance)


def test_declaration(device: str) -> None:
    inputs = make(dtype=torch.float32, device=device)
    check_declaration(merge_states, inputs, "out lse other_out other_lse")


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("other_out", lambda t: t[:, :-1], "other_out must be [T, H, V] with H=17, got"),
        ("other_lse", lambda t: t.bfloat16(), "other_lse must be float32 or float64"),
    ],
)
def test_bad_input_changes_nothing(
    name: str, change: Callable[[Tensor], Tensor], message: str
) -> None:
    inputs = make()
    before = inputs.clone()
    with pytest.raises(ShapeError) as error:
        Inputs({**inputs.tensors, name: change(inputs[name])}, {}, ()).run(
            merge_states, backend="reference"
        )
    assert f"merge_states: {message}" in str(error.value)
    for key in ("out", "lse"):
        torch.testing.assert_close(inputs[key], before[key], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("backend", backends("merge_states"))
def test_lse_to_base_2(backend: str, device: str) -> None:
    """Merged as the same partials with natural logarithms, and written to base 2."""
    inputs = make(dtype=torch.float32, device=device)
    halves = inputs.clone()
    for name in ("lse", "other_lse"):
        halves[name].mul_(math.log2(math.e))
    out, lse = merged(inputs, backend)
    merged(Inputs(halves.tensors, {"base": 2}, ()), backend)
    torch.testing.assert_close(halves["out"], out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(halves["lse"], lse * math.log2(math.e), rtol=1e-6, atol=1e-5)
    assert (halves["lse"] == -torch.inf).any()


def test_lse_to_base_2_fullgraph() -> None:
    inputs, others = make(dtype=torch.float32), make(dtype=torch.float32)
    compiled = torch.compile(merge_states, fullgraph=True, backend="aot_eager")
    compiled(*inputs.tensors.values(), base=2)
    merge_states(*others.tensors.values(), base=2)
    assert all(torch.equal(inputs[name], others[name]) for name in ("out", "lse"))


@pytest.mark.parametrize("base", [10, 1, 0, -2, 2.5, torch.nan])
def test_other_bases_are_refused(base: float) -> None:
    inputs = make()
    before = inputs.clone()
    with pytest.raises(ShapeError, match=r"merge_states: base must be math\.e or 2, got"):
        merge_states(*inputs.tensors.values(), base=base)
    assert torch.equal(inputs["out"].view(torch.int16), before["out"].view(torch.int16))


def test_cost() -> None:
    assert cost(2, H=3, V=5, itemsize=2).bytes == 2 * 3 * 3 * 14
