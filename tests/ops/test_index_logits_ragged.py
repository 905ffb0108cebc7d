"""index_logits_ragged: every backend against float64, the reference against plain loops."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from openmla.cache.format import quantize_groups
from openmla.errors import ShapeError
from openmla.ops import index_logits, index_logits_ragged
from openmla.ops.index_logits_ragged import cost
from openmla.testing import Inputs, poison, strided
from tests.ops.contract import backends, broken, put, run_or_skip
from tests.ops.declared import check_declaration
from tests.ops.index_cases import IndexCase, score_budget, stored_key, unit_budget

FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class PackedCase:
    """Requests' keys one after another, each query with its range: (start, end) per token."""

    name: str
    ranges: tuple[tuple[int, int], ...]
    S: int
    HI: int = 4
    DI: int = 32
    dtype: torch.dtype = torch.bfloat16  # queries and keys; fp8 keys come with scales
    whole: bool = False  # small whole numbers: every sum is exact
    seed: int = 0

    def __str__(self) -> str:
        return self.name

    def make(self, device: str | torch.device = "cpu") -> Inputs:
        generator = torch.Generator().manual_seed(self.seed)
        T = len(self.ranges)

        def values(*shape: int, most: int) -> Tensor:
            if self.whole:
                return torch.randint(-most, most + 1, shape, generator=generator).float()
            return torch.randn(*shape, generator=generator)

        keys, scales = values(self.S, self.DI, most=7), torch.ones(self.S)
        if self.dtype == FP8:
            keys, scales = quantize_groups(keys, exact=not self.whole)
        keys = keys.to(self.dtype)
        used = torch.zeros(self.S, dtype=torch.bool)
        for start, end in self.ranges:
            used[start : max(start, end)] = True
        nobodys = int((~used).sum())
        keys.view(torch.uint8)[~used] = 0xFF
        scales[~used] = poison((nobodys,), torch.float32)
        bounds = torch.tensor(self.ranges, dtype=torch.int32).reshape(T, 2).to(device)
        tensors = {
            "q_idx": strided(values(T, self.HI, self.DI, most=3).to(device, self.dtype)),
            "w_idx": strided(values(T, self.HI, most=4).to(device)),
            "k_idx": strided(keys.to(device)),
            "k_scale": scales.to(device),
            "starts": bounds[:, 0].contiguous(),
            "ends": bounds[:, 1].contiguous(),
        }
        return Inputs(tensors, {}, ("q_idx", "w_idx", "k_idx"))


def causal(*requests: tuple[int, int]) -> tuple[tuple[int, int], ...]:
    """Ranges of (query_len, seq_len) requests whose keys are packed in order."""
    ranges, first = [], 0
    for n, S in requests:
        ranges += [(first, first + S - n + i + 1) for i in range(n)]
        first += S
    return tuple(ranges)


BASE = PackedCase("prefill", causal((3, 3), (4, 9)), 12)
CASES = [
    BASE,
    replace(BASE, name="fp8", dtype=FP8),
    replace(BASE, name="fp16", dtype=torch.float16),
    replace(BASE, name="fp32", dtype=torch.float32),
    PackedCase("no-token", (), 5),
    PackedCase("no-key", ((0, 0), (0, 0)), 0),
    PackedCase("one-key", ((0, 1),), 1, HI=1),
    PackedCase("keys-of-nobody", ((3, 9), (3, 4), (14, 17)), 20),
    PackedCase("fp8-keys-of-nobody", ((3, 9), (3, 4), (14, 17)), 20, dtype=FP8),
    PackedCase("empty-ranges", ((5, 5), (7, 3), (0, 0), (10, 10), (2, 4), (99, 0), (4, -3)), 10),
    PackedCase("own-ranges", ((9, 33), (0, 2), (32, 33), (0, 33), (16, 17)), 33),
    PackedCase("3-heads", causal((5, 40), (3, 21)), 61, HI=3, dtype=FP8),
    PackedCase("17-heads", causal((5, 40), (3, 21)), 61, HI=17),
    PackedCase("64-heads", causal((5, 40), (3, 21)), 61, HI=64, dtype=FP8),
    PackedCase("130-heads", causal((2, 20), (1, 9)), 29, HI=130, DI=16, dtype=FP8),
    PackedCase("width-24", causal((5, 40), (3, 21)), 61, DI=24, dtype=FP8),
    PackedCase("width-256", causal((2, 20)), 20, DI=256, HI=2, dtype=FP8),
    PackedCase("middle-of-many", ((600, 640), (610, 700), (0, 0), (690, 695)), 1500, HI=2),
    PackedCase("one-past-a-tile", causal((65, 65), (1, 64)), 129, HI=2),
    PackedCase("v32-widths", causal((9, 130), (17, 70)), 200, HI=64, DI=128, dtype=FP8),
    PackedCase("glm5-widths", causal((20, 257)), 257, HI=32, DI=128, dtype=FP8),
]
LOOPED = [case for case in CASES if case.S < 100]


@pytest.mark.contract
@pytest.mark.parametrize("backend", backends("index_logits_ragged"))
@pytest.mark.parametrize("case", CASES, ids=str)
def test_contract(case: PackedCase, backend: str, device: str) -> None:
    inputs = case.make(device)
    actual = run_or_skip(index_logits_ragged, inputs, backend)
    exact = inputs.double().run(index_logits_ragged, backend="reference")
    peer = inputs.run(index_logits_ragged, backend="reference")
    assert actual.dtype == torch.float32 and exact.dtype == torch.float64
    if device == "cuda" and backend == "triton":
        whole = inputs.double()
        tensors = {
            name: tensor.abs() if tensor.is_floating_point() else tensor
            for name, tensor in whole.tensors.items()
        }
        magnitude = replace(whole, tensors=tensors).run(index_logits_ragged, backend="reference")
        assert unit_budget(actual, exact, magnitude, fp8=case.dtype == FP8) <= 1
    else:
        assert score_budget(actual, exact, peer) <= 1


@pytest.mark.parametrize("case", LOOPED, ids=str)
def test_reference_equals_loops(case: PackedCase) -> None:
    """The meaning, once more and independently: Python floats, one key and one head at a time."""
    inputs = replace(case, HI=min(case.HI, 3)).make().double()
    logits = inputs.run(index_logits_ragged, backend="reference")
    assert logits.shape == (len(case.ranges), case.S)
    for t, (start, end) in enumerate(case.ranges):
        for j in range(case.S):
            if not start <= j < end:
                assert logits[t, j] == -torch.inf
                continue
            dots = (inputs["q_idx"][t] @ inputs["k_idx"][j]).tolist()
            weights = inputs["w_idx"][t].tolist()
            total = math.fsum(w * max(dot, 0.0) for w, dot in zip(weights, dots, strict=True))
            wanted = float(inputs["k_scale"][j]) * total
            assert math.isclose(logits[t, j], wanted, rel_tol=1e-11, abs_tol=1e-12)


@pytest.mark.parametrize("backend", backends("index_logits_ragged"))
@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8], ids=str)
def test_whole_numbers_are_exact(dtype: torch.dtype, backend: str, device: str) -> None:
    """No sum rounds here, so order of summation is no excuse."""
    case = PackedCase("whole", causal((7, 40), (3, 21)), 66, HI=17, dtype=dtype, whole=True)
    inputs = case.make(device)
    actual = run_or_skip(index_logits_ragged, inputs, backend)
    exact = inputs.double().run(index_logits_ragged, backend="reference")
    assert torch.equal(actual.double(), exact)


@pytest.mark.parametrize("backend", backends("index_logits_ragged"))
@pytest.mark.parametrize("keys", [torch.float16, torch.float32, torch.float64, FP8], ids=str)
def test_other_keys(keys: torch.dtype, backend: str, device: str) -> None:
    """Keys need not be of the queries' type."""
    case = PackedCase("mixed", causal((7, 40), (3, 21)), 61, HI=3, whole=True)
    inputs = broken(case.make(device), k_idx=lambda t: t.to(keys))
    actual = run_or_skip(index_logits_ragged, inputs, backend)
    exact = inputs.double().run(index_logits_ragged, backend="reference")
    assert torch.equal(actual.double(), exact)


@pytest.mark.parametrize("backend", backends("index_logits_ragged"))
def test_nan_stays_in_its_column(backend: str, device: str) -> None:
    """A key that holds NaN scores NaN for those who see it, and changes no other score."""
    inputs = PackedCase("nan", causal((7, 40), (3, 21)), 61, HI=3, whole=True).make(device)
    expected = run_or_skip(index_logits_ragged, inputs, backend).clone()
    inputs["k_idx"][5, 3] = torch.nan
    actual = inputs.run(index_logits_ragged, backend=backend)
    assert actual[:7, 5].isnan().all()
    actual[:7, 5] = expected[:7, 5]
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("backend", backends("index_logits_ragged"))
def test_equals_paged(backend: str, device: str) -> None:
    """The same keys in blocks and packed, fp8 bytes and all: the same scores."""
    case = IndexCase("both", (3, 2), (40, 21), HI=5, dtype=FP8, whole=True)
    paged = case.make(device)
    expected = paged.run(index_logits, backend="reference")
    rows: list[Tensor] = []
    scales, ranges = [], []
    for b, S in enumerate(case.seq_lens):
        first = len(rows)
        for j in range(S):
            block = int(paged["block_table"][b, j // case.BS])
            key = stored_key(paged["cache"], block, j % case.BS, case.format, case.DI)
            rows.append(key * 64)  # whole numbers have the scale 2^-6
            scales.append(2.0**-6)
        n = case.query_lens[b]
        ranges += [(first, first + S - n + i + 1) for i in range(n)]
    bounds = torch.tensor(ranges, dtype=torch.int32, device=device)
    tensors = {
        "q_idx": paged["q_idx"],
        "w_idx": paged["w_idx"],
        "k_idx": torch.stack(rows).to(FP8),
        "k_scale": torch.tensor(scales, device=device),
        "starts": bounds[:, 0].contiguous(),
        "ends": bounds[:, 1].contiguous(),
    }
    logits = run_or_skip(index_logits_ragged, Inputs(tensors, {}, ()), backend)
    for t, (start, end) in enumerate(ranges):
        assert torch.equal(logits[t, start:end], expected[t, : end - start])


@pytest.mark.parametrize("backend", backends("index_logits_ragged"))
def test_invariance(backend: str, device: str) -> None:
    """A row's scores do not depend on the rows and keys around it."""
    case = PackedCase("alone", causal((7, 40), (3, 21)), 61, HI=3, whole=True)
    inputs = case.make(device)
    expected = run_or_skip(index_logits_ragged, inputs, backend)
    for t, (start, end) in enumerate(case.ranges):
        tensors = {
            **{name: inputs[name][t : t + 1] for name in ("q_idx", "w_idx")},
            **{name: inputs[name][start:end] for name in ("k_idx", "k_scale")},
            "starts": torch.zeros(1, dtype=torch.int32, device=device),
            "ends": torch.full((1,), end - start, dtype=torch.int32, device=device),
        }
        alone = Inputs(tensors, {}, ()).run(index_logits_ragged, backend=backend)
        assert torch.equal(alone[0], expected[t, start:end])


def test_declaration(device: str) -> None:
    check_declaration(index_logits_ragged, BASE.make(device), "q_idx w_idx")


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("w_idx", lambda t: t.half(), "w_idx must be torch.float32, got torch.float16"),
        ("starts", put((2,), -1), "starts and ends must be within the S=12 keys, got -1 and 12"),
        ("ends", put((2,), 13), "starts and ends must be within the S=12 keys, got 0 and 13"),
    ],
)
def test_bad_input(name: str, change: Callable[[Tensor], Tensor], message: str) -> None:
    with pytest.raises(ShapeError) as error:
        broken(BASE.make(), **{name: change}).run(index_logits_ragged, backend="reference")
    assert f"index_logits_ragged: {message}" in str(error.value)


def test_cost() -> None:
    needed = cost([1, 2, 3], S=10, HI=4, DI=8, itemsize=1)
    assert needed.bytes == 10 * 12 + 3 * 4 * 12 + 4 * 6
    assert needed.flops == 2 * 6 * 4 * 9
