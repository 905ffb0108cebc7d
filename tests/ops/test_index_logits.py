"""index_logits: every backend against float64, the reference against plain loops, bad input."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from openmla.cache.format import get_format
from openmla.errors import ConfigError, ShapeError
from openmla.ops import index_logits
from openmla.ops.index_logits import cost
from openmla.testing import INDEX_FORMATS, Inputs, poison, poisoned_memory, start_loc, strided
from tests.ops.contract import backends, broken, run_or_skip, slow_interpreted
from tests.ops.declared import check_declaration
from tests.ops.index_cases import (
    BAD_INPUT,
    BASE,
    CASES,
    FP8,
    IndexCase,
    score_budget,
    stored_key,
    unit_budget,
)

LOOPED = [case for case in CASES if max(case.seq_lens, default=0) < 100]


def magnitudes(inputs: Inputs) -> Tensor:
    """Scores of absolute queries, weights and keys, float64."""
    exact = inputs.double()
    tensors = dict(exact.tensors)
    for name in ("q_idx", "w_idx"):
        tensors[name] = tensors[name].abs()
    N, BS, _ = inputs["cache"].shape
    pages = inputs["cache"].clone()
    values = pages.view(N, -1)[:, : BS * inputs["q_idx"].shape[2]]
    if pages.dtype == torch.uint8:  # a page's values come first, its scales after them
        values &= 0x7F
    else:
        values.abs_()
    tensors["cache"] = pages
    scores: Tensor = replace(exact, tensors=tensors).run(index_logits, backend="reference")
    return scores


@pytest.mark.contract
@pytest.mark.parametrize("backend", backends("index_logits"))
@pytest.mark.parametrize("case", slow_interpreted(CASES, ["short-prefill"]), ids=str)
def test_contract(case: IndexCase, backend: str, device: str) -> None:
    inputs = case.make(device)
    actual = run_or_skip(index_logits, inputs, backend)
    exact = inputs.double().run(index_logits, backend="reference")
    peer = inputs.run(index_logits, backend="reference")
    assert actual.dtype == torch.float32 and exact.dtype == torch.float64
    if device == "cuda" and backend == "triton":
        fp8 = case.dtype == FP8 and get_format(case.format).packed
        assert unit_budget(actual, exact, magnitudes(inputs), fp8=fp8) <= 1
    else:
        assert score_budget(actual, exact, peer) <= 1


@pytest.mark.contract
@pytest.mark.parametrize("backend", backends("index_logits"))
@pytest.mark.parametrize("format", ["index_fp8", "index_bf16"])
def test_contract_of_one_tile(format: str, backend: str, device: str) -> None:
    """A score's bits are of its token and key: alone, and beside more keys and requests."""
    case = IndexCase("one tile", (1, 5, 2), (70, 33, 9), HI=17, format=format, dtype=torch.bfloat16)
    inputs = case.make(device)
    inputs = Inputs(inputs.tensors, {**inputs.scalars, "batch_invariant": True}, inputs.widen)
    actual = run_or_skip(index_logits, inputs, backend)
    exact = inputs.double().run(index_logits, backend="reference")
    assert unit_budget(actual, exact, magnitudes(inputs), fp8=False) <= 1
    bounds = [0, *accumulate(case.query_lens)]
    for b in range(len(case.query_lens)):
        for t in range(bounds[b], bounds[b + 1]):
            seen = int(inputs["row_lens"][t])
            one = {name: inputs[name][t : t + 1].clone() for name in ("q_idx", "w_idx", "row_lens")}
            one |= {
                "cache": inputs["cache"],
                "block_table": inputs["block_table"][b : b + 1],
                "query_start_loc": start_loc([1], device),
            }
            tensors = {name: one[name] for name in inputs.tensors}
            alone = Inputs(tensors, {**inputs.scalars, "num_keys": seen}, ())
            scores = run_or_skip(index_logits, alone, backend)[0]
            if backend == "triton" and device == "cpu":
                # the interpreter multiplies by numpy, whose sums depend on the matrix on some CPUs
                torch.testing.assert_close(scores, actual[t, :seen], rtol=1e-5, atol=1e-5)
            else:
                assert torch.equal(scores, actual[t, :seen])


@pytest.mark.parametrize("case", LOOPED, ids=str)
def test_reference_equals_loops(case: IndexCase) -> None:
    """The meaning, once more and independently: Python floats, one key and one head at a time."""
    inputs = replace(case, HI=min(case.HI, 3)).make().double()
    logits = inputs.run(index_logits, backend="reference")
    num_keys, lens = inputs.scalars["num_keys"], case.seen()
    assert logits.shape == (len(lens) + case.padding, num_keys)
    bounds = [0, *accumulate(case.query_lens)]
    for b in range(len(case.query_lens)):
        for t in range(bounds[b], bounds[b + 1]):
            for j in range(num_keys):
                if j >= lens[t]:
                    assert logits[t, j] == -torch.inf
                    continue
                block = int(inputs["block_table"][b, j // case.BS])
                key = stored_key(inputs["cache"], block, j % case.BS, case.format, case.DI)
                dots = (inputs["q_idx"][t] @ key).tolist()
                terms = [
                    weight * max(dot, 0.0)
                    for weight, dot in zip(inputs["w_idx"][t].tolist(), dots, strict=True)
                ]
                assert math.isclose(logits[t, j], math.fsum(terms), rel_tol=1e-11, abs_tol=1e-12)
    assert (logits[bounds[-1] :] == -torch.inf).all()


def test_reference_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long queries are taken a few at a time; the result does not change."""
    inputs = IndexCase("chunks", (7, 5), (40, 5), whole=True).make()
    expected = inputs.run(index_logits, backend="reference")
    monkeypatch.setattr("openmla.backends.reference.index_logits.PRODUCTS", 3 * 4 * 40)
    assert torch.equal(inputs.run(index_logits, backend="reference"), expected)


@pytest.mark.parametrize("backend", backends("index_logits"))
@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8], ids=str)
@pytest.mark.parametrize("format", INDEX_FORMATS)
def test_whole_numbers_are_exact(
    format: str, dtype: torch.dtype, backend: str, device: str
) -> None:
    """No sum rounds here, so order of summation is no excuse."""
    case = IndexCase("whole", (3, 1, 2), (70, 33, 9), HI=17, format=format, dtype=dtype, whole=True)
    inputs = case.make(device)
    actual = run_or_skip(index_logits, inputs, backend)
    exact = inputs.double().run(index_logits, backend="reference")
    assert torch.equal(actual.double(), exact)


@pytest.mark.parametrize("backend", backends("index_logits"))
def test_invariance(backend: str, device: str) -> None:
    """Other blocks, other widths, other neighbours, strided rows: the same answer."""
    case = IndexCase("moved", (2, 1, 3), (70, 33, 9), format="index_bf16", whole=True)
    first = case.make(device)
    expected = run_or_skip(index_logits, first, backend)

    order = torch.randperm(first["cache"].shape[0], generator=torch.Generator().manual_seed(1))
    moved = first.clone()
    moved["cache"].view(torch.int16)[order.to(device)] = first["cache"].view(torch.int16)
    table = moved["block_table"]
    real = (table >= 0) & (table < len(order))
    table[real] = order.to(device, torch.int32)[table[real].long()]
    assert torch.equal(moved.run(index_logits, backend=backend), expected)

    spaced = Inputs({**first.tensors, "cache": strided(first["cache"])}, first.scalars, ())
    assert torch.equal(spaced.run(index_logits, backend=backend), expected)

    wider = Inputs(first.tensors, {**first.scalars, "num_keys": 200}, ())
    actual = wider.run(index_logits, backend=backend)
    assert torch.equal(actual[:, :73], expected) and (actual[:, 73:] == -torch.inf).all()

    swapped = dict(first.tensors)
    rows = torch.tensor([3, 4, 5, 2, 0, 1], device=device)
    for name in ("q_idx", "w_idx", "row_lens"):
        swapped[name] = first[name][rows]
    swapped["block_table"] = first["block_table"][torch.tensor([2, 1, 0], device=device)]
    swapped["query_start_loc"] = start_loc((3, 1, 2), device)
    actual = Inputs(swapped, first.scalars, ()).run(index_logits, backend=backend)
    assert torch.equal(actual, expected[rows])


@pytest.mark.parametrize("backend", backends("index_logits"))
def test_keys_no_head_likes_score_zero(backend: str, device: str) -> None:
    """Exactly zero, whatever the weights: selections with few heads rest on it."""
    inputs = IndexCase("zero", (2,), (40,), dtype=torch.float32).make(device)
    inputs["q_idx"].fill_(0.1)
    flat = poison((3, 16 * 36), torch.uint8, device)
    cache = flat.unflatten(1, (16, 36))
    keys = -torch.rand(40, 32, device=device)
    slots = torch.arange(40, device=device)
    get_format("index_fp8").write(cache, slots, keys, torch.ones((), device=device))
    table = torch.arange(3, dtype=torch.int32, device=device)[None]
    tensors = {**inputs.tensors, "cache": cache, "block_table": table}
    logits = run_or_skip(index_logits, Inputs(tensors, inputs.scalars, ()), backend)
    assert (logits[0, :39] == 0).all() and (logits[1, :40] == 0).all()


@pytest.mark.parametrize("backend", backends("index_logits"))
@pytest.mark.parametrize("format", INDEX_FORMATS)
def test_nan_stays_in_its_column(format: str, backend: str, device: str) -> None:
    """A key that holds NaN scores NaN for those who see it, and changes no other score."""
    case = IndexCase("nan", (3, 1), (40, 9), format=format, whole=True)
    inputs = case.make(device)
    expected = run_or_skip(index_logits, inputs, backend).clone()
    slots = inputs["block_table"][0, :1].long() * case.BS + 5
    nan = torch.full((1, case.DI), torch.nan, device=device)
    get_format(format).write(inputs["cache"], slots, nan, torch.ones((), device=device))
    actual = inputs.run(index_logits, backend=backend)
    assert actual[:3, 5].isnan().all()
    actual[:3, 5] = expected[:3, 5]
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("backend", backends("index_logits"))
@pytest.mark.parametrize("DI", [32, 256])
def test_odd_pages(DI: int, backend: str, device: str) -> None:
    """Pages of bytes may begin anywhere; scales inside them then lie oddly."""
    inputs = IndexCase("odd", (3, 1), (40, 9), DI=DI, whole=True).make(device)
    expected = run_or_skip(index_logits, inputs, backend)
    N, BS, W = inputs["cache"].shape
    flat = poison((N, BS * W + 3), torch.uint8, device)
    odd = flat[:, 1 : BS * W + 1].unflatten(1, (BS, W))
    odd.copy_(inputs["cache"])
    moved = Inputs({**inputs.tensors, "cache": odd}, inputs.scalars, ())
    assert torch.equal(moved.run(index_logits, backend=backend), expected)


@pytest.mark.parametrize("backend", backends("index_logits"))
def test_offsets_beyond_int32(backend: str, device: str) -> None:
    """Keys past byte 2^31 of the cache. Memory is reserved, hardly any of it is touched."""
    N, BS, DI = 260_000, 64, 128
    with poisoned_memory(False):
        cache = torch.empty((N, BS, DI + 4), dtype=torch.uint8, device=device)
    assert cache.numel() > 2**31
    near = IndexCase("far", (1,), (100,), HI=2, DI=DI, BS=BS).make(device)
    for column in range(2):
        cache[N - 1 - column] = near["cache"][int(near["block_table"][0, column])]
    expected = run_or_skip(index_logits, near, backend)
    table = torch.tensor([[N - 1, N - 2]], dtype=torch.int32, device=device)
    far = Inputs({**near.tensors, "cache": cache, "block_table": table}, near.scalars, ())
    assert torch.equal(far.run(index_logits, backend=backend), expected)


def test_declaration(device: str) -> None:
    check_declaration(index_logits, BASE.make(device), "q_idx w_idx")


@pytest.mark.parametrize(("changes", "message"), BAD_INPUT)
def test_bad_input(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ShapeError) as error:
        broken(BASE.make(), **changes).run(index_logits, backend="reference")
    assert f"index_logits: {message}" in str(error.value)


def test_pages_of_fp8_keys_are_contiguous_inside() -> None:
    inputs = broken(IndexCase("pages", (1,), (20,)).make(), cache=strided)
    with pytest.raises(ShapeError, match="index_logits: each block must be contiguous for"):
        inputs.run(index_logits, backend="reference")


def test_unknown_names() -> None:
    for name in ("fp4", "bf16"):
        with pytest.raises(ConfigError, match=rf"format '{name}' is not known.* Known: index_fp32"):
            broken(BASE.make(), format=name).run(index_logits, backend="reference")


def test_cost() -> None:
    one = cost([1], [100], HI=64, DI=128, format="index_fp8")
    assert one.bytes == 100 * 132 + 64 * 132 + 400
    assert one.flops == 2 * 100 * 64 * 129
    verify = cost([2, 0, 1], [9, 10, 5], HI=1, DI=4, format="index_bf16")
    assert verify.bytes == (10 + 5) * 8 + 3 * 8 + 4 * 24
    assert verify.flops == 2 * 24 * 5
