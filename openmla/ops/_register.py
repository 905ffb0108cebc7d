"""register(): schema, fake and dispatch of one op; bind(): the executable shape comment."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
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

_DTYPES: dict[str, tuple[torch.dtype, ...]] = {
    "f": (torch.float16, torch.bfloat16, torch.float32, torch.float64),
    "q": (
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.float8_e4m3fn,
    ),
    "f32": (torch.float32,),
    "i32": (torch.int32,),
    "i64": (torch.int64,),
}
_DTYPE_NAMES = {
    "f": "fp16, bf16, fp32 or fp64",
    "q": "e4m3, fp16, bf16, fp32 or fp64",
    "f32": "float32",
    "i32": "int32",
    "i64": "int64",
}


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


class _Argument(NamedTuple):
    name: str
    dims: tuple[str, ...]
    dtype: str | None
    row: bool  # the last dimension must be contiguous


@cache
def _parse(spec: str) -> tuple[_Argument, ...]:
    arguments = []
    for part in spec.split(","):
        name, _, words = part.partition(":")
        tokens = words.split()
        dtype = next((token for token in tokens if token in _DTYPES), None)
        dims = tuple(token for token in tokens if token not in _DTYPES and token != "row")
        arguments.append(_Argument(name.strip(), dims, dtype, "row" in tokens))
    return tuple(arguments)


def bind(
    op: str, spec: str, tensors: Sequence[Tensor], known: Mapping[str, int] | None = None
) -> dict[str, int]:
    """Check tensors against a shape text and return the dims it names.

    "q_latent:T H D f row, seq_lens:B i32" says: q_latent is [T, H, D] of a floating dtype with
    contiguous rows, seq_lens is [B] int32. A letter means the same number everywhere; `known`
    fixes letters beforehand. All tensors are on the first one's device.
    """
    dims = dict(known or {})
    device = tensors[0].device
    for argument, tensor in zip(_parse(spec), tensors, strict=True):
        shape = tensor.shape
        fits = len(shape) == len(argument.dims)
        if fits:
            for letter, size in zip(argument.dims, shape, strict=True):
                if dims.setdefault(letter, size) != size:
                    fits = False
        if not fits:
            raise ShapeError(_shape_message(op, argument, shape, dims))
        if argument.dtype is not None and tensor.dtype not in _DTYPES[argument.dtype]:
            raise ShapeError(
                f"{op}: {argument.name} must be {_DTYPE_NAMES[argument.dtype]}, got {tensor.dtype}."
            )
        if tensor.device != device:
            raise ShapeError(f"{op}: {argument.name} must be on {device}, got {tensor.device}.")
        if argument.row and shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ShapeError(
                f"{op}: {argument.name} must be contiguous along its last dimension, "
                f"got strides {tensor.stride()}. Call .contiguous()."
            )
    return dims


def _shape_message(op: str, argument: _Argument, shape: Sequence[int], dims: dict[str, int]) -> str:
    message = f"{op}: {argument.name} must be [{', '.join(argument.dims)}]"
    if len(shape) == len(argument.dims):
        wrong = [
            f"{letter}={dims[letter]}"
            for letter, size in zip(argument.dims, shape, strict=True)
            if dims[letter] != size
        ]
        message += f" with {', '.join(wrong)}"
    return f"{message}, got {tuple(shape)}."


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


def remembered(
    op: str, decide: Callable[..., Decided], args: Sequence[Any], scalars: Mapping[str, Any]
) -> Decided:
    """decide() of a call, or what it said of an earlier one with the same metadata, scalars and
    backends. Nothing is kept of a call that it refuses."""
    known = decisions()
    values = (tuple(each) if type(each) is list else each for each in scalars.values())
    key = (op, BACKENDS[op], *map(_facts, args), *scalars, *values)
    found: Decided | None = known.get(key)
    if found is None:
        found = decide(*args, **scalars)
        if len(known) >= MOST_DECISIONS:
            known.clear()
        known[key] = found
    return found


def register(
    schema: str,
    decide: Callable[..., Decided],
    run: Callable[..., Any],
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
            result, found.replay = record(partial(run, found, **scalars), args)
            return result
        return run(found, *args, **scalars)

    _LIBRARY.define(schema)
    _LIBRARY.impl(name, on_its_device(name, called), "CompositeExplicitAutograd")
    torch.library.register_fake(f"openmla::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.openmla, name).default
