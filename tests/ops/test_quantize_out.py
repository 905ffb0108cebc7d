"""quantize_out: every quantiser and layout byte for byte as defined, any row, and bad input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from openmla.errors import ConfigError, ShapeError, UnsupportedError
from openmla.ops import quantize_out
from openmla.ops.quantize_out import cost
from openmla.outputs import OUTPUT_FORMATS, QuantizedOutput, decode_output
from openmla.testing import strided
from tests.ops.contract import backends
from tests.ops.declared import check_declaration
from tests.ops.quantized import (
    LAYOUTS,
    Case,
    assert_same_bytes,
    buffers,
    cases,
    defined,
    hard_rows,
    nearest,
)

BACKENDS = backends("quantize_out")
TOKENS = (
    (0, torch.float16), (1, torch.bfloat16), (3, torch.float32), (5, torch.float16),
    (127, torch.bfloat16), (129, torch.float32),
)  # fmt: skip


def run(out: QuantizedOutput, x: Tensor, backend: str, **scalars: Any) -> None:
    """The op on x [n, H, V]; a backend that cannot is a skip with its own sentence."""
    try:
        quantize_out(
            out.values, out.scales, x, out.global_scale, format=out.format, backend=backend,
            **scalars,
        )  # fmt: skip
    except UnsupportedError as reason:
        pytest.skip(str(reason).splitlines()[1].strip())


@pytest.mark.contract
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", cases(TOKENS), ids=str)
def test_contract(case: Case, backend: str, device: str) -> None:
    """Every byte as defined, one value at a time; rows beside them and padding untouched."""
    format, layout, n, dtype = case
    expected = defined(format, n, 256, dtype, tuple(range(1, n + 1)), n + 2)
    actual = buffers(format, n + 2, 256, layout, device)
    x = hard_rows(n, 256, dtype).view(n, 2, 128).to(device)
    run(actual, strided(x), backend, first_row=1)
    assert_same_bytes(actual, expected)


@pytest.mark.contract
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("format", "layout"), LAYOUTS)
def test_contract_rows(format: str, layout: str, backend: str, device: str) -> None:
    """Tokens go where they are told, those told a negative row nowhere."""
    rows = (140, 3, -1, 0, 33, -5, 131)
    expected = defined(format, len(rows), 256, torch.float32, rows, 141)
    actual = buffers(format, 141, 256, layout, device)
    x = hard_rows(len(rows), 256, torch.float32).view(-1, 2, 128).to(device)
    run(actual, x, backend, rows=torch.tensor(rows, device=device))
    assert_same_bytes(actual, expected)


@pytest.mark.contract
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("format", "H", "V"),
    [
        ("fp8", 17, 20),
        ("fp8_128", 6, 64),  # a group spans two heads
        ("fp8_64", 3, 192),
        ("fp8_64_pow2", 1, 64),
        ("nvfp4", 1, 16),
        ("nvfp4", 13, 48),
        ("fp8_128", 17, 256),  # more than a tile
    ],
)
def test_contract_shapes(format: str, H: int, V: int, backend: str, device: str) -> None:
    rows = tuple(range(4))
    expected = defined(format, 4, H * V, torch.bfloat16, rows, 4)
    actual = buffers(format, 4, H * V, device=device)
    x = hard_rows(4, H * V, torch.bfloat16).view(4, H, V).to(device)
    wide = torch.full((4, H, V + 16), torch.nan, dtype=x.dtype, device=device)
    wide[:, :, :V] = x
    run(actual, wide[:, :, :V], backend)
    assert_same_bytes(actual, expected)


@pytest.mark.contract
@pytest.mark.parametrize("backend", BACKENDS)
def test_contract_every_16_bit_number(backend: str, device: str) -> None:
    """e4m3 of all bf16, and e2m1 of all between -8 and 8 in steps that hit each tie."""
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    actual = buffers("fp8", 64, 1024, device=device)
    assert actual.global_scale is not None
    actual.global_scale.fill_(1.0)
    run(actual, x.view(64, 1, 1024).to(device), backend)
    magnitudes = [m * 2.0**-9 for m in range(8)]
    magnitudes += [(8 + m) * 2.0 ** (e - 10) for e in range(1, 16) for m in range(8)]
    codes = actual.values.view(torch.uint8).cpu().flatten().tolist()
    for value, code in zip(x.tolist(), codes, strict=True):
        assert code == (0x7F if value != value else nearest(magnitudes[:127], value))

    steps = torch.arange(-256, 256) / 32
    groups = torch.nn.functional.pad(steps.view(-1, 8), (0, 8), value=6.0).clamp(-6, 6)
    actual = buffers("nvfp4", 1, 1024, device=device)
    assert actual.global_scale is not None and actual.scales is not None
    actual.global_scale.fill_(1.0)
    run(actual, groups.view(1, 64, 16).to(device), backend)
    e2m1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    packed = actual.values.cpu()[0].tolist()
    halves = [code for byte in packed for code in (byte & 0xF, byte >> 4)]
    for value, code in zip(groups.flatten().tolist(), halves, strict=True):
        assert code == nearest(e2m1, value)


def test_a_nan_stays_one() -> None:
    """What a reader finds where a NaN or an infinity went in."""
    x = torch.ones(1, 1, 256)
    x[0, 0, 5], x[0, 0, 130] = torch.nan, torch.inf
    for format, known in OUTPUT_FORMATS.items():
        out = buffers(format, 1, 256)
        run(out, x, "reference")
        found = decode_output(out)[0].isnan()
        if not known.group:
            assert found.nonzero().tolist() == [[5]]
            assert int(out.values.view(torch.uint8)[0, 5]) == 0x7F
        elif known.packed:
            assert found.nonzero().flatten().tolist() == list(range(16))
            assert bool((out.values[0, :8] == 0).all())
        else:
            group = known.group
            expected = [*range(group), *range(128, 128 + group)]
            assert found.nonzero().flatten().tolist() == expected


def test_declaration(device: str) -> None:
    rows = torch.tensor([4, -1, 0, 2, 6], device=device)
    for format in ("fp8", "fp8_128", "nvfp4"):
        out = buffers(format, 7, 256, device=device)
        given: dict[str, Any] = {
            "values": out.values,
            "scales": out.scales,
            "global_scale": out.global_scale,
        }
        given |= {"out": torch.randn(5, 2, 128, device=device), "format": format}
        for listed in (None, rows):
            check_declaration(quantize_out, {**given, "rows": listed}, "out")


@pytest.mark.parametrize(
    ("format", "changes", "message"),
    [
        ("fp8", {"x": lambda t: t[:, :1]}, "values must be [7, 128], got [7, 256]"),
        ("fp8", {"global_scale": None}, "global_scale must be a float32 scalar for format fp8"),
        ("fp8", {"global_scale": 0.0}, "global_scale must be positive and finite, got 0.0"),
        ("fp8", {"global_scale": -1.0}, "global_scale must be positive and finite, got -1.0"),
        ("nvfp4", {"global_scale": torch.nan}, "global_scale must be positive and finite, got nan"),
        ("fp8", {"first_row": 3}, "rows 3 to 7 must be within the T=7 of values"),
        ("fp8", {"first_row": -1}, "rows -1 to 3 must be within the T=7 of values"),
        ("fp8", {"rows": [0, 1]}, "rows must be [5] int64, got [2] torch.int64"),
        ("fp8", {"rows": lambda _: torch.arange(10)[::2]}, "rows must be"),
        ("fp8", {"rows": [0, 1, 2, 3, 7]}, "rows must be below 7, got 7"),
        ("fp8", {"rows": [0, 1, 2, 3, 1]}, "rows must name each slot once, got 1 twice"),
        ("fp8_128", {"scales": None}, "scales must be a tensor [7, 2] for format fp8_128"),
        ("fp8_128", {"scales": lambda t: t.new_ones(7, 4)}, "scales must be [7, 2], got [7, 4]"),
        ("fp8_128", {"scales": lambda t: t.new_ones(29)[1:15].view(7, 2)}, "scales must be"),
        ("fp8_128", {"scales": lambda t: t.new_ones(99).as_strided((7, 2), (2, 3))}, "scales must"),
    ],
)
def test_bad_input_writes_nothing(format: str, changes: dict[str, Any], message: str) -> None:
    out = buffers(format, 7, 256)
    given: dict[str, Any] = {"x": torch.ones(5, 2, 128), "global_scale": out.global_scale}
    given |= {"scales": out.scales, "rows": None, "first_row": 0}
    for name, change in changes.items():
        old: Callable[[Tensor], Tensor] | Any = change
        given[name] = old(given[name]) if callable(old) else old
        if isinstance(change, float | list):
            given[name] = torch.tensor(change)
    with pytest.raises(ShapeError) as error:
        quantize_out(
            out.values, given["scales"], given["x"], given["global_scale"], rows=given["rows"],
            first_row=given["first_row"], format=format, backend="reference",
        )  # fmt: skip
    assert f"quantize_out: {message}" in str(error.value)
    assert_same_bytes(out, buffers(format, 7, 256))


def test_rows_that_do_not_divide() -> None:
    out = buffers("fp8_128", 7, 256)
    for x in (torch.ones(5, 3, 64), torch.ones(5, 1, 100)):
        with pytest.raises(ShapeError, match="columns must be a multiple of 128 for format"):
            run(out, x, "reference")
    with pytest.raises(ConfigError, match="format 'fp9' is not known"):
        run(out._replace(format="fp9"), torch.ones(5, 2, 128), "reference")


def test_cost() -> None:
    shape: dict[str, Any] = {"H": 2, "V": 128, "itemsize": 2}
    assert cost(3, **shape, format="fp8").bytes == 3 * (512 + 256)
    assert cost(3, **shape, format="fp8_128").bytes == 3 * (512 + 256 + 8)
    assert cost(3, **shape, format="nvfp4").bytes == 3 * (512 + 128 + 16)
