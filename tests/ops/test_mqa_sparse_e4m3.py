"""mqa_sparse with e4m3 queries, over fp8 and packed rows: against float64; what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from openmla.errors import ShapeError
from openmla.ops import mqa_sparse
from openmla.testing import SegmentCase, SparseCase
from tests.ops.contract import backends, check_e4m3, slow_interpreted

FP8 = SegmentCase(format="fp8", kv_scale=0.037)
PACKED = SegmentCase(format="fp8_ds_mla")
E4M3: dict[str, Any] = {"dtype": torch.float8_e4m3fn, "q_scale": "heads"}
V3: dict[str, Any] = {"C": 512, "R": 64, **E4M3}
SMALL: dict[str, Any] = {"C": 128, **E4M3}
CASES = [
    SparseCase("fp8", (1, 2), (33, 70), FP8, **E4M3),
    SparseCase("fp8-one-scale", (1, 2), (33, 70), FP8, **{**E4M3, "q_scale": "tensor"}),
    SparseCase("fp8-two", (2, 1), (33, 70), FP8, replace(FP8, kind="positions"), **E4M3),
    SparseCase("packed", (1, 2), (33, 70), PACKED, H=17, padding=2, **SMALL),
    SparseCase("packed-positions", (1, 2), (33, 70), replace(PACKED, kind="positions"), **SMALL),
    SparseCase("packed-sink", (1, 2), (33, 70), PACKED, sink=(0.5, -1.0), **SMALL),
    SparseCase("v3-packed", (1, 2), (300, 70), replace(PACKED, K=200), H=64, **V3),
    SparseCase("v3-packed-16", (1, 2), (300, 70), replace(PACKED, K=200), H=16, **V3),
    SparseCase("v3-fp8", (1, 2), (300, 70), replace(FP8, K=200), H=64, **V3),
]


@pytest.mark.contract
@pytest.mark.parametrize("backend", backends("mqa_sparse"))
@pytest.mark.parametrize(
    "case", slow_interpreted(CASES, ["v3-packed-16", "v3-fp8", "fp8-two"]), ids=str
)
def test_contract(case: SparseCase, backend: str, device: str) -> None:
    check_e4m3(mqa_sparse, case.make(device), backend)


def test_bad_input() -> None:
    inputs = CASES[0].make()
    del inputs.tensors["q_scale"]
    with pytest.raises(ShapeError, match="mqa_sparse: q_scale must be given with queries of"):
        inputs.run(mqa_sparse, backend="auto")
    v4 = SparseCase("v4", (1,), (9,), SegmentCase(format="fp8_dsv4"), C=512, R=0, **E4M3)
    with pytest.raises(ShapeError, match="queries over a fp8_dsv4 cache must be 16 bits or wider"):
        v4.make().run(mqa_sparse, backend="auto")
