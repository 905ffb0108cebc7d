"""mqa_sparse with e4m3 queries, over fp8 and packed rows: against float64; what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from openmla.errors import ShapeError
from openmla.ops import mqa_sparse
from openmla.testing import SegmentCase, SparseCase
from tests.ops.contract import backends, check_e4m3, run_or_skip, slow_interpreted

FP8 = SegmentCase(format="fp8", kv_scale=0.037)
PACKED = SegmentCase(format="fp8_ds_mla")
E4M3: dict[str, Any] = {"dtype": torch.float8_e4m3fn, "q_scale": "heads"}
V3: dict[str, Any] = {"C": 512, "R": 64, **E4M3}
SMALL: dict[str, Any] = {"C": 128, **E4M3}
# As engines keep rows, which Gluon's kernels need; heads and tokens for the one and the other.
OWN: dict[str, Any] = {**V3, "contiguous": True}
LISTED = replace(PACKED, K=300, BS=64)
NAMED = replace(LISTED, kind="positions")
LENS: dict[str, Any] = {"query_lens": (1, 2, 0, 1), "seq_lens": (700, 70, 5, 300)}
PROMPT: dict[str, Any] = {**LENS, "query_lens": (9, 2, 0, 3)}
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
    SparseCase("packed-two", (2, 1), (33, 70), PACKED, replace(PACKED, kind="positions"), **SMALL),
    SparseCase("packed-fp8", (2, 1), (33, 70), PACKED, FP8, **SMALL),
    SparseCase("packed-all-columns", (1, 2), (33, 70), PACKED, **{**SMALL, "C": 128, "R": 0}),
    SparseCase("packed-many-tokens", (40, 3), (40, 30), replace(NAMED, BS=8, K=30), H=2, **SMALL),
    SparseCase("own-3-heads", **LENS, first=NAMED, H=3, padding=2, **OWN),
    SparseCase("own-16-heads", **LENS, first=NAMED, H=16, padding=2, sink=(0.5, -1.0), **OWN),
    SparseCase("own-17-one-scale", **LENS, first=LISTED, H=17, **{**OWN, "q_scale": "tensor"}),
    SparseCase("own-64-heads", **PROMPT, first=NAMED, H=64, padding=2, sink=(0.5, -1.0), **OWN),
    SparseCase("own-64-one-scale", **PROMPT, first=LISTED, H=64, **{**OWN, "q_scale": "tensor"}),
    SparseCase("own-100-heads", (8, 1), (700, 1), replace(LISTED, K=129), H=100, **OWN),
    SparseCase("own-128-heads", (8, 1), (700, 1), replace(NAMED, K=64), H=128, **OWN),
    # as many tokens as decode rows once, into bf16
    SparseCase("own-many-tokens", (40, 3), (40, 30), replace(NAMED, BS=8, K=30), H=64, **OWN),
]
SLOW = [str(case) for case in CASES if str(case).startswith("own-")]
WITH_NAN = [case for case in CASES if str(case) in ("packed", "own-16-heads", "own-64-heads")]
SLOW += ["v3-packed-16", "v3-fp8", "fp8-two", "packed-all-columns", "packed-fp8"]


@pytest.mark.contract
@pytest.mark.parametrize("backend", backends("mqa_sparse"))
@pytest.mark.parametrize("case", slow_interpreted(CASES, SLOW), ids=str)
def test_contract(case: SparseCase, backend: str, device: str) -> None:
    check_e4m3(mqa_sparse, case.make(device), backend)


@pytest.mark.parametrize("backend", backends("mqa_sparse"))
@pytest.mark.parametrize(
    "case", slow_interpreted(WITH_NAN, ["own-16-heads", "own-64-heads"]), ids=str
)
def test_nan_stays_with_its_head(case: SparseCase, backend: str, device: str) -> None:
    """A scale of NaN, as quantize_queries makes it, or a query with that byte. Tokens without rows
    have none of it."""
    inputs = case.make(device)
    inputs["q_scale"][0, 1] = torch.nan
    inputs["q_latent"].view(torch.uint8)[1, 0, 7] = 0x7F
    inputs["row_lens"][2] = 0
    inputs["q_scale"][2] = torch.nan
    inputs["q_scale"][-1] = torch.nan  # of padding
    out, lse = run_or_skip(mqa_sparse, inputs, backend)
    assert (out[2] == 0).all() and (lse[2] == -torch.inf).all()
    assert (out[-1] == 0).all() and (lse[-1] == -torch.inf).all()
    named = torch.zeros_like(lse, dtype=torch.bool)
    named[0, 1] = named[1, 0] = True
    assert torch.equal(lse.isnan(), named)
    assert torch.equal(out.isnan().all(-1), named) and torch.equal(out.isnan().any(-1), named)


@pytest.mark.parametrize("backend", backends("mqa_sparse"))
@pytest.mark.parametrize("H", [3, pytest.param(64, marks=pytest.mark.slow_interpreted)])
def test_a_token_has_its_own_bits(H: int, backend: str, device: str) -> None:
    """With fixed runs, whoever else is in the batch; also where rows would be decoded once."""
    T = 90 if device == "cuda" else 2
    lens: Any = {"query_lens": (T,), "seq_lens": (140,), "H": H}
    inputs = SparseCase("many", first=replace(NAMED, K=150), **lens, **OWN).make(device)
    options = {**inputs.scalars, "run_length": 64}
    whole = run_or_skip(mqa_sparse, replace(inputs, scalars=options), backend)
    alone = dict(inputs.tensors)
    alone["query_start_loc"] = torch.tensor([0, 1], dtype=torch.int32, device=device)
    for name in ("q_latent", "q_scale", "positions", "rows", "row_lens"):
        alone[name] = alone[name][:1]
    one = run_or_skip(mqa_sparse, replace(inputs, tensors=alone, scalars=options), backend)
    for many, few in zip(whole, one, strict=True):
        assert torch.equal(many[:1], few)


@pytest.mark.gluon
@pytest.mark.parametrize("H", [16, 64])
def test_the_same_bits_as_bf16_queries(H: int, device: str) -> None:
    """e4m3 is exact in bf16, and a scale of a power of two is exact in both."""
    inputs = SparseCase("same", **PROMPT, first=NAMED, H=H, **OWN).make(device)
    inputs["q_scale"].fill_(0.5)
    wide = dict(inputs.tensors)
    wide["q_latent"] = inputs["q_latent"].bfloat16() * 0.5
    del wide["q_scale"]
    wanted = run_or_skip(mqa_sparse, replace(inputs, tensors=wide), "gluon")
    for found, expected in zip(inputs.run(mqa_sparse, backend="gluon"), wanted, strict=True):
        assert torch.equal(found, expected)


def test_bad_input() -> None:
    inputs = CASES[0].make()
    del inputs.tensors["q_scale"]
    with pytest.raises(ShapeError, match="mqa_sparse: q_scale must be given with queries of"):
        inputs.run(mqa_sparse, backend="auto")
    v4 = SparseCase("v4", (1,), (9,), SegmentCase(format="fp8_dsv4"), C=512, R=0, **E4M3)
    with pytest.raises(ShapeError, match="queries over a fp8_dsv4 cache must be 16 bits or wider"):
        v4.make().run(mqa_sparse, backend="auto")
