"""On a GPU: a direct launch gives the bits of Triton's own, whatever changes between calls."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from openmla.backends import decisions
from openmla.backends.requirements import missing
from openmla.errors import UnsupportedError
from openmla.ops import latent_write, mqa_paged, mqa_sparse, rope
from openmla.testing import PagedCase, SegmentCase, SparseCase

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="launches kernels")
V3: dict[str, Any] = {"C": 512, "R": 64, "contiguous": True}
V4: dict[str, Any] = {"C": 512, "R": 0, "contiguous": True}


def same_bits(call: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """By Triton, then by Triton or directly, then directly without it."""
    prepared, jit = import_module("openmla.backends.triton._prepare"), "triton.runtime.jit"
    with monkeypatch.context() as patch:
        patch.setattr(prepared, "is_watched", lambda kernel: True)
        expected = call()
    found = [call()]
    with monkeypatch.context() as patch:
        patch.setattr(f"{jit}.JITFunction.run", lambda *args, **kwargs: pytest.fail("by Triton"))
        found.append(call())
    for each in found:
        for one, other in zip(expected, each, strict=True):
            one, other = (part.contiguous().view(torch.uint8) for part in (one, other))
            assert torch.equal(one, other)


def replays(op: str) -> int:
    """Calls of an op that are known how to repeat."""
    return sum(key[0] == op and found.replay is not None for key, found in decisions().items())


def needs(op: str, backend: str) -> None:
    if backend == "gluon" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("Gluon's kernels here are for SM90")
    if missing(backend) is not None:
        pytest.skip(f"{op}: {missing(backend)}")


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["gluon", "triton"])
@pytest.mark.parametrize("format", ["bf16", "fp8"])
def test_mqa_paged(backend: str, format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths, requests, heads and block sizes change, and where the lengths lie."""
    needs("mqa_paged", backend)
    for lens, H, BS in (
        ((4096,), 16, 64), ((4097,), 16, 64), ((5, 700), 16, 64), ((5, 700), 128, 64),
        ((1,), 16, 16), ((300,) * 40, 128, 64), ((4096,), 16, 64),
    ):  # fmt: skip
        case = PagedCase("", (1,) * len(lens), lens, H=H, BS=BS, format=format, **V3)
        inputs = case.make("cuda")
        same_bits(partial(inputs.run, mqa_paged, backend=backend), monkeypatch)
        room = torch.zeros(len(lens) + 1, dtype=torch.int32, device="cuda")
        room[1:] = inputs.tensors["seq_lens"]
        inputs.tensors["seq_lens"] = room[1:]
        same_bits(partial(inputs.run, mqa_paged, backend=backend), monkeypatch)
    assert replays("mqa_paged") == 12  # the last is the first again


@pytest.mark.gpu
def test_a_cache_in_the_place_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Descriptors are kept by address: of memory that was freed and taken again, with other rows or
    in another shape, none may be stale."""
    needs("mqa_paged", "gluon")
    for seed, length in enumerate((2000, 2000, 900, 2000)):
        inputs = PagedCase("", (1,), (length,), H=16, BS=64, seed=seed, **V3).make("cuda")
        same_bits(partial(inputs.run, mqa_paged, backend="gluon"), monkeypatch)
        _, expected = inputs.run(mqa_paged, backend="reference")
        _, lse = inputs.run(mqa_paged, backend="gluon")
        torch.testing.assert_close(lse, expected, rtol=0, atol=1e-3)
        del inputs


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["gluon", "triton"])
def test_mqa_sparse(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    needs("mqa_sparse", backend)
    listed = SegmentCase("positions", K=512, BS=64, format="fp8_ds_mla")
    slots = SegmentCase("slots", K=512, BS=64, format="fp8_ds_mla")
    window = SegmentCase("window", span=128, BS=64, format="fp8_dsv4")
    entries = SegmentCase("positions", K=512, ratio=4, BS=64, format="fp8_dsv4")
    for first, second, sizes in (
        (slots, None, V3), (listed, None, V3), (window, entries, V4), (window, None, V4),
    ):  # fmt: skip
        for H in (16, 128):
            for lens in ((1000,), (1000, 30, 4000), (2048,) * 20):
                sink = (0.5, -1.0) if sizes is V4 else ()
                inputs = SparseCase(
                    "", (1,) * len(lens), lens, first, second, H=H, sink=sink, **sizes
                ).make("cuda")
                before = replays("mqa_sparse")
                same_bits(partial(inputs.run, mqa_sparse, backend=backend), monkeypatch)
                assert replays("mqa_sparse") == before + 1


@pytest.mark.gpu
def test_alignment_changes_between_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slice by one value is another kernel to Triton, and so it must be here."""
    needs("rope", "triton")
    T, H, R = 5, 4, 64
    room = torch.randn(T * H * R + 8, device="cuda").to(torch.bfloat16)
    table = torch.randn(32, R, device="cuda")
    positions = torch.arange(T, device="cuda")
    for start in (0, 1, 8, 3, 0, 1):
        values = room[start : start + T * H * R].view(T, H, R)

        def turned(values: Tensor = values, start: int = start) -> tuple[Tensor]:
            own = torch.empty_like(room)[start : start + T * H * R].view(T, H, R).copy_(values)
            rope(own, positions, table, pairing="pairs", backend="triton")
            return (own,)

        same_bits(turned, monkeypatch)
    assert replays("rope") == 3  # 8 values of 2 bytes are as good as none


@pytest.mark.gpu
def test_latent_write(monkeypatch: pytest.MonkeyPatch) -> None:
    needs("latent_write", "triton")
    table, one = torch.randn(99, 64, device="cuda"), torch.ones((), device="cuda")
    weight = torch.ones(512, device="cuda").to(torch.bfloat16)
    for number, T in enumerate((1, 2, 16, 17), 1):
        q = torch.randn(T, 16, 192, device="cuda").to(torch.bfloat16)
        kv = torch.randn(T, 576, device="cuda").to(torch.bfloat16)
        at = torch.arange(T, device="cuda")

        def written(q: Tensor = q, kv: Tensor = kv, at: Tensor = at) -> tuple[Tensor, ...]:
            cache = torch.zeros(4, 16, 576, device="cuda").to(torch.bfloat16)
            q, kv = q.clone(), kv.clone()
            latent_write(
                cache, q, kv, weight, at, at, one, table, format="bf16", pairing="pairs", eps=1e-6,
                backend="triton",
            )  # fmt: skip
            return cache, q

        same_bits(written, monkeypatch)
        assert replays("latent_write") == number


@pytest.mark.gpu
def test_in_a_graph_and_on_another_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream is asked for at every launch."""
    needs("rope", "triton")
    x = torch.randn(4, 4, 64, device="cuda")
    table, positions = torch.randn(32, 64, device="cuda"), torch.arange(4, device="cuda")

    def turn(x: Tensor) -> Tensor:
        rope(x, positions, table, pairing="pairs", backend="triton")
        return x

    once = turn(x.clone())
    captured, graph = x.clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        turn(captured)
    assert torch.equal(captured, x)  # recorded, not run
    graph.replay()
    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        aside = turn(x.clone())
    torch.cuda.synchronize()
    assert torch.equal(captured, once) and torch.equal(aside, once)


@pytest.mark.gpu
def test_a_hook_on_launches_sees_every_one() -> None:
    """What is repeated is watched as what is not."""
    needs("rope", "triton")
    knobs = import_module("triton.knobs")
    x = torch.randn(4, 4, 64, device="cuda")
    table, positions = torch.randn(32, 64, device="cuda"), torch.arange(4, device="cuda")
    seen: list[Any] = []
    for _ in range(3):
        rope(x, positions, table, pairing="pairs", backend="triton")
    knobs.runtime.launch_enter_hook.add(seen.append)
    try:
        rope(x, positions, table, pairing="pairs", backend="triton")
    finally:
        knobs.runtime.launch_enter_hook.remove(seen.append)
    assert len(seen) == 1


@pytest.mark.gpu
def test_inputs_that_want_a_gradient_are_refused_also_then() -> None:
    needs("rope", "triton")
    with torch.inference_mode(False):
        x = torch.randn(4, 4, 64, device="cuda")
        table, positions = torch.randn(32, 64, device="cuda"), torch.arange(4, device="cuda")
        for _ in range(3):
            rope(x, positions, table, pairing="pairs", backend="triton")
        assert replays("rope")
        with pytest.raises(UnsupportedError, match="grad"):
            rope(x.clone().requires_grad_(), positions, table, pairing="pairs", backend="triton")
