"""Launching a kernel at little cost: what Triton finds out at every launch is kept from the first.

Triton's own launch binds arguments, names their specialisations and looks a kernel up by a long
text: about 40 us of host time. prepare() fixes constants and options; a launch then looks for the
compiled kernel by what is left for Triton to specialise on: the device, the type and the alignment
of pointers, the width of integers and whether they are 1 or multiples of 16. Where it finds none,
the launch is Triton's own, kernel[grid], and what that compiled is kept. So is every launch that is
watched (hooks of profilers, debugging), interpreted or not for CUDA, and one with an argument of
another kind. What Triton checks at each launch beside that, that no global of a kernel has changed,
is checked at the first. Launches report themselves to backends/replay.py, which repeats calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import knobs
from triton.compiler import CompiledKernel
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from openmla.backends.replay import Launched, active

MOST_DESCRIPTORS = 1024  # of one launch; past that they are made anew


class Piece(NamedTuple):
    """A pointer into a tensor, so many bytes behind its start, to values of a type. Views cost the
    host microseconds each; a launch needs no more than this."""

    tensor: Tensor
    start: int
    dtype: torch.dtype

    def as_tensor(self) -> Tensor:
        """One value, or as many as one of the tensor's: enough for a pointer."""
        size = self.tensor.itemsize
        one = self.tensor.as_strided(
            (max(self.dtype.itemsize // size, 1),),
            (1,),
            self.tensor.storage_offset() + self.start // size,
        )
        return one.view(self.dtype)


class Address(NamedTuple):
    """A tensor as far as descriptors look at one. It keeps no memory alive: one of a tensor that is
    gone describes nothing that a call could ask for, and is found again only by the same address,
    sizes and type."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address


class Launch:
    """A kernel with its constants and options: call it with a grid and arguments."""

    def __init__(self, kernel: Any, constants: Mapping[str, Any], options: Mapping[str, Any]):
        self.kernel = kernel
        self.fixed = {**constants, **options}
        self.rules = rules_of(kernel)
        if self.rules is not None:  # a compiled kernel ignores the values of its constants
            self.constants = (None,) * (len(kernel.params) - len(self.rules))
        self.compiled: dict[tuple[Any, ...], CompiledKernel] = {}

    def __call__(self, grid: tuple[int, ...], *args: Any) -> None:
        key: tuple[Any, ...] | None = None
        recorder = active()
        if recorder is not None and recorder.kernels is not None:
            recorder.kernels.add((self, self.rules and specialise(0, self.rules, args)[0]))
        if self.rules is not None and not is_watched(self.kernel):
            device = driver.active.get_current_device()
            key, values = specialise(device, self.rules, args)
            compiled = None if key is None else self.compiled.get(key)
            if compiled is not None:
                again = partial(self._run, compiled, grid if len(grid) == 3 else (*grid, 1, 1)[:3])
                again(driver.active.get_current_stream(device), values)
                if recorder is not None:
                    recorder.note(self._launched(again, args, values))
                return
        if recorder is not None:
            recorder.note(None)
        tensors = [arg.as_tensor() if isinstance(arg, Piece) else arg for arg in args]
        compiled = self.kernel[grid](*tensors, **self.fixed)
        if key is not None and isinstance(compiled, CompiledKernel):
            self.compiled[key] = compiled

    def _run(
        self, compiled: CompiledKernel, grid: tuple[int, ...], stream: int, values: Sequence[Any]
    ) -> None:
        x, y, z = grid
        compiled.run(
            x, y, z, stream, compiled.function, compiled.packed_metadata, None, None, None,
            *values, *self.constants,
        )  # fmt: skip

    def _launched(
        self, run: Callable[..., None], args: Sequence[Any], values: Sequence[Any]
    ) -> Launched | None:
        """What is to be known for launching the same kernel at other addresses."""
        tensors: list[tuple[int, Tensor, int]] = []
        addresses: list[tuple[int, int, Callable[[int], Any]]] = []
        for place, arg in enumerate(args):
            if isinstance(arg, Tensor):
                tensors.append((place, arg, 0))
            elif isinstance(arg, Piece):
                tensors.append((place, arg.tensor, arg.start))
            elif isinstance(arg, TensorDescriptor):
                if not isinstance(arg.base, Address):
                    return None
                addresses.append((place, arg.base.address, describe_as(arg)))
        return Launched(run, lambda: is_watched(self.kernel), values, tensors, addresses)


def describe_as(descriptor: TensorDescriptor) -> Callable[[int], TensorDescriptor]:
    """Descriptors of other addresses, alike in all else."""
    made: dict[int, TensorDescriptor] = {}

    def described(address: int) -> TensorDescriptor:
        found = made.get(address)
        if found is None:
            if len(made) == MOST_DESCRIPTORS:
                made.clear()
            base = Address(address, descriptor.base.dtype)
            found = made[address] = replace(descriptor, base=base)
        return found

    return described


def prepare(kernel: Any, constants: Mapping[str, Any], **options: Any) -> Launch:
    """The launch of a kernel with these constants and options, always the same object."""
    return _prepare(
        kernel,
        tuple((name, type(value), value) for name, value in constants.items()),
        tuple(options.items()),
    )


@lru_cache(maxsize=4096)
def _prepare(
    kernel: Any, constants: tuple[tuple[str, type, Any], ...], options: tuple[tuple[str, Any], ...]
) -> Launch:
    return Launch(kernel, {name: value for name, _, value in constants}, dict(options))


def rules_of(kernel: Any) -> tuple[tuple[bool, bool], ...] | None:
    """Of every argument that is no constant, whether Triton specializes on its value, and on its
    alignment. None where launches are left to Triton."""
    if not isinstance(kernel, JITFunction) or torch.version.hip is not None:
        return None
    given = [each for each in kernel.params if not each.is_constexpr]
    assert given == kernel.params[: len(given)], f"{kernel}: constants must come last"
    if any(each.annotation for each in given):  # then Triton goes by the annotation
        return None
    return tuple(
        (not each.do_not_specialize, not each.do_not_specialize_on_alignment) for each in given
    )


def is_watched(kernel: Any) -> bool:
    """Whether someone wants to know of launches, or to have kernels compiled another way."""
    runtime = knobs.runtime
    hooks = (runtime.launch_enter_hook, runtime.launch_exit_hook)
    return bool(
        any(getattr(hook, "calls", hook) for hook in hooks)
        or kernel.pre_run_hooks
        or kernel.debug
        or runtime.debug
        or runtime.add_stages_inspection_hook
        or knobs.compilation.instrumentation_mode
    )


def specialise(
    device: int, rules: tuple[tuple[bool, bool], ...], args: tuple[Any, ...]
) -> tuple[tuple[Any, ...] | None, list[Any]]:
    """What decides which compiled kernel takes these arguments, as Triton has it, and the arguments
    with addresses for pointers. No key where Triton must say."""
    key: list[Any] = [device]
    values = []
    for arg, (by_value, by_alignment) in zip(args, rules, strict=True):
        kind = type(arg)
        if kind is int:
            values.append(arg)
            if by_value and arg == 1:
                key.append(1)
                continue
            width = 32 if -(2**31) <= arg < 2**31 else 64 if arg < 2**63 else 65
            key.append(-width if by_value and by_alignment and arg % 16 == 0 else width)
        elif isinstance(arg, Tensor) or kind is Piece:
            address = arg.data_ptr() if kind is not Piece else arg.tensor.data_ptr() + arg.start
            values.append(address)
            key.append(arg.dtype)
            key.append(by_value and by_alignment and address % 16 == 0)
        elif kind is float:
            values.append(arg)
            key.append(float)
        elif kind is TensorDescriptor:
            values.append(arg)
            key += (arg.base.dtype, *arg.block_shape, arg.layout)
        else:
            return None, values
    return tuple(key), values
