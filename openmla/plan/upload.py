"""Moves every host tensor of a plan to the device in one pinned, asynchronous copy per dtype."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

Tree = TypeVar("Tree")


def upload(tree: Tree, device: torch.device) -> Tree:
    """The same dataclass (dataclasses and tuples of them inside) with its CPU tensors moved."""
    if device.type == "cpu":
        return tree
    found: list[Tensor] = []
    _collect(tree, found)
    moved: dict[int, Tensor] = {}
    for dtype in {tensor.dtype for tensor in found}:
        group = [tensor for tensor in found if tensor.dtype == dtype]
        packed = torch.cat([tensor.reshape(-1) for tensor in group])
        if device.type == "cuda":
            packed = packed.pin_memory()
        on_device = packed.to(device, non_blocking=True)
        sizes = [tensor.numel() for tensor in group]
        for tensor, part in zip(group, on_device.split(sizes), strict=True):
            moved[id(tensor)] = part.view(tensor.shape)
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
