"""What is decided about a call is decided once for its metadata, and anew when any change."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import openmla.backends as backends
from openmla import register_backend, unregister_backend
from openmla.errors import ShapeError, UnsupportedError
from openmla.ops import _register as register
from openmla.ops import merge_states, mqa_paged, rope
from openmla.ops._shapes import bind
from openmla.testing import PagedCase


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    backends.forget_choices()
    yield
    backends.forget_choices()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of x that rope was asked about."""
    seen: list[tuple[int, ...]] = []

    def noted(op: str, shapes: Any, tensors: Sequence[Tensor], known: Any) -> Any:
        if op == "rope":
            seen.append(tuple(tensors[0].shape))
        return bind(op, shapes, tensors, known)

    monkeypatch.setattr("openmla.ops._declare.bind", noted)
    return seen


def turn(x: Tensor, *, position: int = 1, pairing: str = "pairs", backend: str = "auto") -> Tensor:
    positions = torch.full((x.shape[0],), position)
    angles = torch.arange(8.0)[:, None] * torch.ones(x.shape[-1] // 2)
    table = torch.cat([angles.cos(), angles.sin()], 1)
    rope(x, positions, table, pairing=pairing, backend=backend)
    return x


def test_the_same_metadata_are_asked_about_once(asked: list[tuple[int, ...]]) -> None:
    first = turn(torch.ones(3, 2, 4))
    for _ in range(3):
        assert torch.equal(turn(torch.ones(3, 2, 4)), first)
    assert len(asked) == 1


def test_whatever_changes_is_asked_about(asked: list[tuple[int, ...]]) -> None:
    room = torch.ones(200)
    calls: list[dict[str, Any]] = [
        {"x": torch.ones(3, 2, 4)},
        {"x": torch.ones(5, 2, 4)},  # shape
        {"x": torch.ones(2, 3, 4).transpose(0, 1)},  # strides
        {"x": torch.ones(3, 2, 4, dtype=torch.float64)},  # type
        {"x": room[1:25].view(3, 2, 4)},  # alignment
        {"x": torch.ones(3, 2, 4), "pairing": "halves"},
        {"x": torch.ones(3, 2, 4), "backend": "reference"},
    ]
    for number, call in enumerate(calls, 1):
        for _ in range(2):
            turn(**call)
            assert len(asked) == number


def test_bad_input_is_refused_after_a_good_call_and_unwritten() -> None:
    for _ in range(2):
        turn(torch.ones(3, 2, 4))
        odd = torch.ones(3, 2, 4)[:, :, :3]
        with pytest.raises(ShapeError, match=r"rope: x must be .* with R even, got"):
            rope(odd, torch.ones(3, dtype=torch.long), torch.ones(8, 3), pairing="pairs")
        assert (odd == 1).all()
        with pytest.raises(ShapeError, match="pairing must be pairs or halves, got 'x'"):
            turn(torch.ones(3, 2, 4), pairing="x")


def test_values_and_gradients_are_looked_at_in_every_call() -> None:
    x = turn(torch.ones(3, 2, 4)).clone()
    before = x.clone()
    for _ in range(2):
        with pytest.raises(ShapeError, match=r"positions must be within the table's 0\.\.7, got 8"):
            turn(x, position=8)
        with torch.enable_grad(), pytest.raises(UnsupportedError, match="must not require grad"):
            turn(x.clone().requires_grad_())
    assert torch.equal(x, before)
    case = PagedCase("", (1,), (9,)).make()
    case.run(mqa_paged, backend="reference")
    case.tensors["seq_lens"].fill_(0)
    with pytest.raises(ShapeError, match=r"seq_lens\[0\] must be at least its 1 query tokens"):
        case.run(mqa_paged, backend="reference")


def other(result: list[str], name: str) -> Any:
    def run(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> None:
        result.append(name)

    return SimpleNamespace(why_not=lambda problem: None, run=run)


def merge() -> None:
    merge_states(torch.ones(1, 1, 4), torch.ones(1, 1), torch.ones(1, 1, 4), torch.ones(1, 1))


def test_a_registered_backend_takes_over_at_once() -> None:
    ran: list[str] = []
    merge()
    for name in ("one", "two"):  # under one name: the table looks the same both times
        register_backend("merge_states", "mine", other(ran, name))
        merge()
        unregister_backend("merge_states", "mine")
        merge()
    assert ran == ["one", "two"]


def test_a_decision_that_was_overtaken_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a thread that decides while another changes the table."""
    ran: list[str] = []
    register_backend("merge_states", "mine", other(ran, "old"))
    runner = backends.runner

    def slow(problem: Any, backend: str) -> Any:
        found = runner(problem, backend)
        monkeypatch.setattr(register, "runner", runner)
        unregister_backend("merge_states", "mine")
        register_backend("merge_states", "mine", other(ran, "new"))
        return found

    monkeypatch.setattr(register, "runner", slow)
    merge()
    merge()
    unregister_backend("merge_states", "mine")
    assert ran == ["old", "new"]


def test_decisions_are_bounded(
    monkeypatch: pytest.MonkeyPatch, asked: list[tuple[int, ...]]
) -> None:
    monkeypatch.setattr(register, "MOST_DECISIONS", 4)
    for T in (*range(1, 11), *range(1, 11)):
        turn(torch.ones(T, 2, 4))
        assert len(backends.decisions()) <= 4
    assert len(asked) == 20


def test_threads_share_decisions() -> None:
    wanted = {T: turn(torch.ones(T, 2, 4)) for T in range(1, 9)}
    backends.forget_choices()

    def work(number: int) -> bool:
        T = number % 8 + 1
        if number % 50 == 0:
            backends.forget_choices()
        return torch.equal(turn(torch.ones(T, 2, 4)), wanted[T])

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(400)))
