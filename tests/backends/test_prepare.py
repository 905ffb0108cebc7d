"""Prepared launches: kernels are told apart as by Triton, and only those it compiled launched."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

triton = pytest.importorskip("triton")
tl = import_module("triton.language")
knobs = import_module("triton.knobs")
jit = import_module("triton.runtime.jit")
prepared = import_module("openmla.backends.triton._prepare")

if triton.knobs.runtime.interpret:
    pytest.skip("the interpreter launches by itself", allow_module_level=True)

DTYPES = (torch.float32, torch.bfloat16, torch.int32, torch.int64, torch.uint8)
WHOLE = (0, 1, 2, 16, 17, -1, -16, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**40, 2**63 - 1)
MEMORY = torch.zeros(64, dtype=torch.int64)


@triton.jit(do_not_specialize=["c"], do_not_specialize_on_alignment=["d"])
def _four_kernel(a, b, c, d, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def,name-defined]
    pass


def backend() -> Any:
    target = import_module("triton.backends.compiler").GPUTarget("cuda", 90, 32)
    return import_module("triton.backends.nvidia.compiler").CUDABackend(target)


BIND = jit.create_function_from_signature(_four_kernel.signature, _four_kernel.params, backend())


def triton_key(args: tuple[Any, ...]) -> str:
    tensors = [arg.as_tensor() if isinstance(arg, prepared.Piece) else arg for arg in args]
    return str(BIND(*tensors, BLOCK=1, debug=False)[1])


def own_key(args: tuple[Any, ...]) -> object:
    return prepared.specialise(0, prepared.rules_of(_four_kernel), args)[0]


def tensor(dtype: torch.dtype, start: int) -> torch.Tensor:
    return MEMORY.view(dtype)[start:]


tensors = st.builds(tensor, st.sampled_from(DTYPES), st.integers(0, 20))
pieces = st.builds(
    lambda dtype, at: prepared.Piece(MEMORY, 8 * at, dtype), st.sampled_from(DTYPES),
    st.integers(0, 4),
)  # fmt: skip
arguments = st.one_of(
    tensors, pieces, st.sampled_from(WHOLE), st.integers(-(2**63), 2**63 - 1), st.floats()
)
calls = st.tuples(arguments, arguments, arguments, arguments)


@settings(max_examples=400, deadline=None)
@given(calls, calls)
def test_kernels_are_told_apart_as_by_triton(one: Any, other: Any) -> None:
    for changed in (other, *((*one[:i], other[i], *one[i + 1 :]) for i in range(4))):
        same = own_key(one) == own_key(changed)
        assert same == (triton_key(one) == triton_key(changed)), (one, changed)


@pytest.mark.parametrize("value", WHOLE)
def test_whole_numbers_are_keyed_as_triton_keys_them(value: int) -> None:
    """Of every pair: hypothesis may miss one."""
    plain = (0.5, 0.5, 0.5, 0.5)
    for i in range(4):
        one = (*plain[:i], value, *plain[i + 1 :])
        for second in WHOLE:
            other = (*plain[:i], second, *plain[i + 1 :])
            assert (own_key(one) == own_key(other)) == (triton_key(one) == triton_key(other))


def test_boxes_are_told_apart() -> None:
    paged = import_module("openmla.backends.gluon.mqa_paged")
    made = [
        paged.boxes(address, 640, 144, 144, dtype, box)
        for address in (1 << 20, 1 << 21)
        for dtype in (torch.int32, torch.bfloat16)
        for box in (16, 64)
    ]
    for one in made:
        for other in made:
            keys = [own_key((each, 0.5, 0.5, 0.5)) for each in (one, other)]
            tritons = [triton_key((each, 0.5, 0.5, 0.5)) for each in (one, other)]
            assert (keys[0] == keys[1]) == (tritons[0] == tritons[1])
    assert made[0] is paged.boxes(1 << 20, 640, 144, 144, torch.int32, 16)


def test_an_unknown_kind_of_argument_is_left_to_triton() -> None:
    assert own_key((None, 0.5, 0.5, 0.5)) is None and own_key((True, 0.5, 0.5, 0.5)) is None


class Launched(prepared.CompiledKernel):  # type: ignore[misc,name-defined]
    """A compiled kernel that notes what it is launched with."""

    def __init__(self, seen: list[Any]) -> None:
        self.module, self.function, self.packed_metadata = None, "function", "metadata"
        self._run = lambda *args: seen.append(args)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Launches by Triton, and those of what it compiled, as on device 3 and stream 7."""
    found = SimpleNamespace(triton=[], direct=[])

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **fixed: Any) -> Any:
        found.triton.append((grid, args, fixed))
        return Launched(found.direct)

    monkeypatch.setattr(jit.JITFunction, "run", run)
    active = SimpleNamespace(get_current_device=lambda: 3, get_current_stream=lambda device: 7)
    monkeypatch.setattr(prepared, "driver", SimpleNamespace(active=active))
    prepared._prepare.cache_clear()
    return found


def launch() -> Any:
    return prepared.prepare(_four_kernel, {"BLOCK": 8}, num_warps=4)


def test_a_launch_is_tritons_first_and_direct_then(seen: SimpleNamespace) -> None:
    piece = prepared.Piece(MEMORY, 16, torch.float32)
    for grid in ((5,), (5, 6), (5, 6, 7)):
        launch()(grid, MEMORY, 3, 0.25, piece)
    ((grid, args, fixed),) = seen.triton
    assert grid == (5,) and fixed == {"BLOCK": 8, "num_warps": 4}
    assert args[0] is MEMORY and args[3].data_ptr() == MEMORY.data_ptr() + 16
    assert args[3].dtype == torch.float32
    passed = (MEMORY.data_ptr(), 3, 0.25, MEMORY.data_ptr() + 16, None)
    head = (7, "function", "metadata", None, None, None)
    assert seen.direct == [(5, 6, 1, *head, *passed), (5, 6, 7, *head, *passed)]


def test_another_specialisation_is_tritons_again(seen: SimpleNamespace) -> None:
    wanted = [(MEMORY, 3, 2, 1.0), (MEMORY.view(torch.uint8)[1:], 3, 2, 1.0), (MEMORY, 16, 2, 1.0)]
    for _ in range(2):
        for args in wanted:
            launch()((1,), *args)
    assert len(seen.triton) == 3 and len(seen.direct) == 3
    prepared.prepare(_four_kernel, {"BLOCK": 8}, num_warps=8)((1,), *wanted[0])
    prepared.prepare(_four_kernel, {"BLOCK": 1}, num_warps=4)((1,), *wanted[0])
    prepared.prepare(_four_kernel, {"BLOCK": True}, num_warps=4)((1,), *wanted[0])
    assert len(seen.triton) == 6 and len(seen.direct) == 3


def test_each_device_launches_its_own_kernel(
    seen: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch()((1,), MEMORY, 3, 2, 1.0)
    monkeypatch.setattr(prepared.driver.active, "get_current_device", lambda: 4)
    launch()((1,), MEMORY, 3, 2, 1.0)
    assert len(seen.triton) == 2 and not seen.direct


@pytest.mark.parametrize("watched", ["launch_enter_hook", "launch_exit_hook", "debug", "pre_run"])
def test_a_watched_launch_is_tritons(
    seen: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, watched: str
) -> None:
    for _ in range(2):
        launch()((1,), MEMORY, 3, 2, 1.0)
    if watched == "debug":
        monkeypatch.setattr(knobs.runtime, "debug", True)
    elif watched == "pre_run":
        monkeypatch.setattr(_four_kernel, "pre_run_hooks", [print])
    else:
        getattr(knobs.runtime, watched).add(print)
    try:
        launch()((1,), MEMORY, 3, 2, 1.0)
    finally:
        if watched.startswith("launch"):
            getattr(knobs.runtime, watched).remove(print)
    assert len(seen.triton) == 2 and len(seen.direct) == 1


def test_what_did_not_compile_is_not_kept(
    seen: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jit.JITFunction, "run", lambda *args, **kwargs: seen.triton.append(args))
    for _ in range(2):
        launch()((1,), MEMORY, 3, 2, 1.0)
    assert len(seen.triton) == 2 and not seen.direct


def test_every_kernel_is_launched_directly() -> None:
    """None is annotated, and constants come last: else each launch would take 40 us."""
    from openmla.backends.triton._build import all_builds

    for kernel in {build.kernel for build in all_builds()}:
        assert prepared.rules_of(kernel) is not None, kernel
