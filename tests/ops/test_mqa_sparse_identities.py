"""mqa_sparse: what equals what, asked for in other ways: sinks, order, merged parts, dense rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from openmla.ops import merge_states, mqa_paged, mqa_sparse
from openmla.testing import PagedCase, SparseCase, SparseInputs, assert_within_budget
from tests.ops.contract import backends, run_or_skip
from tests.ops.mqa_sparse_cases import COMPRESSED, POSITIONS, PREFIX, RING, SINKS, SLOTS


@pytest.mark.parametrize("backend", backends("mqa_sparse"))
def test_sink(backend: str, device: str) -> None:
    """-inf is no sink, +inf takes everything, and lse knows of neither."""
    case = SparseCase("sink", (2, 1, 1), (70, 33, 2), RING, COMPRESSED, H=5)
    inputs = replace(case, sink=SINKS).make(device)
    out, lse = run_or_skip(mqa_sparse, inputs, backend)
    assert (out[:, 3] == 0).all() and lse[:, 3].isfinite().all()
    exact, exact_lse = case.make(device).double().run(mqa_sparse, backend="reference")
    exact *= (exact_lse - inputs["sink"]).sigmoid()[..., None]
    peer = inputs.run(mqa_sparse, backend="reference")
    assert_within_budget((out, lse), (exact, exact_lse), peer)


@pytest.mark.parametrize("backend", backends("mqa_sparse"))
@pytest.mark.parametrize("value", [-torch.inf, 0.0, 1e4, torch.inf])
def test_sink_without_rows(value: float, backend: str, device: str) -> None:
    case = SparseCase("alone", (1, 1), (3, 2), replace(PREFIX, span=128), sink=(value,))
    out, lse = run_or_skip(mqa_sparse, case.make(device), backend)
    assert (out == 0).all() and (lse == -torch.inf).all()


@pytest.mark.parametrize("backend", backends("mqa_sparse"))
def test_invariance(backend: str, device: str) -> None:
    """Another order of the rows, slots for positions, segments swapped: the same answer."""
    case = SparseCase("invariance", (2, 1, 3), (70, 33, 9), POSITIONS)
    first = case.make(device)
    expected = run_or_skip(mqa_sparse, first, backend)
    exact = first.double().run(mqa_sparse, backend="reference")

    shuffled = first.clone()
    rows, row_lens = shuffled["rows"], shuffled["row_lens"]
    past = torch.arange(rows.shape[1], device=device) >= row_lens[:, None]
    rows.masked_fill_(past, -1)
    row_lens.fill_(rows.shape[1])
    order = torch.randperm(rows.shape[1], generator=torch.Generator().manual_seed(1))
    rows.copy_(rows[:, order.to(device)])
    assert_within_budget(shuffled.run(mqa_sparse, backend=backend), exact, expected)

    slots = replace(case, first=SLOTS).make(device)
    assert torch.equal(slots["q_latent"], first["q_latent"])
    assert_within_budget(run_or_skip(mqa_sparse, slots, backend), exact, expected)

    pair = SparseCase("pair", (2, 1), (70, 33), RING, COMPRESSED).make(device)
    together = run_or_skip(mqa_sparse, pair, backend)
    swapped = pair.tensors | {
        name: pair[name.removesuffix("_2") if name.endswith("_2") else name + "_2"]
        for name in ("cache", "kv_scale", "block_table", "cache_2", "kv_scale_2", "block_table_2")
    }
    swapped["rows"], swapped["row_lens"] = swapped.pop("rows_2"), swapped.pop("row_lens_2")
    scalars = {**pair.scalars, "segments": pair.scalars["segments"][::-1]}
    actual = run_or_skip(mqa_sparse, SparseInputs(swapped, scalars, pair.widen), backend)
    assert_within_budget(actual, pair.double().run(mqa_sparse, backend="reference"), together)


@pytest.mark.parametrize("backend", backends("mqa_sparse"))
@pytest.mark.parametrize("cut", [0, 1, 8, 20, 21])
def test_two_calls_merge_into_one(cut: int, backend: str, device: str) -> None:
    inputs = SparseCase("cut", (2, 1, 1), (70, 33, 4), POSITIONS).make(device)
    expected = run_or_skip(mqa_sparse, inputs, backend)
    exact = inputs.double().run(mqa_sparse, backend="reference")
    halves = []
    for columns, row_lens in (
        (slice(cut), inputs["row_lens"].clamp(max=cut)),
        (slice(cut, None), (inputs["row_lens"] - cut).clamp(min=0)),
    ):
        changed = {"rows": inputs["rows"][:, columns], "row_lens": row_lens}
        part = replace(inputs, tensors=inputs.tensors | changed)
        out, lse = run_or_skip(mqa_sparse, part, backend)
        halves += [out.float(), lse]  # rounded once, like one call
    merge_states(*halves)
    assert_within_budget((halves[0], halves[1]), exact, expected)


@pytest.mark.parametrize("backend", backends("mqa_sparse"))
def test_two_segments_merge_into_one(backend: str, device: str) -> None:
    """One call with both segments, or a call for each and a merge."""
    both = SparseCase("both", (2, 1, 1), (70, 33, 2), RING, COMPRESSED)
    inputs = both.make(device)
    expected = run_or_skip(mqa_sparse, inputs, backend)
    exact = inputs.double().run(mqa_sparse, backend="reference")
    halves = []
    for suffix, scalar in zip(("", "_2"), inputs.scalars["segments"], strict=True):
        names = ("cache", "kv_scale", "block_table", "rows", "row_lens")
        tensors = {k: inputs[k] for k in ("q_latent", "query_start_loc", "positions")}
        tensors |= {k: inputs[k + suffix] for k in names if k + suffix in inputs.tensors}
        scalars = {**inputs.scalars, "segments": [scalar]}
        out, lse = run_or_skip(mqa_sparse, SparseInputs(tensors, scalars, inputs.widen), backend)
        halves += [out.float(), lse]
    merge_states(*halves)
    assert_within_budget((halves[0], halves[1]), exact, expected)


@pytest.mark.parametrize("backend", backends("mqa_sparse"))
@pytest.mark.parametrize("kind", ["positions", "window", "prefix"])
def test_every_position_is_dense(kind: str, backend: str, device: str) -> None:
    """With K of at least the context, sparse equals dense."""
    case = PagedCase("dense", (4, 1, 7), (64, 20, 7), format="fp32", dtype=torch.float32)
    dense = case.make(device)
    tokens = SparseCase("", case.query_lens, case.seq_lens).tokens()
    positions = torch.tensor([p for _, p in tokens], device=device)
    tensors = {
        "q_latent": dense["q_latent"],
        "query_start_loc": dense["query_start_loc"],
        "positions": positions,
        "cache": dense["cache"],
        "kv_scale": dense["kv_scale"],
        "block_table": dense["block_table"],
    }
    if kind == "positions":
        every = torch.arange(70, dtype=torch.int32, device=device)
        tensors["rows"] = every.where(every <= positions[:, None], -1)
        tensors["row_lens"] = torch.full_like(positions, 70, dtype=torch.int32)
    span = {"positions": 0, "window": 1_000_000, "prefix": 1}[kind]
    scalars = {
        "segments": [("fp32", kind, span)],
        "C": dense.scalars["C"],
        "scale": dense.scalars["scale"],
    }
    actual = run_or_skip(mqa_sparse, SparseInputs(tensors, scalars, ("q_latent",)), backend)
    expected = dense.run(mqa_paged, backend="reference")
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
