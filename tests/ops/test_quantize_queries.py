"""quantize_queries: byte for byte as defined, outliers and NaN, and bad input."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from openmla.errors import ShapeError, UnsupportedError
from openmla.ops import quantize_queries
from openmla.ops.quantize_queries import cost
from openmla.testing import strided
from tests.ops.contract import backends
from tests.ops.declared import check_declaration

SHAPES = [(0, 3, 32, 8), (1, 1, 512, 64), (5, 3, 40, 24), (3, 17, 512, 64), (2, 2, 32, 0)]
HARD = (0.0, -0.0, 1e-30, 448.0, 465.0, 1e30, -3e38, 2.0**-10, 17.0, -17.5)


def made(T: int, H: int, C: int, R: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """Random parts, strided; the first row has values at the edges of e4m3."""
    generator = torch.Generator().manual_seed(0)
    latent, q_pe = (torch.randn(T, H, n, generator=generator) for n in (C, R))
    if T:
        latent[0, 0, : len(HARD)] = torch.tensor(HARD)
        latent[-1, -1] = 0
        q_pe[-1, -1] = 0
    return strided(latent.to(device, dtype)), strided(q_pe.to(device, dtype))


def nearest(value: float) -> float:
    """The e4m3 number a float32 rounds to, by looking at all of them."""
    codes = torch.arange(256, dtype=torch.uint8)
    numbers = codes[(codes & 0x7F) != 0x7F].view(torch.float8_e4m3fn).double()
    distance = (numbers - min(max(value, -448.0), 448.0)).abs()
    near = numbers[distance == distance.min()].unique()
    if len(near) == 1:
        return float(near[0])
    step = float(near[1] - near[0])  # of two the even one, which is a multiple of twice the step
    return float(near[0] if near[0] % (2 * step) == 0 else near[1])


def run(*args: Tensor | None, backend: str) -> tuple[Tensor, Tensor]:
    try:
        return quantize_queries(*args, backend=backend)  # type: ignore[arg-type]
    except UnsupportedError as reason:
        pytest.skip(str(reason).splitlines()[1].strip())


@pytest.mark.contract
@pytest.mark.parametrize("backend", backends("quantize_queries"))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("given", [False, True])
def test_contract(given: bool, dtype: torch.dtype, backend: str, device: str) -> None:
    """The same bytes from every backend."""
    for shape in SHAPES:
        parts = made(*shape, dtype, device)
        q_scale = torch.tensor(0.037, device=device) if given else None
        q, scale = run(*parts, q_scale, backend=backend)
        wanted, wanted_scale = quantize_queries(*parts, q_scale, backend="reference")
        assert q.dtype == torch.float8_e4m3fn and scale.dtype == torch.float32
        assert q.is_contiguous() and scale.is_contiguous()
        assert torch.equal(scale, wanted_scale)
        assert torch.equal(q.view(torch.uint8), wanted.view(torch.uint8))


def test_reference_one_value_at_a_time() -> None:
    latent, q_pe = made(3, 2, 16, 4, torch.float32, "cpu")
    for q_scale in (None, torch.tensor(0.25)):
        q, scale = quantize_queries(latent, q_pe, q_scale, backend="reference")
        for t in range(3):
            for h in range(2):
                row = [*latent[t, h].tolist(), *q_pe[t, h].tolist()]
                wanted = max(1e-10, *map(abs, row)) / 448 if q_scale is None else 0.25
                assert math.isclose(float(scale[t, h]), wanted, rel_tol=1e-6)
                inverse = 1 / scale[t, h]
                for value, found in zip(row, q[t, h].float().tolist(), strict=True):
                    assert found == nearest(float(torch.tensor(value) * inverse))


@pytest.mark.parametrize("backend", backends("quantize_queries"))
def test_nan_stays(backend: str, device: str) -> None:
    """NaN reaches whoever reads its token and head, and nobody else."""
    latent, q_pe = made(3, 2, 32, 8, torch.bfloat16, device)
    latent[1, 0, 5] = torch.nan
    q, scale = run(latent, q_pe, None, backend=backend)
    nan = (q.float() * scale[..., None]).isnan()
    assert nan[1, 0].all() and nan.sum() == 40
    q, scale = run(latent, q_pe, torch.ones((), device=device), backend=backend)
    assert q.float().isnan().nonzero().tolist() == [[1, 0, 5]]


def test_bad_input() -> None:
    latent, q_pe = torch.zeros(2, 3, 32), torch.zeros(2, 3, 8)
    with pytest.raises(ShapeError, match=r"q_pe must be \[T, H, R\] with T=2"):
        quantize_queries(latent, q_pe[:1])
    with pytest.raises(ShapeError, match="latent must be fp16, bf16"):
        quantize_queries(latent.to(torch.float8_e4m3fn), q_pe)
    with pytest.raises(ShapeError, match=r"q_scale must be \[\]"):
        quantize_queries(latent, q_pe, torch.ones(2))
    with pytest.raises(ShapeError, match="q_scale must be float32"):
        quantize_queries(latent, q_pe, torch.ones((), dtype=torch.float64))
    number: Any = 1.0
    with pytest.raises(
        ShapeError, match=r"quantize_queries: q_scale must be a tensor, got float\."
    ):
        quantize_queries(latent, q_pe, number)


def test_declaration(device: str) -> None:
    latent, q_pe = made(3, 2, 32, 8, torch.bfloat16, device)
    check_declaration(quantize_queries, {"latent": latent, "q_pe": q_pe}, "latent q_pe")


def test_cost() -> None:
    assert cost(2, H=3, D=40, itemsize=2).bytes == 2 * 3 * (40 * 3 + 4)
