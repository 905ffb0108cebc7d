"""cache_write: the bytes that must change, byte for byte, and no others."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from openmla.cache import FORMATS
from openmla.errors import ShapeError
from openmla.ops import cache_write
from openmla.ops.cache_write import cost
from openmla.testing import Inputs, poison, strided
from tests.ops.contract import backends, broken, run_or_skip
from tests.ops.declared import check_declaration

PLAIN = [name for name, layout in FORMATS.items() if not layout.packed]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def make(
    *,
    format: str = "bf16",
    dtype: torch.dtype = torch.bfloat16,
    slots: tuple[int, ...] = (3, -1, 0, 19, 7),
    N: int = 4,
    BS: int = 5,
    C: int = 12,
    R: int = 4,
    surplus: int = 2,
    kv_scale: float = 0.37,
    device: str = "cpu",
) -> Inputs:
    """Rows of all magnitudes into a poisoned cache with padding between pages."""
    generator = torch.Generator().manual_seed(0)
    T = len(slots) + surplus
    rows = torch.randn(T, C + R, generator=generator, dtype=torch.float64)
    rows *= 10.0 ** torch.randint(-6, 4, (T, C + R), generator=generator)
    rows[0, :4] = torch.tensor([0.0, -0.0, 1e4, -1e4])
    layout = FORMATS[format]
    W = layout.width(C + R)
    flat = poison((N, BS * W + 3), layout.dtype, device)
    tensors = {
        "cache": flat[:, : BS * W].unflatten(1, (BS, W)),
        "kv_c": strided(rows[:, :C].to(device, dtype)),
        "k_pe": strided(rows[:, C:].to(device, dtype)),
        "slot_mapping": torch.tensor(slots, dtype=torch.int64, device=device),
        "kv_scale": torch.tensor(kv_scale, dtype=torch.float32, device=device),
    }
    return Inputs(tensors, {"format": format}, ())


def page_bytes(cache: Tensor) -> Tensor:
    """Every byte of the allocation under a cache view, padding included."""
    whole = torch.as_strided(cache, (cache.shape[0], cache.stride(0)), (cache.stride(0), 1))
    return whole.clone().view(torch.uint8).cpu()


def e4m3_byte(value: float) -> int:
    """Round to nearest even e4m3, saturating, from the format's definition."""
    sign = 0x80 if math.copysign(1.0, value) < 0 else 0
    value = min(abs(value), 448.0)
    best = min(range(0x7F), key=lambda code: (abs(e4m3_value(code) - value), code & 1))
    return sign | best


def e4m3_value(code: int) -> float:
    exponent, mantissa = code >> 3, code & 7
    if exponent == 0:
        return mantissa * 2.0**-9
    return (8 + mantissa) * 2.0 ** (exponent - 10)


@pytest.mark.contract
@pytest.mark.parametrize("backend", backends("cache_write"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format", PLAIN)
def test_contract(format: str, dtype: torch.dtype, backend: str, device: str) -> None:
    inputs = make(format=format, dtype=dtype, device=device)
    before = page_bytes(inputs["cache"])
    run_or_skip(cache_write, inputs, backend)
    after = page_bytes(inputs["cache"])
    rows = torch.cat([inputs["kv_c"], inputs["k_pe"]], dim=1).cpu()
    BS, W = inputs["cache"].shape[1:]
    width = W * FORMATS[format].dtype.itemsize
    expected = before.clone()
    for i, slot in enumerate(inputs["slot_mapping"].tolist()):
        if slot < 0:
            continue
        if format == "fp8":
            scale = inputs["kv_scale"].cpu()
            quotients = (rows[i].float() / scale).tolist()
            stored = torch.tensor([e4m3_byte(value) for value in quotients], dtype=torch.uint8)
        else:
            stored = rows[i].to(FORMATS[format].dtype).view(torch.uint8)
        offset = slot % BS * width
        expected[slot // BS, offset : offset + width] = stored
    assert torch.equal(after, expected)


@pytest.mark.parametrize("backend", backends("cache_write"))
@pytest.mark.parametrize(
    "slots", [(), (-1,), (-1, -1), (19,), (0,), tuple(range(20)), (-5, 3)], ids=str
)
def test_edges(slots: tuple[int, ...], backend: str, device: str) -> None:
    """No slot, only skipped ones, the first, the last, every one."""
    inputs = make(slots=slots, device=device)
    run_or_skip(cache_write, inputs, backend)
    written = inputs["cache"].flatten(0, 1)
    for slot in range(20):
        if slot in slots:
            row = slots.index(slot)
            expected = torch.cat([inputs["kv_c"][row], inputs["k_pe"][row]])
            assert torch.equal(written[slot], expected)
        else:
            assert written[slot].isnan().all()


@pytest.mark.parametrize("backend", backends("cache_write"))
def test_no_rope_columns(backend: str, device: str) -> None:
    inputs = make(R=0, device=device)
    run_or_skip(cache_write, inputs, backend)
    assert torch.equal(inputs["cache"][0, 3], inputs["kv_c"][0])


@pytest.mark.parametrize("backend", backends("cache_write"))
def test_fp8_keeps_nan_and_saturates_infinity(backend: str, device: str) -> None:
    inputs = make(format="fp8", kv_scale=1.0, device=device)
    inputs["kv_c"][0, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    run_or_skip(cache_write, inputs, backend)
    stored = inputs["cache"][0, 3, :3].float().tolist()
    assert math.isnan(stored[0]) and stored[1:] == [448.0, -448.0]


def test_declaration(device: str) -> None:
    inputs = broken(make(device=device), clamped=torch.tensor(5, device=device))
    check_declaration(cache_write, inputs, "kv_c k_pe")


@pytest.mark.parametrize("backend", backends("cache_write"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_that_are_cut_off_are_counted(dtype: torch.dtype, backend: str, device: str) -> None:
    """Of rows that are written, on top of what was there; 464 rounds to 448, NaN is kept."""
    inputs = make(format="fp8", dtype=dtype, kv_scale=0.5, device=device)
    inputs["kv_c"][0, 4:9] = torch.tensor([232.0, -233.0, torch.nan, torch.inf, -torch.inf])
    clamped = inputs.scalars["clamped"] = torch.tensor([7, 9], device=device)[0]
    rows = torch.cat([inputs["kv_c"], inputs["k_pe"]], dim=1).float().tolist()
    written = [
        row for row, slot in zip(rows, inputs["slot_mapping"].tolist(), strict=False) if slot >= 0
    ]
    beyond = sum(abs(value) / 0.5 > 464 for row in written for value in row)
    run_or_skip(cache_write, inputs, backend)
    assert beyond >= 5
    assert clamped.tolist() == 7 + beyond


@pytest.mark.parametrize("backend", backends("cache_write"))
@pytest.mark.parametrize("counted", [False, True])
def test_counting_changes_no_byte(counted: bool, backend: str, device: str) -> None:
    """Nor is anything counted where nothing is cut off."""
    inputs, other = make(format="fp8", device=device), make(format="fp8", device=device)
    for each in (inputs, other):
        each["kv_c"].clamp_(-100, 100)
        each["k_pe"].clamp_(-100, 100)
    clamped = torch.tensor(0, device=device)
    if counted:
        inputs.scalars["clamped"] = clamped
    run_or_skip(cache_write, inputs, backend)
    other.run(cache_write, backend="reference")
    assert torch.equal(page_bytes(inputs["cache"]), page_bytes(other["cache"]))
    assert clamped == 0


@pytest.mark.parametrize("backend", backends("cache_write"))
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
@pytest.mark.parametrize("exponent", [-9, 3])
def test_rope_ratio(exponent: int, dtype: torch.dtype, backend: str, device: str) -> None:
    """Byte for byte what writing k_pe / ratio gives, and as many values cut off."""
    ratio = 2.0**exponent
    inputs, other = (make(format="fp8", dtype=dtype, device=device) for _ in range(2))
    inputs["k_pe"].copy_(inputs["k_pe"].clamp(-100, 100))
    other["k_pe"].copy_(inputs["k_pe"])
    counts = [torch.tensor(0, device=device) for _ in range(2)]
    inputs.scalars.update({"clamped": counts[0], "rope_ratio": torch.tensor(ratio, device=device)})
    run_or_skip(cache_write, inputs, backend)
    other["k_pe"].copy_(other["k_pe"] / ratio)
    other.scalars["clamped"] = counts[1]
    other.run(cache_write, backend="reference")
    assert torch.equal(page_bytes(inputs["cache"]), page_bytes(other["cache"]))
    assert counts[0] == counts[1]


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("cache", lambda t: t[:1].expand(4, 5, 16), "blocks of cache must not overlap"),
        ("cache", lambda t: t.float(), "cache must be torch.bfloat16 for format bf16"),
        ("k_pe", lambda t: t.float(), "k_pe must be torch.bfloat16 like kv_c, got torch.float32"),
        ("slot_mapping", lambda t: t.repeat(2), "slot_mapping must have at most T=7 slots, got 10"),
        ("slot_mapping", lambda t: t + 1, "slot_mapping must be below N*BS=20, got 20"),
        ("slot_mapping", lambda t: t % 3, "slot_mapping must name each slot once, got 0 twice"),
        ("rope_ratio", lambda t: t, "rope_ratio must be None for format bf16"),
    ],
)
def test_bad_input_changes_nothing(
    name: str, change: Callable[[Tensor], Tensor], message: str
) -> None:
    inputs = make()
    given = {**inputs.tensors, "rope_ratio": torch.tensor(2.0), "clamped": torch.tensor(0)}
    before = page_bytes(inputs["cache"])
    tensors = {**inputs.tensors, name: change(given[name])}
    extra: dict[str, Any] = {
        key: tensors.pop(key) for key in ("rope_ratio", "clamped") if key in tensors
    }
    with pytest.raises(ShapeError) as error:
        Inputs(tensors, {**inputs.scalars, **extra}, ()).run(cache_write, backend="reference")
    assert f"cache_write: {message}" in str(error.value)
    assert torch.equal(page_bytes(inputs["cache"]), before)


PACKED = [name for name, layout in FORMATS.items() if layout.packed]


@pytest.mark.parametrize("backend", backends("cache_write"))
@pytest.mark.parametrize("format", PACKED)
def test_packed_formats(format: str, backend: str, device: str) -> None:
    """Byte for byte what tests/cache/test_format.py holds the layout to; other slots untouched."""
    R = 0 if FORMATS[format].holds == "index" else 64 if format == "fp8_dsv4" else 8
    inputs = make(format=format, C=128, R=R, device=device)
    wanted = make(format=format, C=128, R=R, device=device)
    run_or_skip(cache_write, inputs, backend)
    written = [i for i, slot in enumerate(inputs["slot_mapping"].tolist()) if slot >= 0]
    rows = torch.cat([wanted["kv_c"], wanted["k_pe"]], dim=1)[written]
    slots = wanted["slot_mapping"][written]
    FORMATS[format].write(wanted["cache"], slots, rows, wanted["kv_scale"])
    assert torch.equal(page_bytes(inputs["cache"]), page_bytes(wanted["cache"]))


def test_cost() -> None:
    assert cost(3, D=576, format="fp8", itemsize=2).bytes == 3 * (576 * 3 + 8)
