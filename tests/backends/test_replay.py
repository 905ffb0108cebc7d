"""Repeating a call: the same allocations and launches at other addresses, or none at all.

The launches here are of a kernel that adds, on the CPU, given addresses as a GPU's would be.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from openmla.backends.replay import MOST_ALLOCATIONS, MOST_LAUNCHES, Launched, active, record

Place = tuple[Tensor, int]  # and bytes behind its start


def add(stream: int, values: list[Any]) -> None:
    left, right, out, n = values
    assert stream == 7
    a, b, c = ((ctypes.c_float * n).from_address(each) for each in (left, right, out))
    for i in range(n):
        c[i] = a[i] + b[i]


def launch(left: Place, right: Place, out: Place, n: int, *, watched: bool = False) -> None:
    pointers = (left, right, out)
    values = [tensor.data_ptr() + start for tensor, start in pointers] + [n]
    add(7, values)
    recorder = active()
    if recorder is not None:
        tensors = [(place, *pointer) for place, pointer in enumerate(pointers)]
        recorder.note(Launched(add, lambda: watched, values, tensors, ()))


def sums(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """a + b, and that of the second halves twice over, by way of a scratch with two pieces."""
    n = a.shape[0] // 2
    out, half = a.new_empty(2 * n), torch.empty(n)
    scratch = torch.empty_like(a)
    launch((a, 0), (b, 0), (out, 0), 2 * n)
    launch((a[n:], 0), (b.view(2, n)[1], 0), (scratch, 4 * n), n)
    launch((scratch, 4 * n), (scratch[n:], 0), (half, 0), n)
    return out, half


def vectors(count: int, n: int = 6) -> list[Tensor]:
    return list(torch.randn(count, n))


def check(replay: Any, a: Tensor, b: Tensor) -> None:
    out, half = replay((a, b), 7)
    n = a.shape[0] // 2
    assert torch.equal(out, a + b) and torch.equal(half, 2 * (a + b)[n:])


@pytest.mark.parametrize("inference", [False, True])
def test_a_call_is_repeated_at_other_addresses(inference: bool) -> None:
    with torch.inference_mode(inference):
        a, b, c, d = vectors(4)
        (out, half), replay = record(sums, (a, b))
        assert torch.equal(out, a + b) and torch.equal(half, 2 * (a + b)[3:])
        assert replay is not None
        for pair in ((c, d), (a, d), (c, c), (a, b)):
            check(replay, *pair)


def test_a_tensor_given_twice_may_be_two_tensors_later() -> None:
    a, b, c = vectors(3)
    _, replay = record(sums, (a, a))
    check(replay, b, c)


def test_slices_of_one_tensor_are_told_apart() -> None:
    room = torch.randn(40)
    _, replay = record(sums, (room[4:10], room[4:10]))
    check(replay, room[20:26], room[2:8])


def test_results_are_made_anew() -> None:
    a, b = vectors(2)
    _, replay = record(sums, (a, b))
    assert replay is not None
    first, second = (replay((a, b), 7) for _ in range(2))
    assert first[0].data_ptr() != second[0].data_ptr()


def test_threads_repeat_the_same_call() -> None:
    _, replay = record(sums, vectors(2))
    with ThreadPoolExecutor(4) as pool:
        for each in [pool.submit(check, replay, *vectors(2)) for _ in range(160)]:
            each.result()


def test_calls_of_other_threads_are_not_watched() -> None:
    with ThreadPoolExecutor(1) as pool:

        def call(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
            assert pool.submit(active).result() is None
            return sums(a, b)

        assert record(call, vectors(2))[1] is not None
    assert active() is None


def into(a: Tensor, out: Tensor) -> Any:
    launch((a, 0), (a, 0), (out, 0), 6)


def test_what_writes_its_input_returns_nothing() -> None:
    a, b, c, d = vectors(4)
    assert record(into, (a, b)) and torch.equal(b, 2 * a)
    _, replay = record(into, (a, b))
    assert replay is not None and replay((c, d), 7) is None
    assert torch.equal(d, 2 * c)


def test_one_result() -> None:
    a, b = vectors(2)

    def call(a: Tensor, _: None) -> Tensor:
        out = torch.empty_like(a)
        launch((a, 0), (a, 0), (out, 0), 6)
        return out

    _, replay = record(call, (a, None))
    assert replay is not None and torch.equal(replay((b, None), 7), 2 * b)


KEPT = torch.zeros(6)


def many_launches(a: Tensor, b: Tensor) -> None:
    for _ in range(MOST_LAUNCHES + 1):
        into(a, b)


def many_allocations(a: Tensor, b: Tensor) -> None:
    for _ in range(MOST_ALLOCATIONS + 1):
        a.new_empty(3)
    into(a, b)


def compiled_first(a: Tensor, b: Tensor) -> None:
    recorder = active()
    assert recorder is not None
    recorder.note(None)


@pytest.mark.parametrize(
    "call",
    [
        lambda a, b: into(a.clone(), b),
        lambda a, b: into(a.double().float(), b),
        lambda a, b: (b.zero_(), into(a, b))[1],
        lambda a, b: into(a.new_zeros(6), b),
        lambda a, b: into(KEPT, b),  # whose address may change, or go
        lambda a, b: into(a.view(2, 3).t().contiguous().view(6), b),
        lambda a, b: (into(a, b), b)[1],  # an input
        lambda a, b: (into(a, b), torch.empty(6)[1:])[1],  # a view
        lambda a, b: (into(a, b), KEPT)[1],
        lambda a, b: None,  # nothing that is known of
        many_launches,
        many_allocations,
        compiled_first,
    ],
)
def test_what_does_more_is_not_repeated(call: Callable[..., Any]) -> None:
    assert record(call, vectors(2))[1] is None


def test_contiguous_tensors_stay_what_they_are() -> None:
    a, b, c, d = vectors(4)
    _, replay = record(lambda a, b: into(a.contiguous(), b.contiguous()), (a, b))
    assert replay is not None
    replay((c, d), 7)
    assert torch.equal(d, 2 * c)


def test_an_error_passes_and_nothing_stays_watched() -> None:
    def call(a: Tensor) -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        record(call, vectors(1))
    assert active() is None


def test_a_watched_launch_says_so() -> None:
    def call(a: Tensor, b: Tensor) -> None:
        launch((a, 0), (a, 0), (b, 0), 6, watched=True)

    _, replay = record(call, vectors(2))
    assert replay is not None and replay.is_watched()
    _, replay = record(into, vectors(2))
    assert replay is not None and not replay.is_watched()


def test_addresses_are_described_where_a_kernel_wants_it() -> None:
    """As tensor maps are: of an input that is known by its address alone."""
    seen: list[Any] = []

    def call(a: Tensor, b: Tensor) -> None:
        recorder = active()
        assert recorder is not None
        addresses = [(0, a.data_ptr(), lambda address: ("described", address))]
        run = lambda stream, values: seen.append(values[0])  # noqa: E731
        recorder.note(Launched(run, lambda: False, [None], (), addresses))

    a, b, c = vectors(3)
    _, replay = record(call, (a, b))
    assert replay is not None
    replay((c, b), 7)
    assert seen == [("described", c.data_ptr())]
    assert record(call, (a, a))[1] is None  # whose address it is cannot be told
