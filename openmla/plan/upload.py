"""Moves every host tensor of a plan to the device in one pinned, asynchronous copy."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor

from openmla.plan.types import remade

Tree = TypeVar("Tree")
ALIGN = 4  # words of 4 bytes: kernels specialise on alignment, so all tensors share one
PLAIN = frozenset((int, str, slice, type(None)))  # most of what parts hold, and no tensor
_ZEROS = [torch.zeros(n, dtype=torch.int32, device="cpu") for n in range(ALIGN)]


def upload(tree: Tree, device: torch.device) -> Tree:
    """The same tuple or dataclass, however nested, with its CPU tensors moved: integers of 32 and
    64 bits."""
    return tree if device.type == "cpu" else send(tree, device)


@torch.inference_mode(False)  # inference tensors do not tell whether they were written to
def send(tree: Tree, device: torch.device) -> Tree:
    found: dict[int, Tensor] = {}  # by identity: shared tensors are moved once
    _collect(tree, found)
    pieces, places, end = [], [], 0
    for key, tensor in found.items():
        tensor = tensor.contiguous()
        wide = tensor.dtype == torch.int64
        words = tensor.view(-1)
        words = words.view(torch.int32) if wide else words
        size = words.shape[0]
        rest = -size % ALIGN
        pieces += [words, _ZEROS[rest]] if rest else [words]
        # offsets count elements of the view they are taken from
        places.append((key, wide, tensor.shape, tensor.stride(), end // 2 if wide else end))
        end += size + rest
    packed = torch.empty(end, dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda")
    if pieces:
        torch.cat(pieces, out=packed)
    sent = packed.to(device, non_blocking=True)
    both = sent, sent.view(torch.int64)
    moved = {
        key: both[wide].as_strided(shape, stride, offset)
        for key, wide, shape, stride, offset in places
    }
    made: Tree = _rebuild(tree, moved)
    return made


def _collect(node: object, found: dict[int, Tensor]) -> None:
    if type(node) in PLAIN:
        return
    if isinstance(node, Tensor):
        if node.device.type == "cpu":
            found[id(node)] = node
    elif isinstance(node, tuple):
        for part in node:
            _collect(part, found)
    elif hasattr(node, "__dataclass_fields__"):
        for part in vars(node).values():
            _collect(part, found)


def _rebuild(node: Any, moved: dict[int, Tensor]) -> Any:
    if type(node) in PLAIN:
        return node
    if isinstance(node, Tensor):
        return moved.get(id(node), node)
    if isinstance(node, tuple):
        return tuple([_rebuild(part, moved) for part in node])
    if hasattr(node, "__dataclass_fields__"):
        return remade(node, {name: _rebuild(part, moved) for name, part in vars(node).items()})
    return node
