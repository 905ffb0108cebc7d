"""The table of output formats: buffers made, refused and decoded, swizzled scales."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from openmla.errors import ConfigError, ShapeError
from openmla.outputs import (
    FP4_VALUES,
    OUTPUT_FORMATS,
    QuantizedOutput,
    check_alignment,
    check_output,
    check_scale_value,
    decode_output,
    get_output_format,
    make_output,
    swizzled_offset,
)

TOKENS = (0, 1, 3, 5, 127, 129)


def global_scale(format: str) -> float | None:
    return 0.5 if OUTPUT_FORMATS[format].global_scale else None


@pytest.mark.parametrize("T", TOKENS)
@pytest.mark.parametrize("format", OUTPUT_FORMATS)
def test_made_buffers_pass_the_check(format: str, T: int) -> None:
    out = make_output(format, T, 256, global_scale=global_scale(format))
    assert check_output("test", out, 256) == T
    check_alignment("test", out.values, out.scales)
    assert decode_output(out, torch.float64).shape == (T, 256)


@pytest.mark.parametrize("T", TOKENS)
def test_layouts(T: int) -> None:
    expected = {"row": (4, 1), "column": (1, T), "tma": (1, -(-T // 4) * 4)}
    for layout, strides in expected.items():
        scales = make_output("fp8_64", T, 256, layout=layout).scales
        assert scales is not None and scales.shape == (T, 4)
        assert T == 0 or scales.stride() == strides


@pytest.mark.parametrize("T", [1, 127, 129, 300])
@pytest.mark.parametrize("columns", [16, 64, 208])
def test_swizzled_offsets_fill_their_buffer(T: int, columns: int) -> None:
    """Each scale of the padded buffer has a byte of its own, by the formula one at a time."""
    rows, groups = -(-T // 128) * 128, -(-columns // 64) * 4
    nk = -(-columns // 64)
    made = swizzled_offset(torch.arange(rows)[:, None], torch.arange(groups)[None, :], columns)
    for m in range(rows):
        for k in range(groups):
            tile = (m // 128) * nk + k // 4
            assert made[m, k] == tile * 512 + (m % 32) * 16 + ((m // 32) % 4) * 4 + k % 4
    assert sorted(made.flatten().tolist()) == list(range(rows * groups))


def test_decoding_one_value_at_a_time() -> None:
    generator = torch.Generator().manual_seed(0)
    for format in OUTPUT_FORMATS.values():
        out = make_output(format.name, 5, 128, global_scale=global_scale(format.name))
        codes = torch.randint(0, 0x7F, out.values.shape, generator=generator, dtype=torch.uint8)
        out.values.view(torch.uint8).copy_(codes)
        if out.scales is not None:
            raw = torch.randint(1, 0x7F, out.scales.shape, generator=generator, dtype=torch.uint8)
            out.scales.copy_(raw.view(torch.float8_e4m3fn))
        decoded = decode_output(out, torch.float64)
        for t in range(5):
            for c in range(128):
                assert decoded[t, c] == value_of(out, t, c)


def value_of(out: QuantizedOutput, t: int, c: int) -> float:
    format = OUTPUT_FORMATS[out.format]
    if format.packed:
        byte = int(out.values[t, c // 2])
        code = byte >> 4 if c % 2 else byte & 0xF
        value = FP4_VALUES[code & 7] * (-1 if code & 8 else 1)
        assert out.scales is not None and out.global_scale is not None
        at = swizzled_offset(torch.tensor(t), torch.tensor(c // 16), 128)
        return value * float(out.scales.flatten()[at]) / float(out.global_scale)
    value = float(out.values[t, c])
    if format.group:
        assert out.scales is not None
        return value * float(out.scales[t, c // format.group])
    assert out.global_scale is not None
    return value * float(out.global_scale)


@pytest.mark.parametrize(
    ("format", "name", "change", "message"),
    [
        ("fp8", "values", lambda t: t.view(torch.uint8), "values must be torch.float8_e4m3fn, got"),
        ("fp8", "values", lambda t: t[:, :-1], "values must be [5, 256], got [5, 255]"),
        ("fp8", "values", lambda t: t.new_empty(256, 5).t(), "contiguous along its last dimension"),
        ("fp8", "values", lambda t: t.as_strided((5, 256), (128, 1)), "must not overlap"),
        ("fp8", "scales", lambda t: torch.ones(5, 2), "scales must be None for format fp8, got a"),
        ("fp8", "global_scale", lambda t: None, "global_scale must be a float32 scalar"),
        ("fp8", "global_scale", lambda t: t.double(), "global_scale must be torch.float32"),
        ("fp8", "global_scale", lambda t: t.view(1), "global_scale must be [], got [1]"),
        ("fp8", "global_scale", lambda t: t.to("meta"), "global_scale must be on cpu, got meta"),
        ("fp8_128", "scales", lambda t: None, "scales must be a tensor [5, 2] for format fp8_128"),
        ("fp8_128", "scales", lambda t: t.new_empty(5, 4), "scales must be [5, 2], got [5, 4]"),
        ("fp8_128", "scales", lambda t: t.new_empty(9, 9)[:5, ::5], "row-major (2, 1) or column"),
        ("fp8_128", "global_scale", lambda t: torch.ones(()), "global_scale must be None"),
        ("nvfp4", "scales", lambda t: t[:5], "scales must be [128, 16], got [5, 16]"),
        ("nvfp4", "scales", lambda t: t.view(torch.uint8), "scales must be torch.float8_e4m3fn"),
        ("nvfp4", "scales", lambda t: t.new_empty(128, 32)[:, ::2], "scales must be contiguous"),
    ],
)
def test_buffers_that_do_not_fit(
    format: str, name: str, change: Callable[[Tensor | None], Tensor | None], message: str
) -> None:
    made = make_output(format, 5, 256, global_scale=global_scale(format))
    changed: dict[str, Any] = {name: change(getattr(made, name))}
    with pytest.raises(ShapeError) as error:
        check_output("test", made._replace(**changed), 256)
    assert message in str(error.value)


@pytest.mark.parametrize("format", ["fp8_128", "fp8_64_pow2", "nvfp4"])
def test_rows_are_cut_without_a_rest(format: str) -> None:
    with pytest.raises(ShapeError, match="must be a multiple of"):
        make_output(format, 5, 200, global_scale=global_scale(format))


@pytest.mark.parametrize("value", [0.0, -1.0, torch.nan, torch.inf, 1e-45])
def test_scales_that_are_none(value: float) -> None:
    for scale in (value, torch.tensor(value)):
        with pytest.raises(ShapeError, match="global_scale must be positive and finite, got"):
            check_scale_value("test", scale)
    with pytest.raises(ShapeError, match="global_scale must be positive and finite"):
        make_output("fp8", 5, 256, global_scale=value)
    check_scale_value("test", torch.empty((), device="meta"))  # not looked at


def test_unaligned_buffers() -> None:
    bytes_ = torch.empty(4 * 64 + 16, dtype=torch.uint8)
    values = bytes_[1 : 1 + 4 * 64].view(4, 64).view(torch.float8_e4m3fn)
    with pytest.raises(ShapeError, match=r"values must be aligned to 16 bytes, got .* 1"):
        check_alignment("test", values, None)
    with pytest.raises(ShapeError, match=r"scales must be aligned to 16 bytes, got .* 4"):
        check_alignment("test", torch.empty(4, 64), torch.empty(4, 4)[:, 1:])


def test_names() -> None:
    assert get_output_format("nvfp4").packed
    with pytest.raises(ConfigError, match=r"'fp7' is not known\. Known: fp8, fp8_128"):
        get_output_format("fp7")
    with pytest.raises(ConfigError, match="layout must be one of row, column, tma, got 'x'"):
        make_output("fp8_128", 1, 128, layout="x")
    for scale in ("1", True, [1.0]):
        with pytest.raises(ConfigError, match="global_scale must be a number, got"):
            make_output("fp8", 1, 128, global_scale=scale)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="T must be at least 0, got -1"):
        make_output("fp8", -1, 128, global_scale=1.0)
    with pytest.raises(ConfigError, match="layout must be 'row' for format fp8, got 'tma'"):
        make_output("fp8", 1, 128, global_scale=1.0, layout="tma")
