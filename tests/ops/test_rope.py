"""rope: both pairings against complex numbers, the inverse, views, and bad input."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from openmla.errors import ShapeError, UnsupportedError
from openmla.ops import rope
from openmla.ops.rope import cost
from openmla.testing import Inputs, out_budget, strided
from tests.ops.contract import backends, run_or_skip
from tests.ops.declared import check_declaration


def make(
    *,
    T: int = 7,
    H: int = 17,
    R: int = 8,
    padding: int = 2,
    dtype: torch.dtype = torch.bfloat16,
    pairing: str = "pairs",
    inverse: bool = False,
    device: str = "cpu",
) -> Inputs:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(T + padding, H, R, generator=generator)
    angles = torch.outer(torch.arange(50.0), 10000.0 ** (-torch.arange(0, R, 2) / max(R, 1)))
    table = 1.2 * torch.cat([angles.cos(), angles.sin()], dim=1)
    positions = torch.randint(0, 50, (T,), generator=generator)
    tensors = {
        "x": strided(x.to(device, dtype)),
        "positions": positions.to(device),
        "table": table.to(device),
    }
    return Inputs(tensors, {"pairing": pairing, "inverse": inverse}, ("x",))


def rotated(inputs: Inputs, backend: str) -> Tensor:
    run_or_skip(rope, inputs, backend)
    return inputs["x"]


@pytest.mark.contract
@pytest.mark.parametrize("backend", backends("rope"))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("inverse", [False, True], ids=["forward", "inverse"])
@pytest.mark.parametrize("pairing", ["pairs", "halves"])
@pytest.mark.parametrize(
    "shape", [(7, 17, 8), (3, 1, 64), (5, 4, 32), (2, 70, 96), (3, 2, 2), (0, 2, 8)], ids=str
)
def test_contract(
    shape: tuple[int, int, int],
    pairing: str,
    inverse: bool,
    dtype: torch.dtype,
    backend: str,
    device: str,
) -> None:
    T, H, R = shape
    inputs = make(T=T, H=H, R=R, dtype=dtype, pairing=pairing, inverse=inverse, device=device)
    before = inputs["x"].clone()
    actual = rotated(inputs.clone(), backend)
    exact = rotated(inputs.double(), "reference")
    peer = rotated(inputs.clone(), "reference")
    assert out_budget(actual, exact, peer) <= 1
    assert torch.equal(actual[T:], before[T:])  # rows without a position stay


@pytest.mark.parametrize("pairing", ["pairs", "halves"])
@pytest.mark.parametrize("inverse", [False, True])
def test_reference_equals_complex_numbers(pairing: str, inverse: bool) -> None:
    inputs = make(dtype=torch.float64, pairing=pairing, inverse=inverse)
    x, T, R = inputs["x"].clone(), 7, 8
    cos, sin = inputs["table"].double()[inputs["positions"]].chunk(2, dim=-1)
    turn = torch.complex(cos, -sin if inverse else sin)[:, None]
    if pairing == "pairs":
        product = torch.view_as_complex(x[:T].reshape(T, 17, R // 2, 2).contiguous()) * turn
        expected = torch.view_as_real(product).flatten(2)
    else:
        product = torch.complex(x[:T, :, : R // 2], x[:T, :, R // 2 :]) * turn
        expected = torch.cat([product.real, product.imag], dim=-1)
    torch.testing.assert_close(rotated(inputs, "reference")[:T], expected, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("backend", backends("rope"))
@pytest.mark.parametrize("pairing", ["pairs", "halves"])
def test_inverse_undoes(pairing: str, backend: str, device: str) -> None:
    inputs = make(dtype=torch.float32, pairing=pairing, device=device)
    inputs.tensors["table"] = inputs["table"] / 1.2
    before = inputs["x"].clone()
    rotated(inputs, backend)
    assert not torch.allclose(inputs["x"][:7], before[:7], atol=0.1)
    rotated(Inputs(inputs.tensors, {"pairing": pairing, "inverse": True}, ()), backend)
    torch.testing.assert_close(inputs["x"], before)


@pytest.mark.parametrize("backend", backends("rope"))
@pytest.mark.parametrize("pairing", ["pairs", "halves"])
@pytest.mark.parametrize("wide", ["x", "table"])
def test_float64_is_kept(wide: str, pairing: str, backend: str, device: str) -> None:
    inputs = make(dtype=torch.float32, pairing=pairing, device=device)
    inputs.tensors[wide] = inputs[wide].double()
    expected = rotated(inputs.clone(), "reference")
    eps = torch.finfo(expected.dtype).eps
    torch.testing.assert_close(rotated(inputs, backend), expected, rtol=4 * eps, atol=4 * eps)


@pytest.mark.parametrize("backend", backends("rope"))
def test_slice_of_wider_heads(backend: str, device: str) -> None:
    """Rotating part of a head is passing that part; the rest keeps its bytes."""
    inputs = make(dtype=torch.float32, padding=0, device=device)
    heads = torch.randn(7, 17, 20, device=device)
    before = heads.clone()
    part = Inputs({**inputs.tensors, "x": heads[:, :, 9:17]}, inputs.scalars, ())
    rotated(part, backend)
    assert torch.equal(heads[:, :, :9], before[:, :, :9])
    assert torch.equal(heads[:, :, 17:], before[:, :, 17:])
    alone = Inputs({**inputs.tensors, "x": before[:, :, 9:17].contiguous()}, inputs.scalars, ())
    assert torch.equal(heads[:, :, 9:17], rotated(alone, backend))


def test_declaration(device: str) -> None:
    check_declaration(rope, make(device=device), "x table")


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("x", lambda t: t[:3], "positions must be at most T=3, got 7"),
        ("positions", lambda t: t + 40, "positions must be within the table's 0..49, got"),
        ("positions", lambda t: t - 40, "positions must be within the table's 0..49, got"),
        ("table", lambda t: t.bfloat16(), "table must be float32 or float64"),
        ("pairing", lambda _: "neox", "pairing must be pairs or halves, got 'neox'"),
    ],
)
def test_bad_input_changes_nothing(
    name: str, change: Callable[[object], object], message: str
) -> None:
    inputs = make()
    before = inputs["x"].clone()
    tensors, scalars = dict(inputs.tensors), dict(inputs.scalars)
    target = tensors if name in tensors else scalars
    target[name] = change(target[name])  # type: ignore[assignment]
    with pytest.raises(ShapeError) as error:
        Inputs(tensors, scalars, ()).run(rope, backend="reference")
    assert f"rope: {message}" in str(error.value)
    assert torch.equal(inputs["x"], before)


def test_a_backend_without_the_op_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="sdpa       has no rope"):
        make().run(rope, backend="sdpa")


def test_odd_width_is_refused() -> None:
    x, positions, table = torch.zeros(1, 1, 3), torch.zeros(1, dtype=torch.int64), torch.ones(2, 3)
    with pytest.raises(ShapeError, match=r"x must be \[T, H, R\] with R even, got \(1, 1, 3\)"):
        rope(x, positions, table, pairing="pairs")


def test_cost() -> None:
    assert cost(3, H=2, R=4, itemsize=2).bytes == 3 * (2 * 2 * 4 * 2 + 16 + 8)
