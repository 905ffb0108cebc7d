"""quantize_heads: every byte as defined, one value at a time; either contiguity; bad input."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from openmla.errors import ShapeError, UnsupportedError
from openmla.ops import quantize_heads
from openmla.ops.quantize_heads import allocate_heads, cost
from openmla.testing import strided
from tests.ops.contract import backends
from tests.ops.declared import check_declaration

E4M3 = torch.float8_e4m3fn
BACKENDS = backends("quantize_heads")


class Case(NamedTuple):
    name: str
    S: int = 37
    H: int = 3
    P: int = 128
    R: int = 0
    dtype: torch.dtype = torch.bfloat16
    shared: torch.dtype | None = None  # like x
    by_row: bool = False
    keys_contiguous: bool = False

    def __str__(self) -> str:
        return self.name

    def make(self, device: str) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(0)
        x = 5 * torch.randn(self.S, self.H, self.P, generator=generator)
        if self.S > 8:
            x[1] *= 1e-4
            x[2] = 0
            x[3, :, 1], x[4, 1, 0], x[5, 0, 2] = 60000, -torch.inf, torch.nan
        shared = None
        if self.R:
            shared = torch.randn(self.S, self.R, generator=generator).to(self.shared or self.dtype)
        scale = 0.01 + torch.rand(3, self.H, generator=generator)
        scale[1] *= 1e6  # of three requests, whose rows take turns
        requests = torch.arange(self.S) % 3
        return {
            "values": allocate_heads(
                self.S, self.H, self.P + self.R, torch.device(device),
                keys_contiguous=self.keys_contiguous,
            ),
            "row_scale": torch.empty(self.S, self.H, device=device) if self.by_row else None,
            "x": strided(x.to(device, self.dtype)),
            "shared": None if shared is None else shared.to(device),
            "head_scale": None if self.by_row else scale.to(device),
            "requests": None if self.by_row else requests.to(device),
        }  # fmt: skip


CASES = [
    Case("queries", P=192, by_row=True),
    Case("queries-fp16", P=192, by_row=True, dtype=torch.float16),
    Case("keys", R=64),
    Case("keys-of-fp8-rows", R=64, shared=E4M3),
    Case("values", S=130, keys_contiguous=True),
    Case("fp32", P=64, R=32, dtype=torch.float32, by_row=True),
    Case("odd", P=21, R=7, by_row=True, keys_contiguous=True),
    Case("one-row", S=1, H=1, P=1),
    Case("none", S=0),
]


def defined(made: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Bytes and scales, a row at a time, by Python's own numbers where they are finite."""
    x, shared = made["x"].float().cpu(), made["shared"]
    S, H, _ = x.shape
    if shared is not None:
        whole = shared.float().cpu()[:, None].expand(-1, H, -1)
        x = torch.cat([x, whole], dim=2)
    scales = torch.empty(S, H)
    for s in range(S):
        for h in range(H):
            if made["head_scale"] is not None:
                scales[s, h] = made["head_scale"][made["requests"][s], h]
                continue
            largest = max(abs(value) for value in x[s, h].tolist())
            if any(math.isnan(value) or math.isinf(value) for value in x[s, h].tolist()):
                scales[s, h] = math.nan
            else:
                scales[s, h] = 2.0 ** math.ceil(math.log2(max(largest, 2.0**-60) / 448))
    quotients = x * (1 / scales)[:, :, None]
    codes = quotients.clamp(-448, 448).to(E4M3).view(torch.uint8)
    return codes.where(~quotients.isnan(), 0x7F), scales


def run(made: dict[str, Any], backend: str) -> None:
    try:
        quantize_heads(*made.values(), backend=backend)
    except UnsupportedError as reason:
        pytest.skip(str(reason).splitlines()[1].strip())


@pytest.mark.contract
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_contract(case: Case, backend: str, device: str) -> None:
    made = case.make(device)
    run(made, backend)
    codes, scales = defined(made)
    assert torch.equal(made["values"].view(torch.uint8).cpu(), codes)
    if case.by_row:
        torch.testing.assert_close(made["row_scale"].cpu(), scales, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_else_is_written(backend: str, device: str) -> None:
    """Rows behind those of the call, and the pitch behind contiguous keys."""
    made = Case("values", S=21, keys_contiguous=True).make(device)
    whole = torch.zeros(3, 128, 48, dtype=torch.uint8, device=device)
    made["values"] = whole.view(E4M3)[:, :, :21].permute(2, 0, 1)
    run(made, backend)
    assert (whole[:, :, 21:] == 0).all() and (whole[:, :, 6:21] != 0).any()


def test_values_saturate() -> None:
    """60000 under a scale of 1 is 448, not NaN as a bare cast makes it."""
    values = torch.empty(1, 1, 2, dtype=E4M3)
    x = torch.tensor([[[60000.0, -1e30]]])
    quantize_heads(values, None, x, None, torch.ones(1, 1), torch.zeros(1, dtype=torch.int64))
    assert values.float().flatten().tolist() == [448, -448]


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("values", lambda t: t.float(), "values must be torch.float8_e4m3fn, got torch.float32"),
        ("head_scale", lambda t: None, "give row_scale or head_scale, got neither"),
        ("requests", lambda t: None, "requests must be given with head_scale, got None"),
        ("requests", lambda t: t + 1, "requests must be rows of head_scale (0..2), got 1..3"),
        ("requests", lambda t: t - 1, "requests must be rows of head_scale (0..2), got -1..1"),
        ("row_scale", lambda t: torch.ones(37, 3), "give row_scale or head_scale, got both"),
    ],
)
def test_bad_input(name: str, change: Callable[[Any], Any], message: str) -> None:
    made = Case("keys", R=64).make("cpu")
    made["values"].view(torch.uint8).fill_(0xAA)
    before = made["values"]
    made[name] = change(made[name])
    with pytest.raises(ShapeError) as error:
        quantize_heads(*made.values())
    assert f"quantize_heads: {message}" in str(error.value)
    assert (before.view(torch.uint8) == 0xAA).all()


def test_declaration(device: str) -> None:
    check_declaration(quantize_heads, Case("queries", P=192, by_row=True).make(device), "x")
    check_declaration(quantize_heads, Case("keys", R=64).make(device), "x")


def test_cost() -> None:
    found = cost(10, H=2, P=8, R=4, itemsize=2)
    assert found.bytes == 10 * (2 * 8 * 2 + 4 * 2 + 2 * 12) and found.flops == 2 * 10 * 2 * 12
