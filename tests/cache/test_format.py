"""Formats: sizes, exact round trips, rounding and saturation."""

from __future__ import annotations

import pytest
import torch

from openmla import FORMATS, ConfigError
from openmla.cache.format import get_format
from openmla.testing import poison

ONE = torch.tensor(1.0)


@pytest.mark.parametrize(
    ("name", "row_bytes"), [("fp32", 2304), ("bf16", 1152), ("fp16", 1152), ("fp8", 576)]
)
def test_row_bytes_at_576(name: str, row_bytes: int) -> None:
    assert FORMATS[name].row_bytes(576) == row_bytes
    assert FORMATS[name].name == name


@pytest.mark.parametrize("name", FORMATS)
def test_every_stored_value_survives_a_round_trip(name: str) -> None:
    """decode then encode is the identity on every bit pattern that is a number."""
    layout = FORMATS[name]
    width = layout.dtype.itemsize
    if width == 4:
        stored = torch.randint(-(2**31), 2**31 - 1, (4096,)).int().view(layout.dtype)
    else:
        raw = {1: torch.uint8, 2: torch.int16}[width]
        stored = torch.arange(256**width).to(raw).view(layout.dtype)
    stored = stored[~stored.to(torch.float32).isnan()]
    scale = torch.tensor(0.125)
    again = layout.encode(layout.decode(stored, scale, torch.float32), scale)
    assert torch.equal(again.view(torch.uint8), stored.view(torch.uint8))


def test_fp8_rounds_to_even_and_saturates() -> None:
    values = torch.tensor([17.0, 19.0, 464.0, 480.0, -1e9, 2.0**-10, 3 * 2.0**-10, 0.0])
    stored = FORMATS["fp8"].encode(values, ONE).float()
    assert stored.tolist() == [16.0, 20.0, 448.0, 448.0, -448.0, 0.0, 2.0**-8, 0.0]


def test_fp8_divides_by_the_scale() -> None:
    """The quotient, not a product with the reciprocal: they round differently."""
    scale = torch.tensor(0.3)
    values = torch.linspace(-150, 150, 4001)
    expected = (values / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(FORMATS["fp8"].encode(values, scale).float(), expected.float())
    decoded = FORMATS["fp8"].decode(expected, scale, torch.float64)
    assert torch.equal(decoded, expected.double() * scale.double())


@pytest.mark.parametrize("name", FORMATS)
def test_write_then_read(name: str) -> None:
    layout = FORMATS[name]
    cache = poison((3, 4, 6), layout.dtype)
    slots = torch.tensor([11, 0, 5])
    rows = torch.randn(3, 6).bfloat16().float()
    layout.write(cache, slots, rows, ONE)
    read = layout.read(cache, slots, ONE, torch.float32)
    assert torch.equal(read, layout.encode(rows, ONE).float())
    untouched = layout.read(cache, torch.tensor([1, 4, 10]), ONE, torch.float32)
    assert untouched.isnan().all()


def test_unknown_format() -> None:
    with pytest.raises(ConfigError, match=r"cache: format 'int4' is not known\. Known: fp32, bf16"):
        get_format("int4")
