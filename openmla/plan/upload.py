"""Moves every host tensor of a plan to the device in one pinned, asynchronous copy."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

Tree = TypeVar("Tree")


def upload(tree: Tree, device: torch.device) -> Tree:
    """The same tuple or dataclass, nested at will, with its CPU tensors moved."""
    if device.type == "cpu":
        return tree
    found: list[Tensor] = []
    _collect(tree, found)
    found.sort(key=lambda tensor: -tensor.dtype.itemsize)  # wide ones first: all stay aligned
    raw = [tensor.reshape(-1).view(torch.uint8) for tensor in found]
    sizes = [part.numel() for part in raw]
    pinned = device.type == "cuda"
    packed = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=pinned)
    torch.cat(raw, out=packed)
    parts = packed.to(device, non_blocking=True).split(sizes)
    moved = {
        id(tensor): part.view(tensor.dtype).view(tensor.shape)
        for tensor, part in zip(found, parts, strict=True)
    }
    return _rebuild(tree, moved)


def _collect(node: object, found: list[Tensor]) -> None:
    if isinstance(node, Tensor):
        if node.device.type == "cpu":
            found.append(node)
    elif isinstance(node, tuple):
        for part in node:
            _collect(part, found)
    elif is_dataclass(node):
        for field in fields(node):
            _collect(getattr(node, field.name), found)


def _rebuild(node: Tree, moved: dict[int, Tensor]) -> Tree:
    if isinstance(node, Tensor):
        return moved.get(id(node), node)  # type: ignore[return-value]
    if isinstance(node, tuple) and not hasattr(node, "_fields"):
        return tuple(_rebuild(part, moved) for part in node)  # type: ignore[return-value]
    if is_dataclass(node) and not isinstance(node, type):
        changes = {field.name: getattr(node, field.name) for field in fields(node)}
        return replace(node, **{name: _rebuild(part, moved) for name, part in changes.items()})
    return node
