"""index_write: keys against plain Python, bytes against the format's table, and nothing else."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from openmla.cache.format import get_format
from openmla.errors import ConfigError, ShapeError
from openmla.ops import index_write
from openmla.ops.index_write import cost
from openmla.testing import INDEX_FORMATS, Inputs, out_budget, poison, poisoned_memory, strided
from tests.ops.contract import backends, broken, page_bytes, put, run_or_skip
from tests.ops.declared import check_declaration
from tests.ops.index_cases import stored_key

PACKED = [name for name in INDEX_FORMATS if get_format(name).packed]


@dataclass(frozen=True)
class KeyCase:
    """Projected keys into a poisoned cache with padding between pages."""

    name: str
    format: str = "index_fp8"
    dtype: torch.dtype = torch.bfloat16
    slots: tuple[int, ...] = (3, -1, 0, 19, 7)
    N: int = 4
    BS: int = 5
    DI: int = 32
    R: int = 8
    rope_start: int = 0
    pairing: str = "halves"
    hadamard: bool = False
    surplus: int = 2
    eps: float = 1e-6

    def __str__(self) -> str:
        return self.name

    def make(self, device: str | torch.device = "cpu") -> Inputs:
        generator = torch.Generator().manual_seed(0)
        n, T, Q = len(self.slots), len(self.slots) + self.surplus, 50
        k_raw = 3 * torch.randn(T, self.DI, generator=generator) + 2
        k_raw[n:] = torch.nan  # rows without a slot
        half = torch.arange(0, self.R, 2) / max(self.R, 1)
        angles = torch.outer(torch.arange(float(Q)), 10000.0**-half)
        table = 1.2 * torch.cat([angles.cos(), angles.sin()], dim=1)
        layout = get_format(self.format)
        W = layout.width(self.DI)
        padding = 12 // layout.dtype.itemsize  # float32 scales inside the page stay aligned
        flat = poison((self.N, self.BS * W + padding), layout.dtype, device)
        tensors = {
            "cache": flat[:, : self.BS * W].unflatten(1, (self.BS, W)),
            "k_raw": strided(k_raw.to(device, self.dtype)),
            "norm_weight": torch.randn(self.DI, generator=generator).to(device),
            "norm_bias": torch.randn(self.DI, generator=generator).to(device),
            "positions": torch.randint(0, Q, (n,), generator=generator).to(device),
            "table": strided(table.to(device)),
            "slot_mapping": torch.tensor(self.slots, dtype=torch.int64, device=device),
        }
        scalars = {
            "format": self.format,
            "eps": self.eps,
            "pairing": self.pairing,
            "rope_start": self.rope_start,
            "hadamard": self.hadamard,
        }
        return Inputs(tensors, scalars, ("k_raw",))


BASE = KeyCase("base", format="index_bf16")
CASES = [
    BASE,
    *(
        KeyCase(f"{format}-{str(dtype)[6:]}", format=format, dtype=dtype)
        for format in INDEX_FORMATS
        for dtype in (torch.bfloat16, torch.float32, torch.float16)
    ),
    *(
        KeyCase(
            f"{pairing}-from-{start}{'-hadamard' * hadamard}",
            "index_fp32",
            torch.float32,
            rope_start=start,
            pairing=pairing,
            hadamard=hadamard,
        )
        for pairing in ("pairs", "halves")
        for start in (0, 24, 11)
        for hadamard in (False, True)
    ),
    *(KeyCase(f"hadamard-{format}", format=format, hadamard=True) for format in INDEX_FORMATS),
    KeyCase("rope-everything", R=32),
    KeyCase("no-rope", R=0, rope_start=32),
    KeyCase("large-eps", eps=0.5, format="index_fp32"),
    KeyCase("block-1", BS=1, N=20),
    # all slots: the errors of a few numbers are luck
    KeyCase("width-2", "index_fp32", torch.float32, tuple(range(20)), DI=2, R=2, hadamard=True),
    KeyCase("width-24", DI=24),
    KeyCase("width-256", DI=256, R=64, rope_start=192),
    KeyCase("v32-widths", DI=128, R=64, BS=64, slots=(255, 3, 64, -1, 17), hadamard=True),
    KeyCase("glm5-widths", DI=128, R=64, BS=64, slots=(255, 3, 64, -1, 17), pairing="pairs"),
]


def exact_keys(inputs: Inputs) -> Tensor:
    """[n, DI] f64 keys of the rows with a slot, not encoded: the formula in Python floats."""
    R, start = inputs["table"].shape[1], inputs.scalars["rope_start"]
    pairs = inputs.scalars["pairing"] == "pairs"
    weight, bias = inputs["norm_weight"].tolist(), inputs["norm_bias"].tolist()
    keys = []
    for i, slot in enumerate(inputs["slot_mapping"].tolist()):
        if slot < 0:
            continue
        raw = inputs["k_raw"][i].tolist()
        mean = math.fsum(raw) / len(raw)
        variance = math.fsum((value - mean) ** 2 for value in raw) / len(raw)
        spread = math.sqrt(variance + inputs.scalars["eps"])
        key = [(v - mean) / spread * w + b for v, w, b in zip(raw, weight, bias, strict=True)]
        angles = inputs["table"][int(inputs["positions"][i])].tolist()
        for pair in range(R // 2):
            first = start + (2 * pair if pairs else pair)
            second = first + (1 if pairs else R // 2)
            turned = complex(key[first], key[second]) * complex(angles[pair], angles[R // 2 + pair])
            key[first], key[second] = turned.real, turned.imag
        if inputs.scalars["hadamard"]:
            key = [
                math.fsum(-v if (i & j).bit_count() % 2 else v for i, v in enumerate(key))
                / math.sqrt(len(key))
                for j in range(len(key))
            ]
        keys.append(key)
    return torch.tensor(keys, dtype=torch.float64).reshape(-1, inputs["k_raw"].shape[1])


def written_slots(inputs: Inputs) -> list[int]:
    return [slot for slot in inputs["slot_mapping"].tolist() if slot >= 0]


def stored_keys(inputs: Inputs) -> Tensor:
    """[n, DI] f64 what the cache holds at the slots, in their order."""
    cache, DI = inputs["cache"].cpu(), inputs["k_raw"].shape[1]
    format, BS = inputs.scalars["format"], cache.shape[1]
    found = [stored_key(cache, slot // BS, slot % BS, format, DI) for slot in written_slots(inputs)]
    return torch.stack(found) if found else torch.zeros(0, DI, dtype=torch.float64)


def byte_ranges(inputs: Inputs, slot: int) -> list[tuple[int, slice]]:
    """(page, bytes) a slot occupies: its values, and its scales where the format has them."""
    _, BS, W = inputs["cache"].shape
    DI, offset = inputs["k_raw"].shape[1], slot % BS
    if inputs.scalars["format"] in PACKED:
        scales = W - DI
        first = BS * DI + offset * scales
        return [
            (slot // BS, slice(offset * DI, offset * DI + DI)),
            (slot // BS, slice(first, first + scales)),
        ]
    width = W * inputs["cache"].dtype.itemsize
    return [(slot // BS, slice(offset * width, offset * width + width))]


@pytest.mark.contract
@pytest.mark.parametrize("backend", backends("index_write"))
@pytest.mark.parametrize("case", CASES, ids=str)
def test_contract(case: KeyCase, backend: str, device: str) -> None:
    """Keys within the budget of the once-rounded peer; every other byte as it was."""
    inputs, peer = case.make(device), case.make(device)
    before = page_bytes(inputs["cache"])
    run_or_skip(index_write, inputs, backend)
    after = page_bytes(inputs["cache"])
    peer.run(index_write, backend="reference")
    actual = stored_keys(inputs).float()
    assert out_budget(actual, exact_keys(inputs), stored_keys(peer)) <= 1
    for slot in written_slots(inputs):
        for page, place in byte_ranges(inputs, slot):
            before[page, place] = after[page, place]
    assert torch.equal(after, before)


@pytest.mark.parametrize("case", [case for case in CASES if case.format == "index_fp32"], ids=str)
def test_reference_is_exact_in_float64(case: KeyCase) -> None:
    inputs = case.make().double()
    inputs.run(index_write, backend="reference")
    half_ulp = torch.finfo(torch.float32).eps / 2
    torch.testing.assert_close(stored_keys(inputs), exact_keys(inputs), rtol=half_ulp, atol=1e-13)


@pytest.mark.parametrize("backend", backends("index_write"))
@pytest.mark.parametrize("hadamard", [False, True], ids=["plain", "hadamard"])
@pytest.mark.parametrize("format", INDEX_FORMATS)
def test_bytes_are_the_encoded_float32_key(
    format: str, hadamard: bool, backend: str, device: str
) -> None:
    """One rounding: what is stored is encode() of what index_fp32 would hold."""
    wide = KeyCase("", "index_fp32", DI=128, R=64, hadamard=hadamard).make(device)
    inputs = KeyCase("", format, DI=128, R=64, hadamard=hadamard).make(device)
    run_or_skip(index_write, wide, backend)
    run_or_skip(index_write, inputs, backend)
    encoded = get_format(format).encode(stored_keys(wide).float(), torch.ones(()))
    pages = page_bytes(inputs["cache"])
    for row, slot in zip(encoded, written_slots(inputs), strict=True):
        stored = torch.cat([pages[page, place] for page, place in byte_ranges(inputs, slot)])
        assert torch.equal(stored, row.view(torch.uint8))


@pytest.mark.parametrize("backend", backends("index_write"))
@pytest.mark.parametrize("format", ["index_bf16", *PACKED])
@pytest.mark.parametrize(
    "slots", [(), (-1,), (-1, -1), (19,), (0,), tuple(range(20)), (-5, 3)], ids=str
)
def test_edges(slots: tuple[int, ...], format: str, backend: str, device: str) -> None:
    """No slot, only skipped ones, the first, the last, every one."""
    inputs = KeyCase("", format, slots=slots).make(device)
    before = page_bytes(inputs["cache"])
    run_or_skip(index_write, inputs, backend)
    after = page_bytes(inputs["cache"])
    assert stored_keys(inputs).isfinite().all()
    for slot in written_slots(inputs):
        for page, place in byte_ranges(inputs, slot):
            before[page, place] = after[page, place]
    assert torch.equal(after, before)


@pytest.mark.parametrize("backend", backends("index_write"))
def test_no_rows_at_all(backend: str, device: str) -> None:
    inputs = KeyCase("", slots=(), surplus=0).make(device)
    before = page_bytes(inputs["cache"])
    run_or_skip(index_write, inputs, backend)
    assert torch.equal(page_bytes(inputs["cache"]), before)


@pytest.mark.parametrize("backend", backends("index_write"))
def test_bias_shifts_keys(backend: str, device: str) -> None:
    """Without rotation a constant bias is found again in every column."""
    plain = KeyCase("", "index_fp32", R=0).make(device)
    shifted = broken(KeyCase("", "index_fp32", R=0).make(device), norm_bias=lambda t: t + 100)
    run_or_skip(index_write, plain, backend)
    run_or_skip(index_write, shifted, backend)
    difference = stored_keys(shifted) - stored_keys(plain)
    torch.testing.assert_close(difference, torch.full_like(difference, 100), rtol=1e-6, atol=0)


@pytest.mark.parametrize("backend", backends("index_write"))
def test_constant_rows_are_the_bias(backend: str, device: str) -> None:
    """No spread to divide by but eps."""
    case = KeyCase("", "index_fp32", torch.float32, R=0, surplus=0)
    inputs = broken(case.make(device), k_raw=lambda t: torch.full_like(t, 3.0))
    run_or_skip(index_write, inputs, backend)
    bias = inputs["norm_bias"].cpu().double()
    assert torch.equal(stored_keys(inputs), bias.expand(4, -1))


@pytest.mark.parametrize("backend", backends("index_write"))
@pytest.mark.parametrize("DI", [2, 32, 128])
def test_hadamard_keeps_dot_products(DI: int, backend: str, device: str) -> None:
    """Queries and keys turned by one orthonormal matrix: scores stay to float32 rounding."""
    plain = KeyCase("", "index_fp32", torch.float32, DI=DI, R=2).make(device)
    turned = KeyCase("", "index_fp32", torch.float32, DI=DI, R=2, hadamard=True).make(device)
    run_or_skip(index_write, plain, backend)
    run_or_skip(index_write, turned, backend)
    signs = [[(-1) ** (i & j).bit_count() for j in range(DI)] for i in range(DI)]
    matrix = torch.tensor(signs, dtype=torch.float64) / math.sqrt(DI)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(DI, dtype=torch.float64))
    queries = torch.randn(6, DI, generator=torch.Generator().manual_seed(1)).double()
    keys, turned_keys = stored_keys(plain), stored_keys(turned)
    error = (queries @ matrix @ turned_keys.T - queries @ keys.T).abs()
    lengths = queries.norm(dim=1)[:, None] * keys.norm(dim=1)
    assert (error <= 8 * torch.finfo(torch.float32).eps * lengths).all()
    assert not torch.allclose(keys, turned_keys, atol=0.1)


@pytest.mark.parametrize("backend", backends("index_write"))
def test_strided_rows(backend: str, device: str) -> None:
    """Plain formats may stand in wider rows; what is between them stays."""
    inputs = KeyCase("", "index_bf16").make(device)
    run_or_skip(index_write, inputs, backend)
    spaced = broken(KeyCase("", "index_bf16").make(device), cache=strided)
    before = page_bytes(spaced["cache"])
    run_or_skip(index_write, spaced, backend)
    assert torch.equal(stored_keys(spaced), stored_keys(inputs))
    changed = (page_bytes(spaced["cache"]) != before).sum()
    assert 0 < changed <= len(written_slots(inputs)) * 64


@pytest.mark.parametrize("backend", backends("index_write"))
def test_offsets_beyond_int32(backend: str, device: str) -> None:
    """A slot past byte 2^31 of the cache. Memory is reserved, hardly any of it is touched."""
    N, BS, DI = 260_000, 64, 128
    with poisoned_memory(False):
        cache = torch.empty((N, BS, DI + 4), dtype=torch.uint8, device=device)
    assert cache.numel() > 2**31
    near = KeyCase("", DI=DI, BS=BS, N=1, slots=(63, 5)).make(device)
    run_or_skip(index_write, near, backend)
    slots = near["slot_mapping"] + (N - 1) * BS
    cache[-1] = 0xFF
    far = broken(near, cache=lambda _: cache, slot_mapping=lambda _: slots)
    far.run(index_write, backend=backend)
    assert torch.equal(cache[-1], near["cache"][0])


def test_declaration(device: str) -> None:
    check_declaration(index_write, BASE.make(device), "k_raw norm_weight norm_bias")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cache": lambda t: t.float()}, "cache must be torch.bfloat16 for format index_bf16, got"),
        ({"k_raw": lambda t: t[:4]}, "slot_mapping must have at most T=4 slots, got 5"),
        ({"positions": put((3,), 50)}, "positions must be within the table's 0..49, got"),
        ({"positions": put((3,), -1)}, "positions must be within the table's 0..49, got -1.."),
        ({"table": lambda t: t.int()}, "table must be"),
        ({"table": lambda t: t.bfloat16()}, "table must be"),  # as ops/rope
        ({"table": lambda t: t[:, 1:]}, "rope_start must leave an even R=7 columns of DI=32"),
        ({"table": lambda t: t.repeat(1, 5)}, "rope_start must leave an even R=40 columns of DI="),
        ({"rope_start": 25}, "rope_start must leave an even R=8 columns of DI=32, got 25"),
        ({"rope_start": -1}, "rope_start must leave an even R=8 columns of DI=32, got -1"),
        ({"pairing": "neox"}, "pairing must be pairs or halves, got 'neox'"),
        ({"slot_mapping": lambda t: t + 1}, "slot_mapping must be below N*BS=20, got 20"),
        ({"slot_mapping": lambda t: t % 3}, "slot_mapping must name each slot once, got 0 twice"),
    ],
)
def test_bad_input_changes_nothing(changes: dict[str, Any], message: str) -> None:
    inputs = BASE.make()
    before = page_bytes(inputs["cache"])
    with pytest.raises(ShapeError) as error:
        broken(inputs, **changes).run(index_write, backend="reference")
    assert f"index_write: {message}" in str(error.value)
    assert torch.equal(page_bytes(inputs["cache"]), before)


def test_widths_that_cannot_be() -> None:
    with pytest.raises(ShapeError, match="index_write: hadamard needs DI to be a power of two, go"):
        KeyCase("", DI=24, hadamard=True).make().run(index_write, backend="reference")
    inputs = broken(KeyCase("").make(), cache=strided)
    with pytest.raises(ShapeError, match="index_write: each block must be contiguous for format"):
        inputs.run(index_write, backend="reference")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "bf16"}, "format 'bf16' is not known for index rows. Known: index_fp32"),
        ({"format": "fp4"}, "format 'fp4' is not known. Known: index_fp32"),
    ],
)
def test_unknown_formats(change: dict[str, str], message: str) -> None:
    inputs = BASE.make()
    before = page_bytes(inputs["cache"])
    with pytest.raises(ConfigError) as error:
        broken(inputs, **change).run(index_write, backend="reference")
    assert message in str(error.value)
    assert torch.equal(page_bytes(inputs["cache"]), before)


def test_cost() -> None:
    needed = cost(3, DI=128, R=64, format="index_fp8", itemsize=2)
    assert needed.bytes == 3 * (256 + 132 + 256 + 16)
    assert needed.flops == 3 * (8 * 128 + 3 * 64)
