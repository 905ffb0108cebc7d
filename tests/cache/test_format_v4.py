"""fp8_dsv4: every byte against integers and fractions, at V4's offsets, and no byte more."""

from __future__ import annotations

import math
import struct
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

from openmla import FORMATS, ConfigError, ShapeError
from openmla.cache.format import check_pages, get_format
from openmla.testing import poison, poisoned_memory

V4 = FORMATS["fp8_dsv4"]
ONE = torch.tensor(1.0)
FLOOR = Fraction(float(torch.tensor(1e-4)))  # 1e-4 as float32 has it
LOWEST_BYTE = 105
LARGEST = 247 * 2.0**120  # from 248 on, fp8 rounds up to what float32 has no number for


def bits_of(value: float, *, exponent_bits: int, mantissa_bits: int) -> int:
    """A number's sign, exponent and mantissa as an integer; all steps are exact but one.

    round() takes ties to even, as the formats do.
    """
    bias = 2 ** (exponent_bits - 1) - 1
    exponent = 1 - bias  # of zero, and of all that is too small to be normal
    if value:
        exponent = max(exponent, math.frexp(value)[1] - 1)
    whole = round(math.ldexp(abs(value), mantissa_bits - exponent))
    # a mantissa that rounds up to the next power of two carries into the exponent by itself
    size = whole + ((exponent + bias - 1) << mantissa_bits)
    return size | (math.copysign(1, value) < 0) << (exponent_bits + mantissa_bits)


def bf16_bits(value: float) -> int:
    return bits_of(value, exponent_bits=8, mantissa_bits=7)


def fp8_bits(value: float) -> int:
    return bits_of(value, exponent_bits=4, mantissa_bits=3)


def rounded_to_bf16(value: float) -> float:
    number: float = struct.unpack("<f", struct.pack("<I", bf16_bits(value) << 16))[0]
    return number


def scale_byte(amax: Fraction) -> int:
    """127 + e for the least e with 448 * 2^e >= max(amax, 1e-4): no logarithm, no rounding."""
    e = -127
    while 448 * Fraction(2) ** e < max(amax, FLOOR):
        e += 1
    return e + 127


def row_bytes(row: Tensor) -> tuple[bytes, bytes]:
    """Value bytes and scale bytes of one row, by the definition."""
    rounded = [rounded_to_bf16(value) for value in row.tolist()]
    plain, rope = rounded[:-64], rounded[-64:]
    values, scales = b"", b""
    for start in range(0, len(plain), 64):
        group = plain[start : start + 64]
        byte = scale_byte(max(abs(Fraction(value)) for value in group))
        scales += bytes([byte])
        scaled = [value * 2.0 ** (127 - byte) for value in group]  # exact: a power of two
        values += bytes(fp8_bits(max(min(value, 448.0), -448.0)) for value in scaled)
    values += b"".join(bf16_bits(value).to_bytes(2, "little") for value in rope)
    return values, scales + b"\0" * (-len(scales) % 8)


def made_rows(n: int, D: int) -> Tensor:
    """Rows of very different sizes, float32 that bf16 cannot hold, signs, zeros, ties."""
    generator = torch.Generator().manual_seed(D)
    rows = torch.randn(n, D, generator=generator) * 10.0 ** torch.arange(-7, n - 7)[:, None]
    rows[n // 2, :64] = 0
    rows[n // 2, -64] = -0.0
    rows[0, :D:7] = 1 + 2.0**-8  # halfway between two bf16
    rows[0, 1:D:7] = 1 + 3 * 2.0**-8
    return rows


def made_pages(N: int, BS: int, D: int) -> tuple[Tensor, Tensor]:
    """All bytes [N, stride] of NaN, and the cache [N, BS, W] in them; another page comes before."""
    data = poison((N + 1, V4.page_width(D, BS)), torch.uint8)[1:]
    return data, data[:, : BS * V4.width(D)].unflatten(1, (BS, -1))


@pytest.mark.parametrize(
    ("D", "row", "values"), [(512, 584, 576), (128, 200, 192), (192, 264, 256), (640, 720, 704)]
)
def test_row_and_page_bytes_follow_the_layout(D: int, row: int, values: int) -> None:
    assert V4.row_bytes(D) == V4.width(D) == row == values + 8 * -(-(D // 64 - 1) // 8)
    assert V4.packed and V4.holds == "latent"
    for BS in (1, 2, 3, 16, 64, 256):
        width = V4.page_width(D, BS)
        assert width % values == 0 and 0 <= width - BS * row < values


@pytest.mark.parametrize(("BS", "stride"), [(64, 37440), (2, 1728), (16, 9792)])
def test_strides_of_v4(BS: int, stride: int) -> None:
    """Multiples of 576: what the kernels' copy engine steps by."""
    assert V4.page_width(512, BS) == stride


@pytest.mark.parametrize(
    ("D", "BS"), [(512, 2), (512, 16), (512, 64), (128, 3), (192, 5), (640, 2)]
)
def test_bytes_and_where_they_are(D: int, BS: int) -> None:
    """Values at 576 * e, rope at 448 in them, scales at 576 * BS + 8 * e; all else stays."""
    n, P = 11, D - 64
    rows = made_rows(n, D)
    data, cache = made_pages(9, BS, D)
    slots = torch.randperm(9 * BS, generator=torch.Generator().manual_seed(BS))[:n]
    wanted = data.clone()
    for slot, row in zip(slots.tolist(), rows, strict=True):
        (block, e), (values, scales) = divmod(slot, BS), row_bytes(row)
        width, tail = len(values), len(scales)
        assert width == P + 128 and (D != 512 or (width, tail) == (576, 8))
        wanted[block, width * e : width * (e + 1)] = torch.tensor(list(values))
        first = width * BS + tail * e
        wanted[block, first : first + tail] = torch.tensor(list(scales))
    V4.write(cache, slots, rows, ONE)
    assert torch.equal(data, wanted)


def test_rope_is_little_endian_bf16_behind_the_values() -> None:
    """One entry of 512 spelled out."""
    row = torch.zeros(1, 512)
    row[0, 64:128] = 448.0
    row[0, 448], row[0, 511] = 1.0, -2.5
    data, cache = made_pages(1, 2, 512)
    V4.write(cache, torch.tensor([1]), row, ONE)
    entry = data[0, 576:1152].tolist()
    assert entry[:64] == [0x00] * 64 and entry[64:128] == [0x7E] * 64
    assert entry[448:450] == [0x80, 0x3F] and entry[574:576] == [0x20, 0xC0]
    assert entry[450:574] == [0] * 124
    assert data[0, 1152:1160].tolist() == [255] * 8  # the scales of entry 0
    assert data[0, 1160:1168].tolist() == [105, 127, 105, 105, 105, 105, 105, 0]


@pytest.mark.parametrize("D", [128, 192, 512])
def test_single_rows_and_repeats(D: int) -> None:
    """A later write takes a slot over; nothing to write writes nothing."""
    data, cache = made_pages(3, 4, D)
    before = data.clone()
    V4.write(cache, torch.zeros(0, dtype=torch.int64), torch.zeros(0, D), ONE)
    assert torch.equal(data, before)
    rows = made_rows(8, D)
    V4.write(cache, torch.tensor([5]), rows[1:2], ONE)
    V4.write(cache, torch.tensor([5]), rows[2:3], ONE)
    other_data, other = made_pages(3, 4, D)
    V4.write(other, torch.tensor([5]), rows[2:3], ONE)
    assert torch.equal(data, other_data)
    assert V4.read(cache, torch.zeros(0, dtype=torch.int64), ONE, torch.float32, D).shape == (0, D)


def group_of(amax: float) -> Tensor:
    row = torch.zeros(1, 128)
    row[0, 17] = amax
    return row


@pytest.mark.parametrize("negative", [False, True], ids=["plus", "minus"])
def test_scale_is_the_next_power_of_two(negative: bool) -> None:
    """At 448 * 2^e and one bf16 to either side, for every e there is."""
    for e in range(-22, 119):
        edge = torch.tensor(448 * 2.0**e).bfloat16()
        bits = edge.view(torch.int16)
        for step in (-1, 0, 1):
            amax = float((bits + step).view(torch.bfloat16))
            stored = V4.encode(group_of(-amax if negative else amax), ONE)[0]
            byte = scale_byte(Fraction(amax))
            assert stored[192] == byte == max(e + 127 + (step > 0), LOWEST_BYTE)
            assert not stored[193:].any()
    assert V4.encode(group_of(LARGEST), ONE)[0, 192] == scale_byte(Fraction(LARGEST)) == 127 + 120


@pytest.mark.parametrize("amax", [0.0, 1e-30, 1e-8, 9.9e-5, 1e-4, 448 * 2.0**-22])
def test_lowest_scale(amax: float) -> None:
    stored = V4.encode(group_of(amax), ONE)[0]
    assert stored[192] == LOWEST_BYTE == scale_byte(Fraction(0))
    assert stored[17] == fp8_bits(rounded_to_bf16(amax) * 2**22)


def test_rounded_to_bf16_first() -> None:
    """Once on the way to fp8: values that a direct rounding sends elsewhere, and a scale too."""
    # 1.0625 lies halfway between two fp8; float32 has it a little above, bf16 has it exactly
    row = torch.zeros(1, 128)
    row[0, 0], row[0, 1] = 448.0, 1.0625 + 2.0**-20
    stored = V4.encode(row, ONE)[0]
    assert stored[1] == fp8_bits(1.0) != fp8_bits(1.0625 + 2.0**-20)
    # 448 and a little is 448 in bf16: no need for the next scale
    assert V4.encode(group_of(448 + 2.0**-10), ONE)[0, 192] == 127
    assert V4.encode(group_of(450.0), ONE)[0, 192] == 128
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        narrow = made_rows(9, 128).clamp(-6e4, 6e4).to(dtype)
        assert torch.equal(V4.encode(narrow, ONE), V4.encode(narrow.float(), ONE))


@pytest.mark.parametrize("value", [LARGEST, 3e38, 1e30, 464.0, 480.0])
def test_large_values_stay_finite(value: float) -> None:
    """A scale always suffices, so the largest of a group lands in the top octave of fp8."""
    row = torch.full((1, 128), value)
    row[0, ::2] = -value
    stored = V4.encode(row, ONE)[0]
    assert {int(byte) & 0x7F for byte in stored[:64]} <= set(range(0x76, 0x7F))
    read = V4.decode(stored, ONE, torch.float32, 128)
    assert read.isfinite().all()
    assert ((read[:64] - row[0, :64]) / value).abs().max() <= 1 / 16
    assert torch.equal(read[64:], row[0, 64:].bfloat16().float())


def test_rounding_is_to_nearest_even() -> None:
    """Every fp8 value and every middle between two, under three scales."""
    finite = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (finite[1:] + finite[:-1]) / 2
    for scale in (1.0, 2.0**-22, 2.0**100):
        groups = torch.cat([finite, middles, -finite, -middles])
        for part in groups.split(63):
            row = torch.zeros(1, 128)
            row[0, 0] = 448 * scale
            row[0, 1 : 1 + len(part)] = part * scale
            stored = V4.encode(row, ONE)[0]
            wanted = [fp8_bits(value) for value in part.tolist()]
            assert stored[1 : 1 + len(part)].tolist() == wanted


def test_groups_are_on_their_own() -> None:
    """NaN or infinity in one row or one group changes no other byte."""
    clean = made_rows(8, 512)
    dirty = clean.clone()
    dirty[3] = torch.nan
    dirty[5, 64:128] = torch.nan
    dirty[6, 128:192] = torch.inf
    want, got = V4.encode(clean, ONE), V4.encode(dirty, ONE)
    others = [0, 1, 2, 4, 7]
    assert torch.equal(want[others], got[others])
    for row, start in ((5, 64), (6, 128)):
        same = torch.ones(584, dtype=torch.bool)
        same[start : start + 64] = False
        same[576 + start // 64] = False
        assert torch.equal(want[row][same], got[row][same])


@pytest.mark.parametrize("D", [128, 192, 512])
def test_read_takes_only_what_is_asked(D: int) -> None:
    """Everything not asked for is NaN, the padding behind the scales too."""
    rows = made_rows(6, D)
    _, cache = made_pages(4, 5, D)
    slots = torch.tensor([19, 0, 7, 5, 4, 11])
    V4.write(cache, slots, rows, torch.tensor(torch.nan))  # kv_scale is not looked at
    read = V4.read(cache, slots, torch.tensor(torch.nan), torch.float32, D)
    assert read.isfinite().all()
    backwards = V4.read(cache, slots.flip(0), ONE, torch.float32, D)
    assert torch.equal(backwards.flip(0), read)
    untouched = [slot for slot in range(20) if slot not in slots.tolist()]
    left = V4.read(cache, torch.tensor(untouched), ONE, torch.float32, D)
    assert left.isnan().all()


def test_every_pair_of_value_and_scale_is_exact_in_bf16() -> None:
    """Decoding to float32, to bf16 and to float64 gives the same numbers, bit for bit."""
    finite = [byte for byte in range(256) if byte & 0x7F != 0x7F]
    stored = torch.zeros(256, 4, 200 + 64, dtype=torch.uint8)  # D = 192: two groups
    for k, start in enumerate(range(0, 254, 64)):
        part = torch.tensor(finite[start : start + 64], dtype=torch.uint8)
        stored[:, k, : len(part)] = part
    scales = torch.arange(LOWEST_BYTE, 247, dtype=torch.uint8)  # above it 448 overflows float32
    numbers = stored[: len(scales)]
    numbers[..., 256] = scales[:, None]
    wide = V4.decode(numbers, ONE, torch.float32, 192)
    narrow = V4.decode(numbers, ONE, torch.bfloat16, 192)
    exact = V4.decode(numbers, ONE, torch.float64, 192)
    assert narrow.dtype == torch.bfloat16 and wide.isfinite().all()
    assert torch.equal(narrow.float().view(torch.int32), wide.view(torch.int32))
    assert torch.equal(exact, wide.double())
    for byte in (LOWEST_BYTE, 127, 200):
        values = exact[byte - LOWEST_BYTE, 0, :64].tolist()
        for code, value in zip(finite[:64], values, strict=True):
            assert value == Fraction(2) ** (byte - 127) * fp8_value(code)


def fp8_value(code: int) -> Fraction:
    """An e4m3 byte by its fields."""
    sign, exponent, mantissa = code >> 7, (code >> 3) & 15, code & 7
    size = Fraction(mantissa, 8) * Fraction(2) ** -6
    if exponent:
        size = (1 + Fraction(mantissa, 8)) * Fraction(2) ** (exponent - 7)
    return -size if sign else size


@pytest.mark.parametrize("D", [128, 192, 512])
def test_what_was_read_is_written_the_same(D: int) -> None:
    """Rows that went through the cache once go through it again without change of value."""
    once = V4.decode(V4.encode(made_rows(12, D), ONE), ONE, torch.float32, D)
    again = V4.decode(V4.encode(once, ONE), ONE, torch.float32, D)
    assert torch.equal(once, again)
    assert torch.equal(V4.encode(once.bfloat16(), ONE), V4.encode(once, ONE))


def test_blocks_above_57344() -> None:
    """Past byte 2^31 of the cache. Memory is reserved, hardly any of it is touched."""
    N, BS, D = 57_400, 64, 512
    stride = V4.page_width(D, BS)
    assert 57_360 * stride > 2**31
    with poisoned_memory(False):
        try:
            data = torch.empty((N, stride), dtype=torch.uint8)
        except RuntimeError:
            pytest.skip("2.1 GB of address space are not to be had")
    cache = data[:, : BS * V4.width(D)].unflatten(1, (BS, -1))
    near_data, near = made_pages(2, BS, D)
    rows = made_rows(4, D)
    places = torch.tensor([3, BS - 1, BS, 2 * BS - 1])
    data[-2:] = 0xFF
    V4.write(cache, places + (N - 2) * BS, rows, ONE)
    V4.write(near, places, rows, ONE)
    assert torch.equal(data[-2:], near_data)
    read = V4.read(cache, places + (N - 2) * BS, ONE, torch.float32, D)
    assert torch.equal(read, V4.read(near, places, ONE, torch.float32, D))


@pytest.mark.parametrize("D", [0, 1, 63, 64, 100, 127, 129, 160, 500, 576 + 32])
def test_widths_that_are_refused(D: int) -> None:
    for asked in (V4.width, V4.row_bytes, lambda D: V4.page_width(D, 16)):
        with pytest.raises(ConfigError) as error:
            asked(D)
        message = "cache: format fp8_dsv4 needs rows of a multiple of 64 values, at least 128, got"
        assert f"{message} {D}." in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data[:, :1168].unflatten(1, (2, -1)), None),
        (lambda data: data[:1, :584][:, None], None),  # one entry has no neighbour
        (lambda data: data[:, :1200].unflatten(1, (2, -1))[:, :, :584], "plan: each block must be"),
        (lambda data: data[:, :1168].unflatten(1, (2, -1)).view(torch.int8), "plan: cache must be"),
    ],
)
def test_pages_must_be_whole(change: Any, message: str | None) -> None:
    data = torch.zeros(3, V4.page_width(512, 2), dtype=torch.uint8)
    if message is None:
        check_pages("plan", change(data), "fp8_dsv4")
        return
    with pytest.raises(ShapeError) as error:
        check_pages("plan", change(data), "fp8_dsv4")
    assert message in str(error.value)


def test_is_a_format_of_latents() -> None:
    assert get_format("fp8_dsv4", "latent") is V4
    with pytest.raises(ConfigError, match="'fp8_dsv4' is not known for index rows"):
        get_format("fp8_dsv4", "index")
