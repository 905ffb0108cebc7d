"""pack_mask: every backend bit by bit against a Python loop, chunks, bad input."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from openmla.errors import ShapeError
from openmla.ops import pack_mask
from openmla.ops.pack_mask import cost
from openmla.testing import Inputs, strided
from tests.ops.contract import backends, run_or_skip
from tests.ops.declared import check_declaration

# selections, key_starts, key_lens, num_words
Case = tuple[Sequence[Sequence[int]], Sequence[int], Sequence[int], int]


def make(case: Case, device: str = "cpu") -> Inputs:
    """Selections of several lengths, -1 after their end, in a strided tensor."""
    selections, key_starts, key_lens, num_words = case
    K = max((len(row) for row in selections), default=0)
    padded = [[*row, *[-1] * (K - len(row))] for row in selections]
    rows = torch.tensor(padded, dtype=torch.int32).reshape(len(selections), K)
    tensors = {
        "topk_positions": strided(rows.to(device)),
        "key_starts": torch.tensor(key_starts, dtype=torch.int32, device=device),
        "key_lens": torch.tensor(key_lens, dtype=torch.int32, device=device),
    }
    return Inputs(tensors, {"num_words": num_words}, ())


def random_rows(
    T: int, K: int, high: int, key_starts: Sequence[int], key_lens: Sequence[int], num_words: int
) -> Case:
    generator = torch.Generator().manual_seed(T + K)
    rows = torch.randint(-3, high, (T, K), generator=generator).tolist()
    return rows, list(key_starts), list(key_lens), num_words


def looped(inputs: Inputs) -> list[list[int]]:
    """The contract with Python integers, words without a sign."""
    made = []
    columns = (tensor.tolist() for tensor in inputs.tensors.values())
    for row, start, length in zip(*columns, strict=True):
        bits = sum(1 << (p - start) for p in {*row} if p >= 0 and 0 <= p - start < length)
        made.append([bits >> 32 * w & 0xFFFFFFFF for w in range(inputs.scalars["num_words"])])
    return made


def unsigned(mask: Tensor) -> list[list[int]]:
    return [[word & 0xFFFFFFFF for word in row] for row in mask.tolist()]


CASES: dict[str, Case] = {
    "every-bit": ([range(64)], [0], [64], 2),
    "bit-31": ([[31], [63], [0, 31, 32]], [0] * 3, [64] * 3, 2),
    "order-and-repeats": ([[5, 3, 5, 5, 0, 3], [9]], [0, 0], [10, 10], 1),
    "nothing-selected": ([[-1, -1], []], [0, 0], [40, 40], 2),
    "outside": ([[-1, -(2**31), 39, 40, 41, 2**31 - 1], [39]], [0, 0], [40, 39], 2),
    "past-the-keys-within-a-word": ([range(64)] * 3, [0] * 3, [33, 1, 0], 2),
    "129-keys": ([range(0, 200, 3), [128], [129], [127, 128]], [0] * 4, [129] * 4, 5),
    "spare-words": ([[0, 40]], [0], [41], 9),
    "later-ranges": ([range(90, 120)] * 3, [100, 97, 119], [7, 32, 64], 2),
    "far-ranges": ([[2**31 - 1, 2**31 - 2, 0, -1]], [2**31 - 40], [40], 2),
    "no-token": ([], [], [], 3),
    "no-column": ([[], []], [0, 0], [5, 5], 1),
    "no-word": ([[0, 1], [-1, 2]], [0, 1], [0, 0], 0),
    "one-key": ([[0], [7]], [0, 7], [1, 1], 1),
    "many": random_rows(70, 131, 400, [0, 64] * 35, range(230, 300), 10),
    "more-than-a-tile": random_rows(2, 2500, 70000, [0, 3], [67170, 67199], 2100),
    "wide": random_rows(3, 2048, 5000, [0, 1, 905], [4096, 4095, 4000], 128),
}


@pytest.mark.contract
@pytest.mark.parametrize("backend", backends("pack_mask"))
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_contract(case: Case, backend: str, device: str) -> None:
    inputs = make(case, device)
    mask = run_or_skip(pack_mask, inputs, backend)
    assert mask.dtype == torch.int32 and mask.device.type == device
    assert mask.shape == (len(case[0]), case[3])
    assert unsigned(mask) == looped(inputs)


@given(
    st.lists(st.lists(st.integers(-2, 140), max_size=40), max_size=4),
    st.integers(0, 100),
    st.integers(0, 96),
)
def test_reference_equals_loops(rows: list[list[int]], start: int, length: int) -> None:
    inputs = make((rows, [start] * len(rows), [length] * len(rows), 3))
    assert unsigned(inputs.run(pack_mask, backend="reference")) == looped(inputs)


@pytest.mark.parametrize("backend", backends("pack_mask"))
@pytest.mark.parametrize("size", [32, 64, 96])
def test_chunks_make_the_whole(size: int, backend: str, device: str) -> None:
    """Masks of chunks, each put at its offset and OR-ed, are the mask of all keys."""
    S, words = 250, 8
    chosen = torch.randperm(S, generator=torch.Generator().manual_seed(0))[:50]
    rows = [chosen.tolist(), list(range(S)), [249], [-1]]
    whole = run_or_skip(pack_mask, make((rows, [0] * 4, [S] * 4, words), device), backend)
    joined = torch.zeros_like(whole)
    for start in range(0, S, size):
        chunk = min(size, S - start)
        part = make((rows, [start] * 4, [chunk] * 4, -(-chunk // 32)), device)
        mask = run_or_skip(pack_mask, part, backend)
        joined[:, start // 32 : start // 32 + mask.shape[1]] |= mask
    assert torch.equal(joined, whole)


@pytest.mark.parametrize("backend", backends("pack_mask"))
def test_chunks_at_any_offset(backend: str, device: str) -> None:
    """Chunks need not begin at a word: as integers they are shifted and added."""
    S, bounds = 130, [0, 7, 40, 41, 130]
    rows = [list(range(0, S, 3)), list(range(S))]
    whole = run_or_skip(pack_mask, make((rows, [0, 0], [S, S], 5), device), backend)
    joined = [0, 0]
    for start, stop in pairwise(bounds):
        part = make((rows, [start] * 2, [stop - start] * 2, 3), device)
        for t, words in enumerate(unsigned(run_or_skip(pack_mask, part, backend))):
            joined[t] |= sum(word << 32 * w for w, word in enumerate(words)) << start
    expected = [sum(word << 32 * w for w, word in enumerate(row)) for row in unsigned(whole)]
    assert joined == expected


def test_reference_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few rows at a time; the result does not change."""
    inputs = make(CASES["many"])
    expected = inputs.run(pack_mask, backend="reference")
    monkeypatch.setattr("openmla.backends.reference.pack_mask.KEYS", 3 * 320)
    assert torch.equal(inputs.run(pack_mask, backend="reference"), expected)


def test_declaration(device: str) -> None:
    check_declaration(pack_mask, make(CASES["later-ranges"], device), "")


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("key_lens", lambda t: t + 1, "key_lens must be within num_words=2 words, got 8..65"),
        ("key_lens", lambda t: t - 8, "key_lens must be within num_words=2 words, got -1..56"),
        ("num_words", lambda n: n - 1, "key_lens must be within num_words=1 words, got 7..64"),
        ("num_words", lambda n: -n, "num_words must not be negative, got -2"),
    ],
)
def test_bad_input(name: str, change: Callable[[Any], Any], message: str) -> None:
    inputs = make(CASES["later-ranges"])
    target: dict[str, Any] = inputs.tensors if name in inputs.tensors else inputs.scalars
    target[name] = change(target[name])
    with pytest.raises(ShapeError) as error:
        inputs.run(pack_mask, backend="reference")
    assert f"pack_mask: {message}" in str(error.value)


def test_cost() -> None:
    assert cost(10, K=2048, num_words=128) == (10 * (4 * 2048 + 8 + 512), 0)
