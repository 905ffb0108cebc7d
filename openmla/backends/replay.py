"""Replays an op call at low host cost: host work is recorded once and then repeated.

The metadata and scalars of a call determine its allocations, its kernel launches and their scalars.
Between calls with equal metadata only addresses change. record() runs a call as usual and observes
it: allocations and views through a dispatch mode, launches as they report themselves. The resulting
Replay allocates the same tensors and launches the same kernels at the addresses of the current
call. There is no Replay if a call did anything else (a copy, another torch kernel, a launch that
Triton had to compile, a pointer of unknown origin); such calls run as before.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten
ALLOCATIONS = (
    _aten.empty.memory_format,
    _aten.new_empty.default,
    _aten.empty_strided.default,
    _aten.empty_like.default,
)
# A larger call takes much longer than its host work, and would hold all its memory at once.
MOST_LAUNCHES, MOST_ALLOCATIONS = 4, 6


class Pointer(NamedTuple):
    """An argument that is an address: the index of the call's tensor (inputs come before
    allocations) and the offset in bytes. `describe` converts it where a kernel takes more than a
    plain address."""

    place: int  # among the kernel's arguments
    tensor: int
    offset: int
    describe: Callable[[int], Any] | None


class Launched(NamedTuple):
    """A launch as the kernel's own prepared launch reports it."""

    run: Callable[..., None]  # called with a stream and the values of all arguments
    is_watched: Callable[[], bool]  # whether it must not be replayed now
    values: Sequence[Any]
    tensors: Sequence[tuple[int, Tensor, int]]  # place, tensor, byte offset from its start
    addresses: Sequence[tuple[int, int, Callable[[int], Any]]]  # place, address, describe


class Replay:
    """A call that can be repeated for inputs of the same metadata."""

    def __init__(self, recorder: Recorder, results: Sequence[int], single: bool) -> None:
        self.allocations = [
            (each.shape, each.stride(), each.dtype, each.device) for each in recorder.allocated
        ]
        self.launches = [
            (each.run, list(each.values), recorder.pointers_of(each)) for each in recorder.launches
        ]
        self.watched = [each.is_watched for each in recorder.launches]
        self.used = recorder.used
        self.results, self.single = results, single

    def is_watched(self) -> bool:
        return any(watched() for watched in self.watched)

    def __call__(self, inputs: Sequence[Tensor | None], stream: int) -> Any:
        made = [
            torch.empty_strided(size, stride, dtype=dtype, device=device)
            for size, stride, dtype, device in self.allocations
        ]
        addresses: list[Any] = [None] * len(inputs)
        for i in self.used:
            addresses[i] = inputs[i].data_ptr()  # type: ignore[union-attr]
        addresses += [each.data_ptr() for each in made]
        for run, kept, pointers in self.launches:
            values = kept.copy()  # threads may replay the same call
            for place, tensor, offset, describe in pointers:
                address = addresses[tensor] + offset
                values[place] = address if describe is None else describe(address)
            run(stream, values)
        if self.single:
            return made[self.results[0]]
        return tuple([made[i] for i in self.results]) if self.results else None


class Recorder(TorchDispatchMode):
    """Observes one call of this thread. `inputs` are aliases, each a separate object, because a
    tensor that is passed twice in this call may be two tensors in the next."""

    kernels: set[Any] | None = None  # only observed() asks for them

    def __init__(self, inputs: Sequence[Tensor | None]) -> None:
        super().__init__()
        self.inputs = [None if each is None else _aten.alias.default(each) for each in inputs]
        self.allocated: list[Tensor] = []
        self.launches: list[Launched] = []
        self.repeatable = True
        # by id: the base of a view; tensors are kept alive, so that ids stay unique
        self.origins = {id(each): i for i, each in enumerate(self.inputs) if each is not None}
        self.kept: list[Tensor] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in ALLOCATIONS:
            self.origins[id(result)] = len(self.inputs) + len(self.allocated)
            self.allocated.append(result)
        elif not self._is_view(func, args, result):
            self.repeatable = False
        return result

    def _is_view(self, func: Any, args: tuple[Any, ...], result: Any) -> bool:
        """Whether the result is a view, or the argument itself, as contiguous() may return."""
        of = args[0] if args else None
        if func._schema.is_mutable or not isinstance(of, Tensor) or not isinstance(result, Tensor):
            return False
        if result.untyped_storage().data_ptr() != of.untyped_storage().data_ptr():
            return False
        self.kept.append(result)
        if id(of) in self.origins:
            self.origins[id(result)] = self.origins[id(of)]
        return True

    def note(self, launched: Launched | None) -> None:
        """Note a launch; None stands for one that cannot be repeated."""
        if launched is None or len(self.launches) == MOST_LAUNCHES:
            self.repeatable = False
        else:
            self.launches.append(launched)

    def tensor(self, i: int) -> Tensor | None:
        return (*self.inputs, *self.allocated)[i]

    def pointers_of(self, launched: Launched) -> list[Pointer]:
        """Return the pointers of a launch. Raises LookupError if the origin of one is unknown."""
        found = []
        for place, tensor, start in launched.tensors:
            origin = self.origins[id(tensor)]
            base = self.tensor(origin)
            assert base is not None
            offset = tensor.data_ptr() - base.data_ptr() + start
            found.append(Pointer(place, origin, offset, None))
        for place, address, describe in launched.addresses:
            found.append(Pointer(place, self._at(address), 0, describe))
        return found

    def _at(self, address: int) -> int:
        """Return the one input that starts at an address."""
        (origin,) = (
            i for i, each in enumerate(self.inputs)
            if each is not None and each.data_ptr() == address
        )  # fmt: skip
        return origin

    @property
    def used(self) -> tuple[int, ...]:
        """The inputs that a launch has a pointer to."""
        pointers = [each for launched in self.launches for each in self.pointers_of(launched)]
        return tuple(sorted({each.tensor for each in pointers if each.tensor < len(self.inputs)}))

    def replay(self, result: Any) -> Replay | None:
        if not self.repeatable or not self.launches or len(self.allocated) > MOST_ALLOCATIONS:
            return None
        single = isinstance(result, Tensor)
        returned = () if result is None else (result,) if single else tuple(result)
        try:
            results = [self._allocation(each) for each in returned]
            return Replay(self, results, single)
        except (LookupError, ValueError):  # a pointer or result of unknown origin
            return None

    def _allocation(self, tensor: Tensor) -> int:
        """Return the allocation that a result is as a whole; torch returns some as full views."""
        i = self.origins[id(tensor)] - len(self.inputs)
        if i < 0 or _layout(tensor) != _layout(self.allocated[i]):
            raise LookupError("an input, or a part")
        return i


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


_active = threading.local()


class Observer(NamedTuple):
    """Takes the place of a recorder while kernels are observed."""

    kernels: set[Any]

    def note(self, launched: Launched | None) -> None:
        pass


def active() -> Recorder | Observer | None:
    """Return the recorder of this thread's call, or its observer, if any."""
    return getattr(_active, "recorder", None)


@contextmanager
def observed() -> Iterator[set[Any]]:
    """Collect which compiled kernels this thread's calls ask for. Nothing is recorded meanwhile."""
    _active.recorder = Observer(set())
    try:
        yield _active.recorder.kernels
    finally:
        _active.recorder = None


def record(call: Callable[..., Any], inputs: Sequence[Tensor | None]) -> tuple[Any, Replay | None]:
    """Return the result of a call with these inputs, and its Replay if it can be repeated."""
    if active() is not None:  # kernels are observed
        return call(*inputs), None
    recorder = Recorder(inputs)
    _active.recorder = recorder
    try:
        with recorder:
            result = call(*recorder.inputs)
    finally:
        _active.recorder = None
    return result, recorder.replay(result)
