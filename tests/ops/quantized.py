"""Quantisers as the definitions have them, one value at a time; inputs that are hard for them."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from openmla.outputs import OUTPUT_FORMATS, QuantizedOutput, make_output
from tests.ops.contract import slow_interpreted

E4M3 = [
    m * 2.0**-9 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7) for e in range(16) for m in range(8)
]
E4M3.pop()  # the last code is NaN
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
NAN = 0x7F
GLOBAL_SCALE = {"fp8": 0.37, "nvfp4": 11.3}
LAYOUTS = [
    (format, layout)
    for format, known in OUTPUT_FORMATS.items()
    for layout in (("row", "column", "tma") if known.group and not known.packed else ("row",))
]
f32 = np.float32


class Case(NamedTuple):
    """A format, the layout of its scales, and tokens of a dtype."""

    format: str
    layout: str
    n: int
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.format}-{self.layout}-{self.n}"


def cases(tokens: Sequence[tuple[int, torch.dtype]]) -> list[Any]:
    """Of every format and layout; many tokens in the interpreter only where scales are rows."""
    made = [Case(*each, n, dtype) for each in LAYOUTS for n, dtype in tokens]
    slow = {str(case) for case in made if case.n > 100 and (case.layout != "row" or case.n < 128)}
    return slow_interpreted(made, slow)


def buffers(
    format: str, T: int, columns: int, layout: str = "row", device: str = "cpu"
) -> QuantizedOutput:
    """Buffers for T rows in which every byte of values and group scales is 0xA5."""
    made = make_output(
        format, T, columns, layout=layout, device=device, global_scale=GLOBAL_SCALE.get(format)
    )
    made.values.view(torch.uint8).fill_(0xA5)
    if made.scales is not None and made.scales.dtype == torch.float32:
        made.scales.fill_(-7.0)
    return made


def hard_rows(n: int, columns: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """[n, O] of many magnitudes; among them zeros, ties, what overflows, NaN and infinities."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, columns, generator=generator)
    exponents = torch.randint(-12, 12, (n, -(-columns // 16)), generator=generator)
    x *= 2.0 ** exponents.repeat_interleave(16, 1)[:, :columns]
    special: list[float] = [0.0, -0.0, 1e-30, -3e-12, 1e4, 65504.0, torch.nan, -torch.nan]
    special += [torch.inf, -torch.inf, 0.25, 448.0, -464.0, 1.0625]
    for i, value in enumerate(special[: n * (columns // 128)]):
        row, group = i % n, i // n
        at = slice(128 * group, 128 * group + 16)
        x[row, at] = 0.0 if i < 4 else x[row, at].clamp(-3, 3)
        x[row, 128 * group + (3 * i) % 16] = value
    return x.to(dtype)


def nearest(table: list[float], value: float) -> int:
    """Code of the nearest number of a table, of two as near the even code; saturated. With sign."""
    sign, a = math.copysign(1.0, value) < 0, abs(value)
    high = bisect_left(table, a)
    if high == len(table):
        code = high - 1
    elif table[high] == a or high == 0:
        code = high
    else:
        below, above = a - table[high - 1], table[high] - a
        code = high - 1 if below < above or (below == above and high % 2) else high
    return code | (len(table) + (len(table) % 2)) * sign


def e4m3(value: float) -> int:
    return NAN if math.isnan(value) else nearest(E4M3, value)


def e2m1(value: float) -> int:
    return nearest(E2M1, value)


def next_power_of_two(value: float) -> float:
    if not math.isfinite(value):
        return value
    mantissa, exponent = math.frexp(value)  # value = mantissa * 2^exponent, 0.5 <= mantissa < 1
    return math.ldexp(1.0, exponent - 1 if mantissa == 0.5 else exponent)


def largest(group: list[np.float32]) -> np.float32:
    most = f32(0)
    for value in group:
        if math.isnan(value):
            return f32(math.nan)
        most = max(most, abs(value))
    return most


def quantize_by_definition(out: QuantizedOutput, x: Tensor, rows: list[int]) -> None:
    """Rows of x [n, O] float32 into rows of the buffers, as ops/quantize_out.py has it."""
    format = OUTPUT_FORMATS[out.format]
    values, columns = out.values.view(torch.uint8), x.shape[1]
    scale = f32(0) if out.global_scale is None else f32(out.global_scale.item())
    listed = x.float().numpy()
    with np.errstate(all="ignore"):
        for i, row in enumerate(rows):
            if row < 0:
                continue
            if not format.group:
                reciprocal = f32(1) / scale
                for c in range(columns):
                    values[row, c] = e4m3(float(listed[i, c] * reciprocal))
                continue
            for g in range(columns // format.group):
                group = list(listed[i, g * format.group : (g + 1) * format.group])
                write = _write_fp4 if format.packed else _write_group
                write(out, row, g, group, scale)


def _write_group(
    out: QuantizedOutput, row: int, g: int, group: list[np.float32], _: np.float32
) -> None:
    amax = largest(group)
    amax = amax if math.isnan(amax) else max(amax, f32(1e-10))
    s = amax / f32(448)
    if OUTPUT_FORMATS[out.format].power_of_two:
        s = f32(next_power_of_two(float(s if math.isnan(s) else max(s, f32(1e-10)))))
    assert out.scales is not None
    out.scales[row, g] = float(s)
    for c, value in enumerate(group):
        out.values.view(torch.uint8)[row, g * len(group) + c] = e4m3(float(value / s))


def _write_fp4(
    out: QuantizedOutput, row: int, g: int, group: list[np.float32], scale: np.float32
) -> None:
    stored = e4m3(float(largest(group) * scale / f32(6)))
    b = f32(math.nan if stored == NAN else E4M3[stored])
    assert out.scales is not None
    tiles = -(-out.values.shape[1] * 2 // 64)
    at = (row // 128 * tiles + g // 4) * 512 + row % 32 * 16 + row // 32 % 4 * 4 + g % 4
    out.scales.view(torch.uint8).view(-1)[at] = stored
    for c in range(0, 16, 2):
        low, high = (e2m1(float(v * scale / b)) if b > 0 else 0 for v in group[c : c + 2])
        out.values[row, g * 8 + c // 2] = low | high << 4


def assert_same_bytes(actual: QuantizedOutput, expected: QuantizedOutput) -> None:
    """Every byte of the buffers, padding included; NaN scales are NaN, whatever their bits."""
    same = actual.values.view(torch.uint8).cpu() == expected.values.view(torch.uint8).cpu()
    assert bool(same.all()), f"values differ at {(~same).nonzero()[:5].tolist()}"
    assert (actual.scales is None) == (expected.scales is None)
    if actual.scales is not None and expected.scales is not None:
        a, b = actual.scales.cpu(), expected.scales.cpu()
        if a.dtype == torch.float32:
            same = (a.view(torch.int32) == b.view(torch.int32)) | (a.isnan() & b.isnan())
        else:
            same = a.view(torch.uint8) == b.view(torch.uint8)
        assert bool(same.all()), f"scales differ at {(~same).nonzero()[:5].tolist()}"


@lru_cache(maxsize=256)
def defined(
    format: str,
    n: int,
    columns: int,
    dtype: torch.dtype,
    rows: tuple[int, ...],
    T: int,
    added: bool = False,
) -> QuantizedOutput:
    """hard_rows() by definition; scales row-major, which compares with every layout. `added`: to
    nothing, which makes 0 of -0."""
    expected, x = buffers(format, T, columns), hard_rows(n, columns, dtype)
    quantize_by_definition(expected, x + 0.0 if added else x, list(rows))
    return expected
