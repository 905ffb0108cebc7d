"""mha_masked over e4m3 heads: every backend against float64, and bad input."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from openmla.errors import ShapeError
from openmla.ops import mha_masked
from openmla.testing import Inputs, RaggedCase
from tests.ops.contract import backends, slow_interpreted
from tests.ops.fp8_cases import check_beside_a_large_token, check_fp8, quantised

CASES = [
    RaggedCase("prefill", (5, 17, 40), (5, 17, 40)),
    RaggedCase("empty-requests", (3, 0, 0, 2), (3, 0, 4, 2)),
    RaggedCase("padding", (5, 7), (5, 70), padding=6),
    RaggedCase("v3-widths", (40, 65), (40, 265), E=192, V=128, H=2),
    RaggedCase("v3-several-tiles", (260, 1), (500, 129), E=192, V=128, H=2),
    RaggedCase("glm-widths", (40,), (140,), E=256, V=256, H=2),
]


def masked(case: RaggedCase, device: str) -> Inputs:
    """A ragged case under random bits: many, few, none of a row."""
    inputs = case.make(device)
    T, words = inputs["q"].shape[0], -(-max(case.key_lens, default=1) // 32)
    generator = torch.Generator().manual_seed(1)
    bits = torch.randint(-(2**31), 2**31, (T, words), generator=generator, dtype=torch.int64)
    bits[1::4] &= 0x01000100
    bits[2::5] = 0
    tensors = {**inputs.tensors, "mask": bits.to(torch.int32).to(device)}
    scalars = {name: each for name, each in inputs.scalars.items() if name != "causal"}
    return Inputs(tensors, scalars, ())


@pytest.mark.contract
@pytest.mark.parametrize("backend", backends("mha_masked"))
@pytest.mark.parametrize("case", slow_interpreted(CASES, {"v3-several-tiles"}), ids=str)
def test_contract(case: RaggedCase, backend: str, device: str) -> None:
    check_fp8(mha_masked, quantised(masked(case, device), keys_contiguous=False), backend)


@pytest.mark.contract
@pytest.mark.parametrize("backend", backends("mha_masked"))
def test_contract_of_contiguous_keys(backend: str, device: str) -> None:
    inputs = quantised(masked(CASES[3], device), keys_contiguous=True, outliers=True)
    check_fp8(mha_masked, inputs, backend)


@pytest.mark.contract
@pytest.mark.parametrize("backend", backends("mha_masked"))
def test_a_large_token_leaves_other_requests_alone(backend: str, device: str) -> None:
    """A key and value of 1e6 in the first of three requests: the others get what they get alone."""
    case = RaggedCase("large", (40, 9, 65), (40, 30, 165), E=192, V=128, H=3)
    check_beside_a_large_token(mha_masked, masked(case, device), 0, backend)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("q_scale", None, "q_scale must be given with e4m3 heads, got None"),
        ("k", torch.zeros(62, 4, 24), "k must be torch.float8_e4m3fn like q, got torch.float32"),
        ("v_scale", torch.ones(3, 5), "v_scale must be [B, H] with H=4, got (3, 5)"),
        ("k_scale", torch.ones(4), "k_scale must be [B, H], got (4,)"),
        ("out_dtype", None, "out_dtype must be one of torch.bfloat16"),
    ],
)
def test_bad_input(name: str, value: Any, message: str) -> None:
    inputs = quantised(masked(CASES[0], "cpu"), keys_contiguous=False)
    tensors, scalars = dict(inputs.tensors), dict(inputs.scalars)
    (tensors if name in tensors else scalars)[name] = value
    with pytest.raises(ShapeError) as error:
        Inputs(tensors, scalars, ()).run(mha_masked, backend="auto")
    assert f"mha_masked: {message}" in str(error.value)
