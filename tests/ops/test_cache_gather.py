"""cache_gather: any start, any length, nothing read or written beside it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from openmla.cache import FORMATS
from openmla.errors import ShapeError
from openmla.ops import cache_gather
from openmla.ops.cache_gather import cost
from openmla.testing import Inputs, paged_rows, poison, start_loc
from tests.ops.contract import backends, run_or_skip
from tests.ops.declared import check_declaration


@dataclass(frozen=True)
class Case:
    """Spans (start, length) of requests that hold seq_lens rows."""

    name: str
    seq_lens: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    BS: int = 16

    def __str__(self) -> str:
        return self.name


PLAIN = [name for name, layout in FORMATS.items() if not layout.packed]
CASES = [
    Case("whole", (33, 7), ((0, 33), (0, 7))),
    Case("aligned-chunk", (64, 70), ((16, 32), (48, 22))),
    Case("unaligned-chunk", (64, 70), ((5, 30), (17, 1))),
    Case("empty-spans", (20, 0, 9), ((3, 0), (0, 0), (9, 0))),
    Case("start-past-the-table", (20,), ((999, 0),)),
    Case("nothing", (), ()),
    Case("last-row", (48,), ((47, 1),)),
    Case("block-1", (9, 4), ((2, 7), (0, 4)), BS=1),
]


def make(
    case: Case = CASES[2],
    *,
    format: str = "bf16",
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
) -> tuple[Inputs, list[Tensor]]:
    """Inputs, and the stored rows each request should deliver, in float64."""
    D = 24
    kv_scale = torch.tensor(0.037, dtype=torch.float32, device=device)
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(S, D, generator=generator).to(device) for S in case.seq_lens]
    cache, table = paged_rows(
        rows, D=D, format=format, kv_scale=kv_scale, BS=case.BS, rng=random.Random(0)
    )
    for b, (start, length) in enumerate(case.spans):  # columns outside the span are garbage too
        if length:
            table[b, : start // case.BS] = 2**30
            table[b, -(-(start + length) // case.BS) :] = -5
    total = sum(length for _, length in case.spans)
    tensors = {
        "out": poison((total + 3, D + 2), dtype, device)[:, :D],
        "cache": cache,
        "kv_scale": kv_scale,
        "block_table": table,
        "starts": torch.tensor([s for s, _ in case.spans], dtype=torch.int32, device=device),
        "row_start_loc": start_loc([length for _, length in case.spans], device),
    }
    layout = FORMATS[format]
    stored = [layout.encode(request, kv_scale) for request in rows]
    scale = kv_scale.double() if layout.scaled else torch.ones((), device=device)
    wanted = [
        (stored[b].double() * scale)[start : start + length]
        for b, (start, length) in enumerate(case.spans)
    ]
    return Inputs(tensors, {"format": format}, ()), wanted


@pytest.mark.contract
@pytest.mark.parametrize("backend", backends("cache_gather"))
@pytest.mark.parametrize("format", PLAIN)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_contract(case: Case, format: str, backend: str, device: str) -> None:
    """Rows are the stored values, rounded to out's dtype once."""
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        inputs, wanted = make(case, format=format, dtype=dtype, device=device)
        run_or_skip(cache_gather, inputs, backend)
        out = inputs["out"]
        total = sum(len(rows) for rows in wanted)
        expected = torch.cat([out.new_zeros((0, 24)), *(rows.float() for rows in wanted)])
        if dtype == torch.float64:
            expected = torch.cat([out.new_zeros((0, 24)), *wanted])
        assert torch.equal(out[:total], expected.to(dtype))
        assert out[total:].isnan().all()  # rows past the last span are not touched


@pytest.mark.parametrize("backend", backends("cache_gather"))
@pytest.mark.parametrize("format", [name for name, layout in FORMATS.items() if layout.packed])
def test_packed_formats(format: str, backend: str, device: str) -> None:
    D = 128 if FORMATS[format].holds == "index" else 192 if format == "fp8_dsv4" else 136
    rows = [torch.randn(S, D, device=device) for S in (33, 7)]
    one = torch.ones((), device=device)
    cache, table = paged_rows(rows, D=D, format=format, kv_scale=one, BS=16, rng=random.Random(0))
    layout = FORMATS[format]
    wanted = [layout.decode(layout.encode(r, one), one, torch.float32, D) for r in rows]
    tensors = {
        "out": poison((20, D), torch.float32, device),
        "cache": cache,
        "kv_scale": one,
        "block_table": table,
        "starts": torch.tensor([17, 2], dtype=torch.int32, device=device),
        "row_start_loc": start_loc([13, 5], device),
    }
    inputs = Inputs(tensors, {"format": format}, ())
    run_or_skip(cache_gather, inputs, backend)
    assert torch.equal(inputs["out"][:18], torch.cat([wanted[0][17:30], wanted[1][2:7]]))
    assert inputs["out"][18:].isnan().all()


def test_declaration(device: str) -> None:
    check_declaration(cache_gather, make(device=device)[0], "out")


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("out", lambda t: t[:30], "row_start_loc must end within the 30 rows of out, got 31"),
        ("starts", lambda t: t - 6, "starts must not be negative, got -1"),
        ("starts", lambda t: t + 100, "block_table must have a column for every 16 keys"),
        ("starts", lambda t: t * 0 + 2**31 - 1, "block_table must have a column for every 16 keys"),
        ("row_start_loc", lambda t: t + 1, "row_start_loc must start with 0"),
        ("row_start_loc", lambda t: -t, "row_start_loc must not fall"),
        ("cache", lambda t: t[:, :0], "blocks must have at least 1 row, got BS=0"),
        ("block_table", lambda t: t + 99, "block_table[0, 0] must be a block of the cache (0..11)"),
    ],
)
def test_bad_input_changes_nothing(
    name: str, change: Callable[[Tensor], Tensor], message: str
) -> None:
    inputs, _ = make()
    tensors = {**inputs.tensors, name: change(inputs[name])}
    with pytest.raises(ShapeError) as error:
        Inputs(tensors, inputs.scalars, ()).run(cache_gather, backend="reference")
    assert f"cache_gather: {message}" in str(error.value)
    assert inputs["out"].isnan().all()


def test_cost() -> None:
    assert cost(3, D=576, format="bf16", itemsize=4).bytes == 3 * 576 * 6
