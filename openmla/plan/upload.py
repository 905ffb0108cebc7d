"""Moves every host tensor of a plan to the device in one pinned, asynchronous copy."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import TypeVar

import torch
from torch import Tensor

Tree = TypeVar("Tree")
ALIGN = 16  # bytes: kernels specialise on alignment, so all tensors share one


def upload(tree: Tree, device: torch.device) -> Tree:
    """The same tuple or dataclass, however nested, with its CPU tensors moved."""
    return tree if device.type == "cpu" else send(tree, device)


@torch.inference_mode(False)  # inference tensors do not tell whether they were written to
def send(tree: Tree, device: torch.device) -> Tree:
    found: dict[int, Tensor] = {}  # by identity: shared tensors are moved once
    _collect(tree, found)
    raw = [tensor.reshape(-1).view(torch.uint8) for tensor in found.values()]
    places = list(accumulate((-(-len(part) // ALIGN) * ALIGN for part in raw), initial=0))
    packed = torch.empty(places[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    for part, place in zip(raw, places, strict=False):
        packed[place : place + len(part)] = part
    sent = packed.to(device, non_blocking=True)
    moved = {
        key: sent[place : place + len(part)].view(tensor.dtype).view(tensor.shape)
        for (key, tensor), part, place in zip(found.items(), raw, places, strict=False)
    }
    return _rebuild(tree, moved)


def _collect(node: object, found: dict[int, Tensor]) -> None:
    if isinstance(node, Tensor):
        if node.device.type == "cpu":
            found[id(node)] = node
    elif isinstance(node, tuple):
        for part in node:
            _collect(part, found)
    elif hasattr(node, "__dataclass_fields__"):
        for part in vars(node).values():
            _collect(part, found)


def _rebuild(node: Tree, moved: dict[int, Tensor]) -> Tree:
    if isinstance(node, Tensor):
        return moved.get(id(node), node)  # type: ignore[return-value]
    if isinstance(node, tuple):
        return tuple(_rebuild(part, moved) for part in node)  # type: ignore[return-value]
    if hasattr(node, "__dataclass_fields__"):
        parts = {name: (part, _rebuild(part, moved)) for name, part in vars(node).items()}
        changed = {name: new for name, (old, new) in parts.items() if new is not old}
        return replace(node, **changed)  # type: ignore[type-var]
    return node
