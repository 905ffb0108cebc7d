"""latent_write: rows and queries against plain Python, stored bytes against cache_write's."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from openmla.cache.format import get_format
from openmla.errors import ConfigError, ShapeError
from openmla.ops import cache_write, latent_write
from openmla.ops.latent_write import cost
from openmla.testing import LATENT_FORMATS, Inputs, out_budget, poison, poisoned_memory, strided
from tests.ops.contract import backends, broken, page_bytes, run_or_skip
from tests.ops.declared import check_declaration


@dataclass(frozen=True)
class RowCase:
    """Projected rows into a poisoned cache with padding between pages."""

    name: str
    format: str = "bf16"
    dtype: torch.dtype = torch.bfloat16
    slots: tuple[int, ...] = (3, -1, 0, 19, 7)
    N: int = 4
    BS: int = 5
    H: int = 3
    C: int = 24
    R: int = 8
    E: int = 20
    all_normed: bool = False
    norm_queries: bool = False
    rotated: bool = True
    plain: int = 0  # columns that are neither normalised nor rotated
    pairing: str = "pairs"
    factor: float = 1.0
    eps: float = 1e-6
    surplus: int = 2

    def __str__(self) -> str:
        return self.name

    def make(self, device: str | torch.device = "cpu") -> Inputs:
        generator = torch.Generator().manual_seed(0)
        n, T, Q = len(self.slots), len(self.slots) + self.surplus, 50
        D = self.C + self.plain + (self.R if self.rotated else 0)
        kv = 3 * torch.randn(T, D, generator=generator) + 1
        q = 2 * torch.randn(T, self.H, self.E, generator=generator)
        kv[n:] = torch.nan
        q[n:] = torch.nan
        half = torch.arange(0, self.R, 2) / max(self.R, 1)
        angles = torch.outer(torch.arange(float(Q)), 10000.0**-half)
        table = 1.2 * torch.cat([angles.cos(), angles.sin()], dim=1)
        layout = get_format(self.format)
        W = layout.width(D)
        flat = poison((self.N, self.BS * W + 16), layout.dtype, device)
        width = D if self.all_normed else self.C
        tensors = {
            "cache": flat[:, : self.BS * W].unflatten(1, (self.BS, W)),
            "q": strided(q.to(device, self.dtype)),
            "kv": strided(kv.to(device, self.dtype)),
            "norm_weight": torch.randn(width, generator=generator).to(device, self.dtype),
            "positions": torch.randint(0, Q, (n,), generator=generator).to(device),
            "slot_mapping": torch.tensor(self.slots, dtype=torch.int64, device=device),
            "kv_scale": torch.tensor(0.5 if self.format == "fp8" else 1.0, device=device),
        }
        scalars: dict[str, Any] = {
            "format": self.format,
            "pairing": self.pairing,
            "eps": self.eps,
            "factor": self.factor,
            "norm_queries": self.norm_queries,
        }
        if self.rotated:
            tensors["table"] = strided(table.to(device))
        else:
            scalars["table"] = None
        return Inputs(tensors, scalars, ("q", "kv", "norm_weight"))


MANY = tuple(range(20))  # rows, where one rounding of a row's factor would tell
V4: dict[str, Any] = {"C": 448, "R": 64, "E": 512, "all_normed": True, "norm_queries": True}
V3: dict[str, Any] = {"C": 512, "R": 64, "E": 192, "BS": 64, "slots": (255, 3, 64, -1, 17)}
BASE = RowCase("base")
CASES = [
    BASE,
    RowCase("halves", pairing="halves"),
    RowCase("fp16", "fp16", torch.float16),
    RowCase("fp32", "fp32", torch.float32),
    RowCase("fp32-rows-bf16-cache", dtype=torch.float32),
    RowCase("bf16-rows-fp32-cache", "fp32"),
    RowCase("fp8", "fp8"),
    RowCase("packed", "fp8_ds_mla", C=128),
    RowCase("packed-exact", "fp8_ds_mla_exact", C=128, pairing="halves"),
    RowCase("factor", factor=1.7),
    RowCase("large-eps", eps=0.5),
    RowCase("no-rope", rotated=False),
    RowCase("no-rope-plain-columns", rotated=False, plain=8),
    RowCase("no-rope-plain-columns-packed", "fp8_ds_mla", C=128, rotated=False, plain=64),
    RowCase("all-normed", all_normed=True, norm_queries=True),
    RowCase("all-normed-halves", "fp32", torch.float32, MANY, pairing="halves", all_normed=True),
    RowCase("queries-normed", norm_queries=True, E=8),
    RowCase("one-head", H=1, slots=(4,)),
    RowCase("17-heads", H=17),
    RowCase("odd-widths", C=21, R=6, E=11),
    RowCase("block-1", BS=1, N=20),
    RowCase("v4-bf16", **V4, pairing="pairs"),
    RowCase("v4-packed", "fp8_dsv4", BS=64, **{**V4, "H": 8}),
    RowCase("v3-bf16", **V3, H=16),
    RowCase("v3-packed", "fp8_ds_mla", **V3, H=4),
]


def exact(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """q and kv in float64: the contract's sentences in Python floats, nothing rounded."""
    q, kv = (inputs[name].double().cpu().clone() for name in ("q", "kv"))
    weight, scalars = inputs["norm_weight"].tolist(), inputs.scalars
    table = inputs.tensors.get("table")

    def normed(row: list[float]) -> list[float]:
        mean = math.fsum(value * value for value in row) / len(row)
        return [value / math.sqrt(mean + scalars["eps"]) for value in row]

    def turned(row: list[float], position: int) -> list[float]:
        if table is None:
            return row
        R, angles = table.shape[1], table[position].tolist()
        start = len(row) - R
        for pair in range(R // 2):
            first = start + (2 * pair if scalars["pairing"] == "pairs" else pair)
            second = first + (1 if scalars["pairing"] == "pairs" else R // 2)
            point = complex(row[first], row[second]) * complex(angles[pair], angles[R // 2 + pair])
            row[first], row[second] = point.real, point.imag
        return row

    for i, position in enumerate(inputs["positions"].tolist()):
        row = kv[i].tolist()
        new = normed(row[: len(weight)])
        row[: len(weight)] = [v * w * scalars["factor"] for v, w in zip(new, weight, strict=True)]
        kv[i] = torch.tensor(turned(row, position), dtype=torch.float64)
        for h in range(q.shape[1]):
            head = q[i, h].tolist()
            head = normed(head) if scalars["norm_queries"] else head
            q[i, h] = torch.tensor(turned(head, position), dtype=torch.float64)
    return q, kv


def assert_stored(case: RowCase, inputs: Inputs) -> None:
    """Every byte of the pages is what cache_write makes of the finished rows, or as it was."""
    fresh, kv = case.make(inputs["kv"].device), inputs["kv"]
    cache_write(
        fresh["cache"],
        kv[:, : case.C],
        kv[:, case.C :],
        inputs["slot_mapping"],
        inputs["kv_scale"],
        format=case.format,
        backend="reference",
    )
    assert torch.equal(page_bytes(inputs["cache"]), page_bytes(fresh["cache"]))


@pytest.mark.contract
@pytest.mark.parametrize("backend", backends("latent_write"))
@pytest.mark.parametrize("case", CASES, ids=str)
def test_contract(case: RowCase, backend: str, device: str) -> None:
    """Rows and queries within the budget; bytes are cache_write's of the finished rows."""
    inputs, peer = case.make(device), case.make(device)
    wanted = exact(inputs)
    before = {name: inputs[name].clone() for name in ("q", "kv")}
    run_or_skip(latent_write, inputs, backend)
    peer.run(latent_write, backend="reference")
    n, R = len(case.slots), case.R if case.rotated else 0
    for name, truth in zip(("q", "kv"), wanted, strict=True):
        actual, other = inputs[name].cpu(), peer[name].cpu()
        assert actual.dtype == case.dtype
        assert out_budget(actual[:n], truth[:n], other[:n]) <= 1
        assert torch.equal(actual[n:].isnan(), torch.ones_like(actual[n:], dtype=torch.bool))
    if not case.norm_queries:  # what neither turns nor is normalised is not touched
        kept = case.E - R
        assert torch.equal(inputs["q"][:n, :, :kept], before["q"][:n, :, :kept])
    assert_stored(case, inputs)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_reference_is_exact_in_float64(case: RowCase) -> None:
    inputs = case.make().double()
    wanted = exact(inputs)
    inputs.run(latent_write, backend="reference")
    n = len(case.slots)
    for name, truth in zip(("q", "kv"), wanted, strict=True):
        torch.testing.assert_close(inputs[name][:n], truth[:n], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backend", backends("latent_write"))
@pytest.mark.parametrize("slots", [(), (-1,), (19,), tuple(range(20)), (-5, 3)], ids=str)
def test_edges(slots: tuple[int, ...], backend: str, device: str) -> None:
    """No slot, only skipped ones, the last, every one: skipped rows are finished all the same."""
    case = RowCase("", slots=slots)
    inputs, peer = case.make(device), case.make(device)
    run_or_skip(latent_write, inputs, backend)
    peer.run(latent_write, backend="reference")
    n = len(slots)
    for name in ("q", "kv"):
        assert inputs[name][:n].isfinite().all() and inputs[name][n:].isnan().all()
        torch.testing.assert_close(inputs[name][:n], peer[name][:n], rtol=0.02, atol=0.02)
    assert_stored(case, inputs)


@pytest.mark.parametrize("backend", backends("latent_write"))
def test_no_rows_at_all(backend: str, device: str) -> None:
    inputs = RowCase("", slots=(), surplus=0).make(device)
    before = page_bytes(inputs["cache"])
    run_or_skip(latent_write, inputs, backend)
    assert torch.equal(page_bytes(inputs["cache"]), before)


@pytest.mark.parametrize("backend", backends("latent_write"))
def test_offsets_beyond_int32(backend: str, device: str) -> None:
    """A slot past byte 2^31 of the cache. Memory is reserved, hardly any of it is touched."""
    N, BS = 52_000, 64
    case = RowCase("", "fp8_ds_mla", **{**V3, "slots": (63, 5), "N": 1})
    near = case.make(device)
    with poisoned_memory(False):
        cache = torch.empty((N, BS, 656), dtype=torch.uint8, device=device)
    assert cache.numel() > 2**31
    far = case.make(device)
    slots = far["slot_mapping"] + (N - 1) * BS
    far = broken(far, cache=lambda _: cache, slot_mapping=lambda _: slots)
    run_or_skip(latent_write, near, backend)
    cache[-1] = 0xFF
    far.run(latent_write, backend=backend)
    assert torch.equal(cache[-1], near["cache"][0])


@pytest.mark.parametrize("backend", backends("latent_write"))
@pytest.mark.parametrize("rotated", [True, False])
def test_values_that_are_cut_off_are_counted(rotated: bool, backend: str, device: str) -> None:
    """As cache_write counts them, of the finished rows."""
    case = RowCase("", "fp8", rotated=rotated, plain=0 if rotated else 8)
    inputs = case.make(device)
    inputs["norm_weight"].mul_(300)
    clamped = torch.tensor(3, device=device)
    inputs.scalars["clamped"] = clamped
    run_or_skip(latent_write, inputs, backend)
    n, written = len(case.slots), torch.tensor(case.slots) >= 0
    rows = inputs["kv"][:n].cpu()[written].float()
    beyond = int((rows / 0.5).abs().gt(464).sum())
    assert beyond > 5 and clamped == 3 + beyond
    fresh = case.make(device)
    fresh["norm_weight"].mul_(300)
    fresh.run(latent_write, backend="reference")  # uncounted
    if backend == "reference":
        assert torch.equal(page_bytes(inputs["cache"]), page_bytes(fresh["cache"]))


@pytest.mark.parametrize("backend", backends("latent_write"))
@pytest.mark.parametrize("exponent", [-9, 3])
@pytest.mark.parametrize("rotated", [True, False])
def test_rope_ratio(rotated: bool, exponent: int, backend: str, device: str) -> None:
    """Columns behind the normalised ones are stored over it; kv and q are as without."""
    case = RowCase("", "fp8", rotated=rotated, plain=0 if rotated else 8)
    inputs, other = case.make(device), case.make(device)
    ratio = torch.tensor(2.0**exponent, device=device)
    counts = [torch.tensor(0, device=device) for _ in range(2)]
    inputs.scalars.update({"rope_ratio": ratio, "clamped": counts[0]})
    run_or_skip(latent_write, inputs, backend)
    run_or_skip(latent_write, other, backend)
    n, C = len(case.slots), case.C
    for name in ("kv", "q"):
        assert torch.equal(inputs[name][:n], other[name][:n])
    fresh, kv = case.make(device), inputs["kv"]
    cache_write(
        fresh["cache"],
        kv[:, :C],
        kv[:, C:],
        inputs["slot_mapping"],
        inputs["kv_scale"],
        ratio,
        counts[1],
        format=case.format,
        backend="reference",
    )
    assert torch.equal(page_bytes(inputs["cache"]), page_bytes(fresh["cache"]))
    assert counts[0] == counts[1]


def test_declaration(device: str) -> None:
    inputs = RowCase("", surplus=0, slots=(3, 0, 19)).make(device)
    inputs = broken(inputs, clamped=torch.tensor(5, device=device))
    check_declaration(latent_write, inputs, "q kv norm_weight")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": lambda t: t.float()}, "q must be torch.bfloat16 like kv, got torch.float32"),
        ({"q": lambda t: t[:, :, :7]}, "table must turn an even R <= 7 columns, got 8"),
        ({"norm_weight": lambda t: t[:23]}, "norm_weight must be [C] with C=24 or 32, got (23,)"),
        ({"table": lambda t: t.half()}, "table must be float32 or float64, got torch.float16"),
        ({"table": lambda t: t[:3]}, "positions must be within the table's 0..2"),
        ({"positions": lambda t: t - 60}, "positions must be within the table's 0..49"),
        ({"slot_mapping": lambda t: t + 100}, "slot_mapping must be below N*BS=20, got 119"),
        ({"pairing": "quarters"}, "pairing must be pairs or halves, got 'quarters'"),
    ],
)
def test_bad_input_is_told_before_anything_is_written(
    changes: dict[str, Any], message: str
) -> None:
    inputs = BASE.make()
    kept = {name: inputs[name].clone() for name in ("q", "kv")}
    before = page_bytes(inputs["cache"])
    scalars = {name: value for name, value in changes.items() if not callable(value)}
    tensors = {name: value for name, value in changes.items() if callable(value)}
    bad = broken(inputs, **tensors)
    bad = Inputs(bad.tensors, {**bad.scalars, **scalars}, bad.widen)
    with pytest.raises(ShapeError) as error:
        bad.run(latent_write, backend="reference")
    assert f"latent_write: {message}" in str(error.value)
    assert torch.equal(page_bytes(inputs["cache"]), before)
    for name, tensor in kept.items():
        assert torch.equal(inputs[name].isnan(), tensor.isnan())
        assert torch.equal(inputs[name].nan_to_num(), tensor.nan_to_num())


def test_more_slots_than_rows() -> None:
    inputs = RowCase("", surplus=0).make()
    short = broken(inputs, q=lambda t: t[:4], kv=lambda t: t[:4])
    with pytest.raises(ShapeError, match="slot_mapping must have at most T=4 slots, got 5"):
        short.run(latent_write, backend="reference")


def test_a_norm_wider_than_the_row() -> None:
    inputs = broken(RowCase("", rotated=False).make(), kv=lambda t: t[:, :20])
    inputs = broken(inputs, cache=lambda t: t[:, :, :20])
    with pytest.raises(ShapeError, match=r"norm_weight must be \[C\] with C at most D=20"):
        inputs.run(latent_write, backend="reference")


def test_formats_and_backends_have_names() -> None:
    with pytest.raises(ConfigError, match="format 'index_fp8' is not known for latent rows"):
        Inputs(BASE.make().tensors, {**BASE.make().scalars, "format": "index_fp8"}, ()).run(
            latent_write, backend="reference"
        )
    with pytest.raises(ConfigError, match="latent_write: backend 'cuda' is not known"):
        BASE.make().run(latent_write, backend="cuda")
    assert {"bf16", "fp8_ds_mla", "fp8_dsv4"} <= set(LATENT_FORMATS)


def test_cost() -> None:
    few = cost(2, H=4, E=24, D=32, R=8, format="bf16", itemsize=2, norm_queries=False)
    assert few.bytes == 2 * (4 * (32 + 32) + 64 + 32 + 16)
    more = cost(2, H=4, E=24, D=32, R=8, format="bf16", itemsize=2, norm_queries=True)
    assert more.bytes - few.bytes == 2 * 4 * 4 * 16
