"""Formats: sizes, exact round trips, rounding and saturation."""

from __future__ import annotations

import math
import struct

import pytest
import torch

from openmla import FORMATS, ConfigError, ShapeError
from openmla.cache.format import check_pages, get_format, power_of_two
from openmla.testing import poison

ONE = torch.tensor(1.0)
PLAIN = [name for name, layout in FORMATS.items() if not layout.packed]


@pytest.mark.parametrize(
    ("name", "row_bytes"),
    [
        ("fp32", 2304),
        ("bf16", 1152),
        ("fp16", 1152),
        ("fp8", 576),
        ("fp8_ds_mla", 656),
        ("fp8_ds_mla_exact", 656),
    ],
)
def test_row_bytes_at_576(name: str, row_bytes: int) -> None:
    assert FORMATS[name].row_bytes(576) == row_bytes
    assert FORMATS[name].name == name


@pytest.mark.parametrize("name", PLAIN)
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
    again = layout.encode(layout.decode(stored, scale, torch.float32, 1), scale)
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
    decoded = FORMATS["fp8"].decode(expected, scale, torch.float64, 1)
    assert torch.equal(decoded, expected.double() * scale.double())


@pytest.mark.parametrize("name", PLAIN)
def test_write_then_read(name: str) -> None:
    layout = FORMATS[name]
    cache = poison((3, 4, 6), layout.dtype)
    slots = torch.tensor([11, 0, 5])
    rows = torch.randn(3, 6).bfloat16().float()
    layout.write(cache, slots, rows, ONE)
    read = layout.read(cache, slots, ONE, torch.float32, 6)
    assert torch.equal(read, layout.encode(rows, ONE).float())
    untouched = layout.read(cache, torch.tensor([1, 4, 10]), ONE, torch.float32, 6)
    assert untouched.isnan().all()


def fp8_byte(value: float) -> int:
    return int(torch.tensor(value).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8))


def group_scale(values: list[float], exact: bool, floor: float) -> float:
    """By the definition, in double precision; the data keeps clear of ties."""
    scale = max(max(map(abs, values)) / 448, floor)
    return scale if exact else 2.0 ** math.ceil(math.log2(scale))


@pytest.mark.parametrize("name", ["fp8_ds_mla", "fp8_ds_mla_exact"])
@pytest.mark.parametrize(("C", "R"), [(512, 64), (128, 32), (256, 0)])
def test_packed_latent_bytes(name: str, C: int, R: int) -> None:
    """656 bytes for 512 + 64: values, a float32 scale per 128 of them, rope in bf16."""
    generator = torch.Generator().manual_seed(C)
    rows = torch.randn(5, C + R, generator=generator) * 10.0 ** torch.arange(-3, 2)[:, None]
    rows[1, :128] = 0
    layout = FORMATS[name]
    cache = poison((4, 3 * layout.width(C + R) + 24), torch.uint8)  # padded pages
    pages = cache[:, : 3 * layout.width(C + R)].unflatten(1, (3, -1))
    slots = torch.tensor([11, 0, 5, 4, 7])
    layout.write(pages, slots, rows, ONE)
    for slot, row in zip(slots.tolist(), rows.tolist(), strict=True):
        scales, values = [], b""
        for start in range(0, C, 128):
            group = row[start : start + 128]
            floor = 2.0**-126 if name.endswith("exact") else 1e-4
            scale = group_scale(group, name.endswith("exact"), floor)
            scales.append(torch.tensor(scale, dtype=torch.float32).item())
            values += bytes(fp8_byte(value / scales[-1]) for value in group)
        rope = torch.tensor(row[C:]).bfloat16().view(torch.uint8).numpy().tobytes()
        wanted = values + struct.pack(f"<{len(scales)}f", *scales) + rope
        stored = pages[slot // 3, slot % 3].numpy().tobytes()
        same = sum(a == b for a, b in zip(stored, wanted, strict=True))
        # a quotient in float32 may fall on the other side of a rounding edge than in double
        assert same >= len(wanted) - (2 if name.endswith("exact") else 0)
        assert stored[C : C + 4 * len(scales)] == wanted[C : C + 4 * len(scales)]
    untouched = [slot for slot in range(12) if slot not in slots.tolist()]
    assert (pages.flatten(0, 1)[untouched] == 255).all() and (
        cache[:, pages.shape[2] * 3 :] == 255
    ).all()
    read = layout.read(pages, slots, ONE, torch.float32, C + R)
    assert (read - rows)[:, :C].abs().max() <= rows.abs().max() / 16 and not read[1, :128].any()
    assert torch.equal(read[:, C:], rows[:, C:].bfloat16().float())


@pytest.mark.parametrize("name", ["index_fp8", "index_fp8_exact"])
@pytest.mark.parametrize(("DI", "BS"), [(128, 64), (32, 4), (256, 2)])
def test_packed_index_bytes(name: str, DI: int, BS: int) -> None:
    """132 bytes for a key of 128: all values of a block first, then all its scales."""
    layout, groups = FORMATS[name], max(DI // 128, 1)
    assert layout.row_bytes(DI) == DI + 4 * groups
    assert (DI, BS) != (128, 64) or BS * layout.row_bytes(DI) == 8448
    rows = torch.randn(3, DI, generator=torch.Generator().manual_seed(DI))
    rows[2] = 0
    size = BS * layout.width(DI)
    cache = poison((3, size + 16), torch.uint8)
    pages = cache[:, :size].unflatten(1, (BS, -1))
    slots = torch.tensor([2 * BS + 1, 0, BS - 1])
    layout.write(pages, slots, rows, ONE)
    for slot, row in zip(slots.tolist(), rows.tolist(), strict=True):
        page = cache[slot // BS].numpy().tobytes()
        offset, width = slot % BS, DI // groups
        for group in range(groups):
            part = row[group * width : (group + 1) * width]
            scale = group_scale(part, name.endswith("exact"), 1e-4 / 448)
            at = BS * DI + (offset * groups + group) * 4
            stored = struct.unpack("<f", page[at : at + 4])[0]
            assert stored == torch.tensor(scale, dtype=torch.float32).item()
            values = page[offset * DI + group * width : offset * DI + (group + 1) * width]
            wanted = [fp8_byte(value / stored) for value in part]
            assert sum(a != b for a, b in zip(values, wanted, strict=True)) <= 1
    assert (cache[1:2] == 255).all() and (cache[:, size:] == 255).all()
    read = layout.read(pages, slots, ONE, torch.float64, DI)
    assert (read - rows).abs().max() <= rows.abs().max() / 14


def test_power_of_two_is_the_next_one() -> None:
    exponents = torch.arange(-100, 100).float()
    exact = torch.exp2(exponents)
    assert torch.equal(power_of_two(exact), exact)
    above = torch.nextafter(exact, torch.tensor(torch.inf))
    assert torch.equal(power_of_two(above), 2 * exact)
    below = torch.nextafter(exact, torch.tensor(0.0))
    assert torch.equal(power_of_two(below), exact)


def test_packed_formats_say_what_they_need() -> None:
    with pytest.raises(
        ConfigError, match="fp8_ds_mla needs latents of at least 128 values, got 96"
    ):
        FORMATS["fp8_ds_mla"].width(96)
    with pytest.raises(ConfigError, match="index_fp8 needs keys of at most 128 values"):
        FORMATS["index_fp8"].width(200)
    with pytest.raises(
        ConfigError, match=r"'index_fp8' is not known for latent rows\. Known: fp32"
    ):
        get_format("index_fp8", "latent")
    pages = torch.zeros(2, 4, 40, dtype=torch.uint8)[:, :, :36]
    with pytest.raises(ShapeError, match="cache: each block must be contiguous for format index_"):
        check_pages("cache", pages, "index_fp8")


def test_unknown_format() -> None:
    with pytest.raises(ConfigError, match=r"cache: format 'int4' is not known\. Known: fp32, bf16"):
        get_format("int4")
