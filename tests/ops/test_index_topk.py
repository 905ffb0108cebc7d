"""index_topk: one right answer per row, ties included: sorted() says which."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from openmla.errors import ShapeError
from openmla.ops import index_topk
from openmla.ops.index_topk import cost
from openmla.testing import Inputs, poisoned_memory
from tests.ops.contract import backends, broken, put, run_or_skip
from tests.ops.declared import check_declaration

Rows = Sequence[Sequence[float]]
INF, NAN = math.inf, math.nan
LARGEST = torch.finfo(torch.float32).max


def make(
    rows: Rows,
    *,
    K: int,
    starts: Sequence[int] | None = None,
    width: int | None = None,
    sorted: bool = True,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> Inputs:
    """Rows at their starts; NaN and +inf take turns in the columns around them."""
    starts = [0] * len(rows) if starts is None else starts
    ends = [start + len(row) for start, row in zip(starts, rows, strict=True)]
    S = max(ends, default=0) + 3 if width is None else width
    buffer = torch.full((len(rows), S + 5), NAN, dtype=dtype)
    buffer[:, 1::2] = INF
    for t, row in enumerate(rows):
        buffer[t, starts[t] : ends[t]] = torch.tensor(row, dtype=dtype)
    tensors = {
        "logits": buffer.to(device)[:, :S],
        "row_starts": torch.tensor(starts, dtype=torch.int32, device=device),
        "row_lens": torch.tensor([len(row) for row in rows], dtype=torch.int32, device=device),
    }
    return Inputs(tensors, {"K": K, "sorted": sorted}, ())


def best(row: Sequence[float], K: int) -> list[int]:
    """The contract: highest score first, then lowest position; NaN is as low as scores go."""
    scores = [-INF if math.isnan(score) else score for score in row]
    return sorted(sorted(range(len(row)), key=lambda j: (-scores[j], j))[:K])


def check(inputs: Inputs, rows: Rows, backend: str) -> None:
    K, rising = inputs.scalars["K"], inputs.scalars["sorted"]
    positions, lens = run_or_skip(index_topk, inputs, backend)
    assert positions.dtype == lens.dtype == torch.int32
    assert positions.shape == (len(rows), K)
    assert lens.tolist() == [min(len(row), K) for row in rows]
    for found, row in zip(positions.tolist(), rows, strict=True):
        wanted = best(row, K)
        chosen = found[: len(wanted)]
        assert (chosen if rising else sorted(chosen)) == wanted
        assert found[len(wanted) :] == [-1] * (K - len(wanted))


def noise(*lens: int, seed: int = 0) -> list[list[float]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, generator=generator).tolist() for n in lens]


CASES: dict[str, tuple[Rows, int]] = {
    "plain": (noise(70, 33, 9), 7),
    "one": (noise(70, 33, 1), 1),
    "K-odd": (noise(300, 301, 17), 129),
    "K-beyond-row-and-width": (noise(5, 0, 9), 40),
    "around-K": (noise(16, 17, 18, 15), 17),
    "empty-rows": (noise(0, 20, 0, 0), 3),
    "only-empty-rows": ([[], []], 4),
    "no-rows": ([], 5),
    "all-equal": ([[1.5] * 40, [0.0] * 41, [-2.0] * 12], 11),
    "equal-blocks": ([[float(j // 8) for j in range(64)], [-float(j // 9) for j in range(65)]], 13),
    "cut-inside-equals": ([[3, 1, 2, 2, 5, 2, 2, 1, 2], [2, 2, 2, 9, 2, 2]], 4),
    "exact-zeros": ([[0.0] * 10 + [0.25, -0.5, 0.0, 0.125] * 5], 9),
    "signed-zeros": ([[-0.0, 0.0, -0.0, 0.0, -1.0], [-1.0, 0.0, -0.0, 0.0, -0.0, -0.0]], 3),
    "negative-infinity": ([[-INF] * 9, [-INF, 1, -INF, -INF, 2, -INF], [-INF] * 3 + [-1]], 3),
    "nan": ([[NAN, 1, NAN, 2, NAN, 0], [NAN] * 7, [NAN, -LARGEST, NAN, NAN, 5, NAN]], 3),
    "nan-is-negative-infinity": ([[NAN, -INF, NAN, -INF, 1], [-INF, NAN, -INF, NAN, 1]], 3),
    "infinity": ([[1, INF, 2, INF, 3], [INF] * 6, [-INF, INF, NAN, INF, 0]], 2),
    "largest-below-infinity": ([[LARGEST, INF, LARGEST, INF]], 2),
    "smallest-above-negative-infinity": ([[-INF, -LARGEST, NAN, -LARGEST]], 2),
    "tiny": (
        [[2**-149, 0.0, -(2**-149), 2**-148, 2**-126], [1 + 2**-23, 1, 1 - 2**-24, 1 + 2**-22]],
        2,
    ),
    "rising": ([[float(j) for j in range(100)], [-float(j) for j in range(99)]], 10),
}


@pytest.mark.contract
@pytest.mark.parametrize("backend", backends("index_topk"))
@pytest.mark.parametrize("rising", [True, False], ids=["sorted", "any-order"])
@pytest.mark.parametrize("name", CASES)
def test_contract(name: str, rising: bool, backend: str, device: str) -> None:
    rows, K = CASES[name]
    check(make(rows, K=K, sorted=rising, device=device), rows, backend)


@pytest.mark.parametrize("backend", backends("index_topk"))
@pytest.mark.parametrize("name", CASES)
def test_rows_that_start_elsewhere(name: str, backend: str, device: str) -> None:
    """Positions count from the start; what stands before it has no say."""
    rows, K = CASES[name]
    starts = [(7 * t + 3) % 17 for t in range(len(rows))]
    check(make(rows, K=K, starts=starts, device=device), rows, backend)


@pytest.mark.parametrize("backend", backends("index_topk"))
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_dtypes(dtype: torch.dtype, backend: str, device: str) -> None:
    """Few bits make many equals; many bits tell what float32 cannot."""
    rows = [torch.tensor(row).to(dtype).tolist() for row in noise(500, 90)]
    rows.append([1.0, 1 + 2**-50, 1.0] if dtype == torch.float64 else [1.0, 2.0, 1.0])
    check(make(rows, K=2, dtype=dtype, device=device), rows, backend)
    check(make(rows, K=50, dtype=dtype, device=device), rows, backend)


@pytest.mark.parametrize("backend", backends("index_topk"))
def test_long_rows(backend: str, device: str) -> None:
    rows = noise(9001, 2048, 2049)
    rows += [[float(round(4 * score)) for score in row] for row in noise(9000, 5000, seed=1)]
    check(make(rows, K=2048, device=device), rows, backend)


def cluster(n: int, high: int, first: int) -> list[float]:
    """Noise with a run of high scores: neighbours say little about the rest of a row."""
    row = noise(n)[0]
    row[first : first + high] = [9 + score for score in row[first : first + high]]
    return row


def spikes(n: int, every: int) -> list[float]:
    """High scores at regular places, which a regular sample takes for the whole row, or misses."""
    return [score + 50 * (j % every < 8) for j, score in enumerate(noise(n)[0])]


LONG: dict[str, Rows] = {
    "noise": noise(20000, 8193, 30011),
    "all-equal": [[0.0] * 20001, [-INF] * 9000],
    "mostly-zero": [[max(score - 2, 0.0) for score in row] for row in noise(20000, 40000)],
    "mostly-negative-zero": [[score if score > 2 else -0.0 for score in noise(20000)[0]]],
    "mostly-nan": [[score if score > 2 else NAN for score in noise(20000)[0]]],
    "few-above-infinity-below": [[score if score > 2.5 else -INF for score in noise(20000)[0]]],
    "cluster": [cluster(20000, 300, 777), cluster(20000, 9000, 10000), cluster(30000, 1000, 29000)],
    "one-stretch": [cluster(40000, 3000, 36900), cluster(33000, 4096, 0), cluster(9000, 900, 8000)],
    "highest-equal": [
        [9.0 if j % 13 == 4 else score for j, score in enumerate(noise(n)[0])]
        for n in (8000, 20000, 30011, 60000)
    ],
    "spikes": [spikes(20480, 40), spikes(20480, 41), [-score for score in spikes(20480, 40)]],
    "far-apart": [[10.0**score for score in noise(20000)[0]], [2.0**-j for j in range(9000)]],
    "rising": [[float(j) for j in range(12000)], [-float(j) for j in range(12001)]],
    "one-bit-apart": [
        (torch.arange(12000, dtype=torch.int32) * 7 % 12000 + 0x3F800000)
        .view(torch.float32)
        .tolist()
    ],
}


@pytest.mark.parametrize("backend", backends("index_topk"))
@pytest.mark.parametrize(
    ("name", "K"),
    [(name, K) for name in LONG for K in (1, 600, 2048)]
    + [(name, 3000) for name in ("noise", "one-stretch", "highest-equal")]
    + [(name, 5000) for name in ("all-equal", "mostly-nan", "far-apart", "one-bit-apart")],
)
def test_rows_longer_than_a_tile(name: str, K: int, backend: str, device: str) -> None:
    """Ties, gaps and order that mislead a sample of the row, starting wherever."""
    rows = LONG[name]
    starts = [3 * t + 1 for t in range(len(rows))]
    check(make(rows, K=K, starts=starts, device=device), rows, backend)


@pytest.mark.parametrize("backend", backends("index_topk"))
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_long_rows_of_few_bits(dtype: torch.dtype, backend: str, device: str) -> None:
    rows = [torch.tensor(row).to(dtype).tolist() for row in noise(20000, 9001)]
    check(make(rows, K=512, starts=[5, 0], dtype=dtype, device=device), rows, backend)


@pytest.mark.triton
@pytest.mark.parametrize(("config", "K"), [("AMD", 2048), ("AMD_LARGE_K", 3000)])
def test_what_amd_launches(
    config: str, K: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On any GPU: no inline PTX; if K is large, fewer warps than chunks."""
    launch = pytest.importorskip("openmla.backends.triton._topk_launch")
    assert launch.config_of(1000, K, 304, launch.GFX942) == getattr(launch, config)
    monkeypatch.setattr(launch, "config_of", lambda *_: getattr(launch, config))
    monkeypatch.setattr(launch, "assembly", lambda: False)
    rows = [*LONG["noise"], *LONG["one-stretch"]]
    check(make(rows, K=K, starts=list(range(len(rows))), device=device), rows, "triton")


@pytest.mark.parametrize("backend", backends("index_topk"))
def test_a_tensor_that_lies_oddly(backend: str, device: str) -> None:
    """Four bytes behind any wider alignment."""
    rows = noise(9000, 50)
    inputs = make(rows, K=40, width=9001, device=device)
    odd = torch.empty(2 * 9007 + 1, device=device)[1:].view(2, 9007)[:, :9001]
    odd.copy_(inputs["logits"])
    check(Inputs({**inputs.tensors, "logits": odd}, inputs.scalars, ()), rows, backend)


@pytest.mark.parametrize("backend", backends("index_topk"))
def test_a_row_that_ends_with_the_buffer(backend: str, device: str) -> None:
    rows = noise(20, 13)
    check(make(rows, K=5, starts=[0, 7], width=20, device=device), rows, backend)


@pytest.mark.parametrize("backend", backends("index_topk"))
def test_invariance(backend: str, device: str) -> None:
    """A row gives the same answer alone, in any batch, at any width and start."""
    rows = [[float(round(3 * score)) for score in row] for row in noise(90, 31, 200, 4)]
    expected, _ = run_or_skip(index_topk, make(rows, K=30, device=device), backend)
    for t, row in enumerate(rows):
        for start, width in ((0, len(row)), (0, 1000), (37, 300)):
            alone = make([row], K=30, starts=[start], width=width, device=device)
            found, _ = alone.run(index_topk, backend=backend)
            assert torch.equal(found[0], expected[t])
    found, _ = make(rows[::-1] * 3, K=30, width=555, device=device).run(index_topk, backend=backend)
    assert torch.equal(found, expected.flip(0).repeat(3, 1))


def test_reference_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = noise(40, 3, 0, 33, 41, 12, 40)
    monkeypatch.setattr("openmla.backends.reference.index_topk.SCORES", 2 * 44)
    check(make(rows, K=10), rows, "reference")


@pytest.mark.parametrize("backend", backends("index_topk"))
def test_offsets_beyond_int32(backend: str, device: str) -> None:
    """A row past element 2^31. Memory is reserved, hardly any of it is touched."""
    row = noise(50)[0]
    with poisoned_memory(False):
        buffer = torch.empty(2**31 + 50, dtype=torch.float16, device=device)
    logits = buffer.as_strided((2, 50), (2**31, 1))
    logits.copy_(torch.tensor([row, row]))
    row = logits[1].tolist()
    near = make([row, row], K=9, width=50, dtype=torch.float16, device=device)
    check(Inputs({**near.tensors, "logits": logits}, near.scalars, ()), [row, row], backend)


# few different values, so that most examples have ties at the cut
scores = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.5, -INF, INF, NAN, 2**-149, LARGEST, -LARGEST])
some_rows = st.lists(st.lists(scores, max_size=12), min_size=1, max_size=4)


@pytest.mark.parametrize("backend", backends("index_topk"))
@given(rows=some_rows, K=st.integers(1, 9), first=st.integers(0, 9), rising=st.booleans())
def test_equals_sorted(
    backend: str, rows: list[list[float]], K: int, first: int, rising: bool
) -> None:
    starts = [(first * (t + 1)) % 10 for t in range(len(rows))]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    check(make(rows, K=K, starts=starts, sorted=rising, device=device), rows, backend)


def base() -> Inputs:
    return make(noise(30, 12, 40), K=7)  # width 43


def test_declaration(device: str) -> None:
    check_declaration(index_topk, make(noise(30, 12, 40), K=7, device=device), "")


@pytest.mark.parametrize("backend", backends("index_topk"))
def test_inputs_stay(backend: str, device: str) -> None:
    """Neither scores nor lengths are written to, nor handed back."""
    inputs = make(noise(5, 3), K=40, device=device)
    before = inputs.clone()
    _, lens = run_or_skip(index_topk, inputs, backend)
    lens.fill_(-7)
    for name, tensor in before.tensors.items():
        assert torch.equal(tensor.nan_to_num(), inputs[name].nan_to_num())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"row_starts": put((1,), -1)}, "row 1 must lie within the S=43 columns, got 12 from -1"),
        ({"row_starts": put((2,), 4)}, "row 2 must lie within the S=43 columns, got 40 from 4"),
        (
            {"row_starts": put((1,), 2**31 - 1)},
            f"row 1 must lie within the S=43 columns, got 12 from {2**31 - 1}",
        ),
        ({"row_lens": put((1,), -1)}, "row 1 must lie within the S=43 columns, got -1 from 0"),
        ({"row_lens": put((0,), 44)}, "row 0 must lie within the S=43 columns, got 44 from 0"),
        ({"K": 0}, "K must be positive, got 0"),
        ({"K": -3}, "K must be positive, got -3"),
    ],
)
def test_bad_input(changes: dict[str, int | Callable[[Tensor], Tensor]], message: str) -> None:
    with pytest.raises(ShapeError) as error:
        broken(base(), **changes).run(index_topk, backend="reference")
    assert f"index_topk: {message}" in str(error.value)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_every_grad_mode(mode: Any) -> None:
    """Positions have no gradient to lose, so nothing is refused."""
    with torch.inference_mode(False):
        inputs = broken(base(), logits=lambda t: t.clone().requires_grad_())
        with mode():
            positions, lens = inputs.run(index_topk, backend="reference")
    assert not positions.requires_grad and not lens.requires_grad


def test_cost() -> None:
    needed = cost(3, 1000, K=16)
    assert needed.bytes == 4 * 1000 + 3 * (4 * 16 + 12) and needed.flops == 1000
    assert cost(3, 1000, K=16, itemsize=2).bytes == needed.bytes - 2000
