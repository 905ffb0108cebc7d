"""Moves every host tensor of a plan to the device in one pinned, asynchronous copy."""

from __future__ import annotations

from ctypes import memmove
from typing import Any, TypeVar

import torch
from torch import Tensor

from openmla.plan.types import Part, remade

Tree = TypeVar("Tree")
ALIGN = 16  # bytes: kernels specialise on alignment, so all tensors share one
# Bytes of pinned memory that are asked for at least. torch keeps pinned blocks by size, and a new
# one takes a fraction of a millisecond: so most plans ask for the same.
LEAST = 1 << 16


def upload(tree: Tree, device: torch.device) -> Tree:
    """The same tuple or part of a plan, however nested, with its CPU tensors moved: integers of 32
    and 64 bits."""
    return tree if device.type == "cpu" else send(tree, device)


def send(tree: Tree, device: torch.device) -> Tree:
    if not torch.is_inference_mode_enabled():
        return _send(tree, device)
    with torch.inference_mode(False):  # whose tensors do not tell whether they were written to
        return _send(tree, device)


def _send(tree: Tree, device: torch.device) -> Tree:
    found: dict[int, Tensor] = {}  # by identity: shared tensors are moved once
    _collect(tree, found)
    places, end = [], 0
    for key, tensor in found.items():
        if not tensor.is_contiguous():
            tensor = tensor.contiguous()
        places.append((key, tensor, end))
        end += -(-tensor.nbytes // ALIGN) * ALIGN
    pinned = device.type == "cuda"
    room = max(end, LEAST) if pinned else end
    staging = torch.empty(room // 4, dtype=torch.int32, device="cpu", pin_memory=pinned)
    packed = staging if room == end else staging[: end // 4]
    first = packed.data_ptr()
    for _, tensor, begin in places:  # bytes as they are: a torch operation costs more than they do
        memmove(first + begin, tensor.data_ptr(), tensor.nbytes)
    sent = packed.to(device, non_blocking=True)
    wide, moved = sent.view(torch.int64), {}
    for key, tensor, begin in places:
        whole = wide if tensor.dtype == torch.int64 else sent
        offset = begin // whole.itemsize  # in elements of the view it is taken from
        moved[key] = whole.as_strided(tensor.shape, tensor.stride(), offset)
    made: Tree = _rebuild(tree, moved)
    return made


def _collect(node: Any, found: dict[int, Tensor]) -> None:
    for part in node if isinstance(node, tuple) else vars(node).values():
        if isinstance(part, Tensor):
            if part.is_cpu:
                found[id(part)] = part
        elif isinstance(part, tuple | Part):
            _collect(part, found)


def _rebuild(node: Any, moved: dict[int, Tensor]) -> Any:
    """The node with what was moved; itself where it holds no tensor."""
    listed = isinstance(node, tuple)
    changes: dict[Any, Any] = {}
    for name, part in enumerate(node) if listed else vars(node).items():
        if isinstance(part, Tensor):
            changes[name] = moved.get(id(part), part)
        elif isinstance(part, tuple | Part):
            changes[name] = _rebuild(part, moved)
    if not changes:
        return node
    if not listed:
        return remade(node, changes)
    made = [changes.get(place, part) for place, part in enumerate(node)]
    return node._make(made) if hasattr(node, "_make") else tuple(made)
