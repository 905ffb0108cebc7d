"""The four collectives this room calls, on process groups and device meshes as they are."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from openmla.errors import ConfigError


def _newest(name: str, older: str) -> Any:
    """torch 2.13 renames two collectives and warns of their older names."""
    return getattr(dist, name, None) or getattr(dist, older)


def group_of(group: Any) -> Any:
    """The process group that was given, or that of a device mesh of one dimension."""
    if not dist.is_available() or not dist.is_initialized():
        raise ConfigError(
            "parallel: torch.distributed must be initialised before a group is used, got none. "
            "Call torch.distributed.init_process_group()."
        )
    mesh = getattr(group, "get_group", None)
    if mesh is not None:
        if group.ndim != 1:
            raise ConfigError(
                f"parallel: group must be a mesh of one dimension, got {group.ndim}. "
                "Take one of them by its name: mesh['cp']."
            )
        return mesh()
    if not isinstance(group, dist.ProcessGroup):
        raise ConfigError(
            "parallel: group must be a process group or a device mesh this rank is in, "
            f"got {type(group).__name__}."
        )
    return group


def size_and_rank(group: Any) -> tuple[int, int]:
    return dist.get_world_size(group), dist.get_rank(group)


def all_gather(tensor: Tensor, group: Any, out: Tensor | None = None) -> Tensor:  # [W, ...]
    """Everyone's tensor, by rank; in `out`, contiguous and of as many elements, if it is given."""
    mine = tensor.contiguous()
    every = mine.new_empty((dist.get_world_size(group), *mine.shape)) if out is None else out
    gather = _newest("all_gather_single", "all_gather_into_tensor")
    gather(every.view(-1), mine.view(-1), group=group)
    return every


def all_to_all(parts: Tensor, group: Any) -> Tensor:  # [W, ...]
    """parts[r] goes to rank r; what ranks sent here, by rank."""
    sent = parts.contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received.view(-1), sent.view(-1), group=group)
    return received


def reduce_scatter(parts: Tensor, group: Any) -> Tensor:
    """parts [W, ...] summed over ranks; this rank's."""
    mine = torch.empty_like(parts[0], memory_format=torch.contiguous_format)
    reduce = _newest("reduce_scatter_single", "reduce_scatter_tensor")
    reduce(mine.view(-1), parts.contiguous().view(-1), group=group)
    return mine


def all_reduce(tensor: Tensor, group: Any) -> Tensor:
    """Summed over ranks, in place if it is contiguous."""
    total = tensor.contiguous()
    dist.all_reduce(total, group=group)
    return total
