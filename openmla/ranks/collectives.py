"""The four collectives that openmla.ranks uses, on process groups and device meshes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional  # traced by compilers
from torch import Tensor

from openmla.errors import ConfigError


def _newest(name: str, older: str) -> Any:
    """Look up a collective: torch 2.13 renames two and deprecates the old names."""
    return getattr(dist, name, None) or getattr(dist, older)


def group_of(group: Any) -> Any:
    """Return the given process group, or the group of a one-dimensional device mesh."""
    if not dist.is_available() or not dist.is_initialized():
        raise ConfigError(
            "parallel: torch.distributed is not initialized. Call "
            "torch.distributed.init_process_group() first."
        )
    mesh = getattr(group, "get_group", None)
    if mesh is not None:
        if group.ndim != 1:
            raise ConfigError(
                f"parallel: group must be a device mesh of 1 dimension, got {group.ndim}. Select "
                "one by its name, such as mesh['cp']."
            )
        return mesh()
    if not isinstance(group, dist.ProcessGroup):
        raise ConfigError(
            "parallel: group must be a process group or a device mesh that contains this rank, "
            f"got {type(group).__name__}."
        )
    return group


class Link(NamedTuple):
    """A group as the collectives below use it. Compilers refer to it by name."""

    group: Any
    name: Any
    size: int
    rank: int


def link_of(group: Any) -> Link:
    group = group_of(group)
    return Link(group, group.group_name, dist.get_world_size(group), dist.get_rank(group))


def all_gather(tensor: Tensor, link: Link, out: Tensor | None = None) -> Tensor:  # [W, ...]
    """Gather the tensors of all ranks, into `out` if given: contiguous, of W times the elements."""
    mine = tensor.contiguous()
    if torch.compiler.is_compiling():
        return functional.all_gather_tensor(mine, 0, link.name).view(link.size, *mine.shape)
    every = mine.new_empty((link.size, *mine.shape)) if out is None else out
    gather = _newest("all_gather_single", "all_gather_into_tensor")
    gather(every.view(-1), mine.view(-1), group=link.group)
    return every


def all_to_all(parts: Tensor, link: Link) -> Tensor:  # [W, ...]
    """Send parts[r] to rank r. Returns the parts received, in order of ranks."""
    sent = parts.contiguous()
    if torch.compiler.is_compiling():
        flat = functional.all_to_all_single(sent.flatten(0, 1), None, None, link.name)
        return flat.view(sent.shape)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received.view(-1), sent.view(-1), group=link.group)
    return received


def reduce_scatter(parts: Tensor, link: Link) -> Tensor:
    """Sum parts [W, ...] over ranks and return this rank's part."""
    if torch.compiler.is_compiling():
        flat = parts.contiguous().flatten(0, 1)
        return functional.reduce_scatter_tensor(flat, "sum", 0, link.name)
    mine = torch.empty_like(parts[0], memory_format=torch.contiguous_format)
    reduce = _newest("reduce_scatter_single", "reduce_scatter_tensor")
    reduce(mine.view(-1), parts.contiguous().view(-1), group=link.group)
    return mine


def all_reduce(tensor: Tensor, link: Link) -> Tensor:
    """Sum a tensor over ranks, in place if it is contiguous."""
    total = tensor.contiguous()
    if torch.compiler.is_compiling():
        return functional.all_reduce(total, "sum", link.name)
    dist.all_reduce(total, group=link.group)
    return total
