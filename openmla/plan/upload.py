"""Moves host tensors to the device in one pinned, asynchronous copy."""

from __future__ import annotations

from collections.abc import Iterable
from ctypes import memmove
from functools import cache
from typing import Any, TypeVar, get_args, get_type_hints

import torch
from torch import Tensor

from openmla.plan.types import Part, Parts

Some = TypeVar("Some", bound="tuple[Any, ...]")
Holder = dict[str, Any]
ALIGN = 16  # bytes: kernels specialize on alignment, so all tensors have the same
# The least pinned memory to request, in bytes. torch caches pinned blocks by size and a new one
# takes a fraction of a millisecond, so most plans request the same size.
LEAST = 1 << 16


def upload(tensors: Some, device: torch.device) -> Some:
    """The same tuple with its CPU tensors (int32 and int64) moved to the device."""
    return tensors if device.type == "cpu" else send(tensors, device)


def send(tensors: Some, device: torch.device) -> Some:
    found = [each for each in tensors if isinstance(each, Tensor) and each.is_cpu]
    return _replaced(tensors, _copies(found, device))


def upload_parts(parts: Parts, device: torch.device) -> Parts:
    """A plan's parts with their tensors on the device. Parts belong to one plan and are changed in
    place: rebuilding them takes longer than the copy."""
    return parts if device.type == "cpu" else send_parts(parts, device)


def send_parts(parts: Parts, device: torch.device) -> Parts:
    top: Holder = parts._asdict()
    places: list[tuple[Holder, str]] = []
    found: list[Tensor] = []
    _collect(top, top, places, found)
    moved = _copies(found, device)
    for holder, name in places:
        value = holder[name]
        if isinstance(value, Tensor):
            holder[name] = moved.get(id(value), value)
        else:
            holder[name] = _replaced(value, moved)
    return Parts._make(top.values())


def _collect(
    holder: Holder, names: Iterable[str], places: list[tuple[Holder, str]], found: list[Tensor]
) -> None:
    """Find the tensors on the host, and the fields that hold them."""
    for name in names:
        value = holder[name]
        if isinstance(value, Tensor):
            if value.is_cpu:
                places.append((holder, name))
                found.append(value)
        elif isinstance(value, Part):
            kind: Any = type(value)
            _collect(vars(value), _holders(kind), places, found)
        elif isinstance(value, tuple):
            here = [each for each in value if isinstance(each, Tensor) and each.is_cpu]
            if here:
                places.append((holder, name))
                found += here
                continue
            for each in value:
                if isinstance(each, Part):
                    kind = type(each)
                    _collect(vars(each), _holders(kind), places, found)


@cache
def _holders(kind: Any) -> tuple[str, ...]:
    """The fields of a part that may hold tensors, themselves or in parts of their own."""
    return tuple(name for name, hint in get_type_hints(kind).items() if _holds(hint))


def _holds(hint: Any) -> bool:
    inside = get_args(hint)
    if inside:
        return any(map(_holds, inside))
    return isinstance(hint, type) and issubclass(hint, (Tensor, Part))


def _replaced(given: Some, moved: dict[int, Tensor]) -> Some:
    made: Any = [moved.get(id(each), each) for each in given]
    replaced: Any = given._make(made) if hasattr(given, "_make") else tuple(made)
    return replaced


def _copies(tensors: list[Tensor], device: torch.device) -> dict[int, Tensor]:
    """The tensors on the device, by the identity of those on the host: shared ones are moved
    once."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):  # inference tensors do not count writes
            return _copies(tensors, device)
    places, end = {}, 0
    for tensor in tensors:
        if id(tensor) not in places:
            places[id(tensor)] = tensor.contiguous(), end
            end += -(-tensor.nbytes // ALIGN) * ALIGN
    pinned = device.type == "cuda"
    room = max(end, LEAST) if pinned else end
    staging = torch.empty(room // 4, dtype=torch.int32, device="cpu", pin_memory=pinned)
    packed = staging if room == end else staging[: end // 4]
    first = packed.data_ptr()
    for tensor, begin in places.values():  # cheaper than a torch operation for so few bytes
        memmove(first + begin, tensor.data_ptr(), tensor.nbytes)
    sent = packed.to(device, non_blocking=True)
    wide, moved = sent.view(torch.int64), {}
    for key, (tensor, begin) in places.items():
        whole = wide if tensor.dtype == torch.int64 else sent
        offset = begin // whole.itemsize  # in elements of that view
        moved[key] = whole.as_strided(tensor.shape, tensor.stride(), offset)
    return moved
