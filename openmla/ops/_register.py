"""register(): the dispatch of an op: what decides about a call, once, and what runs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from openmla.backends import (
    BACKENDS,
    Problem,
    choose_backend,
    decisions,
    is_replayed,
    runner,
)
from openmla.backends.replay import Replay, record
from openmla.backends.requirements import explain_failure
from openmla.errors import ShapeError, UnsupportedError

# One library object for the life of the process. Library.define, not torch.library.custom_op,
# which wraps every call in several microseconds of Python.
_LIBRARY = torch.library.Library("openmla", "DEF")

# Decisions kept; past that all are made anew. Each is some 2 KiB.
MOST_DECISIONS = 4096
WATCHED = 4  # the last call that is watched for a way to repeat it


class Cost(NamedTuple):
    """Bytes moved and floating-point operations that the mathematics of one call needs."""

    bytes: int
    flops: int


class Decided:
    """What a call's metadata decide: sizes by their letters, and what runs it. Made once for all
    calls with the same metadata. `replay` repeats such a call where that can be done; the second
    call and the next few are watched for it, for kernels may still have to be compiled."""

    __slots__ = ("calls", "dims", "replay", "replayed", "runner")

    def __init__(self, dims: Mapping[str, int], runner: Any, *, replayed: bool = False) -> None:
        self.dims, self.runner, self.replayed = dims, runner, replayed
        self.replay: Replay | None = None
        self.calls = 0

    def is_watched(self) -> bool:
        """Whether this call is."""
        self.calls += 1
        return self.replayed and 1 < self.calls <= WATCHED


def decided(dims: Mapping[str, int], asked: Problem, backend: str) -> Decided:
    chosen = choose_backend(asked, backend)
    return Decided(dims, runner(asked, chosen), replayed=is_replayed(asked, chosen))


def refuse_grad(op: str, tensors: Sequence[Tensor]) -> None:
    """Everything here is inference only; silence would return wrong gradients."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise UnsupportedError(
            f"{op}: inputs must not require grad, there is no backward. "
            "Run under torch.inference_mode()."
        )


def wants_grad(args: Sequence[Any]) -> bool:
    return torch.is_grad_enabled() and any(
        isinstance(each, Tensor) and each.requires_grad for each in args
    )


def check_scale(op: str, scale: float) -> None:
    """Kernels take the max before they scale: a negative scale would make it a min."""
    if not scale > 0:
        raise ShapeError(f"{op}: scale must be positive, got {scale}.")


def on_its_device(op: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """Run on the first tensor's device. torch's own ops switch to it themselves; Triton launches on
    the current device, wherever its pointers live."""

    def started(*args: Any, **kwargs: Any) -> Any:
        device = args[0].device
        try:
            if device.type != "cuda" or device.index == torch.cuda.current_device():
                return run(*args, **kwargs)
            with torch.cuda.device(device):
                return run(*args, **kwargs)
        except Exception as error:
            explain_failure(op, error)
            raise

    return started


def _facts(tensor: Tensor | None) -> tuple[Any, ...] | None:
    """All that checks and backends look at."""
    if tensor is None:
        return None
    address = tensor.data_ptr()
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, address % 16


Decide = Callable[[tuple[Any, ...], dict[str, Any]], Decided]


def remembered(op: str, decide: Decide, args: tuple[Any, ...], scalars: dict[str, Any]) -> Decided:
    """decide() of a call, or what it said of an earlier one with the same metadata, scalars and
    backends. Nothing is kept of a call that it refuses."""
    known = decisions()
    values = (tuple(each) if type(each) is list else each for each in scalars.values())
    key = (op, BACKENDS[op], *map(_facts, args), *scalars, *values)
    found: Decided | None = known.get(key)
    if found is None:
        found = decide(args, scalars)
        if len(known) >= MOST_DECISIONS:
            known.clear()
        known[key] = found
    return found


def register(
    schema: str,
    decide: Decide,
    run: Callable[[Decided, tuple[Any, ...], dict[str, Any]], Any],
    fake: Callable[..., Any],
) -> Any:
    """Define openmla::<op> from a schema line; returns the overload to call.

    `decide` checks metadata and chooses who runs the call; `run` gets what it said first and no
    backend=, and checks what metadata do not tell.
    """
    name = schema.partition("(")[0]

    def called(*args: Any, **scalars: Any) -> Any:
        found = remembered(name, decide, args, scalars)
        del scalars["backend"]
        replay = found.replay
        if replay is not None:
            if not replay.is_watched() and not wants_grad(args):
                return replay(args, torch._C._cuda_getCurrentRawStream(args[0].device.index))
        elif found.is_watched() and not wants_grad(args):
            result, found.replay = record(lambda *tensors: run(found, tensors, scalars), args)
            return result
        return run(found, args, scalars)

    _LIBRARY.define(schema)
    _LIBRARY.impl(name, on_its_device(name, called), "CompositeExplicitAutograd")
    torch.library.register_fake(f"openmla::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.openmla, name).default
