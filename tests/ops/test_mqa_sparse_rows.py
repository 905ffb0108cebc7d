"""mqa_sparse: odd lists, tables with holes, rows of NaN and rows far into a cache."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from openmla.ops import mqa_sparse
from openmla.testing import SegmentCase, SparseCase, SparseInputs, poisoned_memory
from tests.ops.contract import TRITON, backends, check_attention, run_or_skip
from tests.ops.mqa_sparse_cases import (
    DENSE_64,
    POSITIONS,
    PREFIX,
    SINKS,
    SLOTS,
    WINDOW,
    assert_equals_loops,
)


def edge_rows(kind: str, device: str, format: str = "bf16", **options: Any) -> SparseInputs:
    """Every odd list there is, one per token, over rows that are all in use."""
    part = SegmentCase(kind, format=format)
    case = SparseCase("edges", (12,), (60,), part, sink=SINKS, **{"H": 5, **options})
    inputs = case.make(device)
    rows, row_lens = inputs["rows"], inputs["row_lens"]
    K = rows.shape[1]
    assert (row_lens == K).all() and (rows >= 0).all()  # as many to see as columns
    slots = inputs["cache"].shape[0] * case.first.BS
    past = slots if kind == "slots" else inputs["block_table"].shape[1] * case.first.BS
    rows[0] = -1
    rows[1] = torch.tensor([-1, past, -(2**31), 2**31 - 1, past + 1, -77, -2] * 3, device=device)
    rows[2, :-1] = -1
    rows[3, 5:9] = rows[3, 4]
    rows[4] = rows[4, 0].clone()
    rows[5, ::2] = past
    row_lens[6] = 0
    row_lens[7] = K + 1000
    row_lens[8] = 1
    row_lens[9] = -3
    rows[10, 1:] = -1
    return inputs


@pytest.mark.parametrize("backend", backends("mqa_sparse"))
@pytest.mark.parametrize("kind", ["slots", "positions"])
@pytest.mark.parametrize(
    "wide", [{}, DENSE_64, {**DENSE_64, "format": "fp8_ds_mla"}], ids=["", "v3", "packed-v3"]
)
def test_edge_rows(wide: dict[str, Any], kind: str, backend: str, device: str) -> None:
    inputs = edge_rows(kind, device, **wide)
    out, lse = run_or_skip(mqa_sparse, inputs, backend)
    for t in (0, 1, 6, 9):
        assert (lse[t] == -torch.inf).all() and (out[t] == 0).all()
    check_attention(mqa_sparse, inputs, backend)


@pytest.mark.parametrize("kind", ["slots", "positions"])
def test_edge_rows_equal_loops(kind: str) -> None:
    assert_equals_loops(edge_rows(kind, "cpu"))


@pytest.mark.parametrize("backend", backends("mqa_sparse"))
@pytest.mark.parametrize("kind", ["positions", "window", "prefix"])
def test_table_without_a_block(kind: str, backend: str, device: str) -> None:
    """A table entry that is no block hides its rows, wherever it stands."""
    parts = {"positions": POSITIONS, "window": WINDOW, "prefix": PREFIX}
    inputs = SparseCase("holes", (3, 1), (100, 30), parts[kind]).make(device)
    full = run_or_skip(mqa_sparse, inputs, backend)
    inputs["block_table"][0, 0 if kind == "prefix" else 5] = -1
    inputs["block_table"][1, 1 if kind == "window" else 0] = inputs["cache"].shape[0]
    check_attention(mqa_sparse, inputs, backend)
    if device == "cpu":
        assert_equals_loops(inputs)
    assert not torch.equal(full[1], inputs.run(mqa_sparse, backend=backend)[1])


def test_table_without_columns() -> None:
    for part in (POSITIONS, WINDOW, PREFIX):
        inputs = SparseCase("bare", (2,), (9,), part).make()
        inputs.tensors["block_table"] = inputs["block_table"][:, :0]
        out, lse = inputs.run(mqa_sparse, backend="reference")
        assert (out == 0).all() and (lse == -torch.inf).all()


@pytest.mark.parametrize("run_length", [0, 16])
@pytest.mark.parametrize("wide", [{}, DENSE_64], ids=["", "v3"])
@pytest.mark.parametrize("backend", [TRITON, "reference"])
def test_nan_of_a_row_is_seen(
    backend: str, wide: dict[str, Any], run_length: int, device: str
) -> None:
    """One of many rows: it does not vanish where runs are merged, nor reach other tokens."""
    case = SparseCase("nan", (1, 1), (70, 33), replace(SLOTS, K=64, BS=8), **wide)
    inputs = case.make(device)
    inputs = replace(inputs, scalars={**inputs.scalars, "run_length": run_length})
    slot = int(inputs["rows"][0, 3])
    others = inputs["rows"][1]
    others[others == slot] = -1
    inputs["cache"][slot // 8, slot % 8] = math.nan
    out, lse = run_or_skip(mqa_sparse, inputs, backend)
    assert out[0].isnan().all() and lse[0].isnan().all()
    assert out[1].isfinite().all() and lse[1].isfinite().all()


@pytest.mark.parametrize("backend", backends("mqa_sparse"))
@pytest.mark.parametrize("kind", ["slots", "positions"])
def test_offsets_beyond_int32(kind: str, backend: str, device: str) -> None:
    """Rows past element 2^31 of the cache. Memory is reserved, hardly any of it is touched."""
    N, BS, D = 60_000, 64, 576
    with poisoned_memory(False):
        cache = torch.empty((N, BS, D), dtype=torch.float8_e4m3fn, device=device)
    assert cache.numel() > 2**31
    part = SegmentCase(kind, K=50, BS=BS, format="fp8")
    near = SparseCase("far", (1,), (100,), part, H=2, C=512, R=64).make(device)
    moved = N - near["cache"].shape[0]
    cache.view(torch.uint8)[moved:] = near["cache"].view(torch.uint8)
    far = near.clone()
    far.tensors["cache"] = cache
    if kind == "slots":
        rows, real = far["rows"], near["rows"] // BS < near["cache"].shape[0]
        rows[real & (rows >= 0)] += moved * BS
        rows[near["rows"] == near["cache"].shape[0] * BS] = N * BS
    else:
        far["block_table"][:, :2] += moved
    near_out = run_or_skip(mqa_sparse, near, backend)
    for actual, expected in zip(far.run(mqa_sparse, backend=backend), near_out, strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("run_length", [0, 16])
@pytest.mark.parametrize("backend", [TRITON, "reference"])
def test_equal_rows_of_large_logits_keep_the_value(
    backend: str, run_length: int, device: str
) -> None:
    """Weights sum up to 1 where lse rounds by more than a weight: logits are about 1e7 here."""
    inputs = SparseCase("equal", (1,), (70,), replace(SLOTS, K=64, BS=8)).make(device)
    inputs = replace(inputs, scalars={**inputs.scalars, "run_length": run_length})
    inputs["q_latent"].fill_(1e7 / inputs["q_latent"].shape[2] / inputs.scalars["scale"])
    inputs["cache"].fill_(1.0)
    out, _ = run_or_skip(mqa_sparse, inputs, backend)
    atol = torch.finfo(torch.bfloat16).eps
    torch.testing.assert_close(out, torch.ones_like(out), rtol=0, atol=atol)
