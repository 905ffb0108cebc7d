"""Bytes that a rank hands to its group's collectives, by the arithmetic of each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor

GATHERS = ("all_gather_single", "all_gather_into_tensor")
SCATTERS = ("reduce_scatter_single", "reduce_scatter_tensor")


class Counted:
    """`num_bytes` this rank has sent, in so many `calls`."""

    def __init__(self) -> None:
        self.num_bytes, self.calls = 0, 0

    def add(self, sent: Tensor, times: float) -> None:
        self.calls += 1
        self.num_bytes += round(sent.numel() * sent.element_size() * times)


@contextmanager
def counted_bytes() -> Iterator[Counted]:
    """Count what goes through torch.distributed meanwhile."""
    counted, patches = Counted(), []
    size = dist.get_world_size()

    def watch(name: str, argument: int, times: float) -> None:
        original = getattr(dist, name, None)
        if original is None:  # of another torch
            return

        def called(*arguments: Any, **options: Any) -> Any:
            counted.add(arguments[argument], times)
            return original(*arguments, **options)

        patches.append(patch.object(dist, name, called))

    for name in GATHERS:
        watch(name, 1, size - 1)
    for name in SCATTERS:
        watch(name, 1, (size - 1) / size)
    watch("all_to_all_single", 1, (size - 1) / size)
    watch("all_reduce", 0, 2 * (size - 1) / size)
    for each in patches:
        each.start()
    try:
        yield counted
    finally:
        for each in patches:
            each.stop()
