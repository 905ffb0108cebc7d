"""GraphMemory: the memory that recorded steps share.

A graph keeps what it allocates while it is recorded, for its replays, and torch would give each a
pool of its own. Recorded steps are replayed one at a time, each behind what other streams launched
before it, so one's intermediate results may lie where another's did. What must outlive a replay is
no part of that: inputs, plans and caches are allocated outside, logits are held while their graph
is there and copied before the next step may begin.

A step that is smaller than the one a pool was made for finds room in it. A larger one would leave
what is there unused beside its own, so its owner drops all graphs first: torch gives a pool back
to the device when its last graph is gone and more is asked for, and with torch.cuda.empty_cache().
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

WARM_UPS = 2  # passes before recording: kernels are compiled, libraries set themselves up


def has_graphs(device: torch.device) -> bool:
    """Whether steps are recorded there; elsewhere they run over the same fixed tensors."""
    return device.type == "cuda"


_RECORDING = threading.RLock()  # whoever launches on such a stream: it would be recorded


# Graphs whose capture failed: torch's allocator keeps asking them which stream they capture.
_FAILED: list[Any] = []


@contextmanager
def _no_collection() -> Iterator[None]:
    """Without the garbage collector: graphs of a model that is gone are part of a cycle, and
    destroying one of them during a capture on the same thread fails the capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@cache
def recording_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all recordings on a device: cuBLAS keeps a workspace, 32 MiB on an H200, for every
    stream it has seen."""
    return torch.cuda.Stream(device)


class GraphMemory:
    """A pool of torch's allocator, and the stream that its memory belongs to.

    While it is in use at least one graph recorded in it must be alive.
    """

    def __init__(self, device: torch.device, rows: int, blocks: int) -> None:
        self.device, self.rows, self.blocks = device, rows, blocks
        self.stream = recording_stream(device)
        self.handle = torch.cuda.graph_pool_handle()

    def holds(self, device: torch.device, rows: int, blocks: int) -> bool:
        """Whether a step of so many rows and of so many blocks each is no larger than its own."""
        smaller = rows <= self.rows and rows * blocks <= self.rows * self.blocks
        return device == self.device and smaller

    def warm_up(self, step: Callable[[], Any]) -> None:
        """Where it will be recorded, but out of the pool: what libraries keep for a stream is not
        to lie in it."""
        with _RECORDING, torch.cuda.device(self.device):
            current = torch.cuda.current_stream()
            self.stream.wait_stream(current)
            with torch.cuda.stream(self.stream):
                for _ in range(WARM_UPS):
                    step()
            current.wait_stream(self.stream)

    def record(self, step: Callable[[], Any]) -> tuple[Any, Any]:
        """The graph of what a step launches, and what the step returned."""
        graph = torch.cuda.CUDAGraph()
        # other threads go on: what they allocate meanwhile is no part of this
        mode = "thread_local"
        with _RECORDING, torch.cuda.device(self.device), _no_collection():
            try:
                # a capture that fails leaves its own stream as the current one
                with (
                    torch.cuda.stream(torch.cuda.current_stream()),
                    torch.cuda.graph(
                        graph, pool=self.handle, stream=self.stream, capture_error_mode=mode
                    ),
                ):
                    out = step()
            except BaseException:
                _FAILED.append(graph)
                raise
        return graph, out

    @property
    def num_bytes(self) -> int | None:
        """What the device gave the pool; None where another allocator than torch's own is used."""
        if torch.cuda.get_allocator_backend() != "native":
            return None
        segments = torch.cuda.memory_snapshot(self.handle)
        mine = (part for part in segments if part["segment_pool_id"] == self.handle)
        return sum(part["total_size"] for part in mine)
