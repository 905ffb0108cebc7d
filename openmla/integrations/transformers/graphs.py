"""GraphMemory: the memory that captured steps share.

A graph keeps what it allocates during capture for its replays, and torch would give each graph a
pool of its own. Captured steps are replayed one at a time, each after what other streams launched
before it, so the intermediate results of different graphs may share memory. What must outlive a
replay is not in the pool: inputs, plans and caches are allocated outside, and logits are held as
long as their graph exists and copied before the next step may begin.

A step that is smaller than the one a pool was made for fits into it. A larger one would leave the
existing memory unused besides its own, so its owner drops all graphs first. torch returns a pool to
the device when its last graph is gone and more memory is requested, and on
torch.cuda.empty_cache().
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

WARM_UPS = 2  # passes before capture: they compile kernels and initialize libraries


def has_graphs(device: torch.device) -> bool:
    """Whether steps are captured on a device; elsewhere they run over the same fixed tensors."""
    return device.type == "cuda"


_RECORDING = threading.RLock()  # any launch on a capture stream would be captured


# Graphs whose capture failed: torch's allocator keeps querying which stream they capture.
_FAILED: list[Any] = []


@contextmanager
def _no_collection() -> Iterator[None]:
    """Disable the garbage collector: graphs of a deleted model are part of a cycle, and destroying
    one of them during a capture on the same thread fails the capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@cache
def recording_stream(device: torch.device) -> torch.cuda.Stream:
    """The one stream for all captures on a device. cuBLAS keeps a workspace, 32 MiB on an H200, for
    every stream it has seen, and graphs that were captured there use it at every replay."""
    stream = torch.cuda.Stream(device)
    _ANCHORS.append(keep_workspace(stream))
    return stream


_ANCHORS: list[Any] = []  # graphs that are never replayed


def keep_workspace(stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    """A graph whose private pool holds the stream's cuBLAS workspace. torch.compile with CUDA
    graphs releases the workspaces of all streams; what is in the pool of a graph stays mapped, and
    nothing else is allocated there."""
    graph = torch.cuda.CUDAGraph()
    with _RECORDING, torch.cuda.device(stream.device), _no_collection():
        square = torch.zeros(16, 16, device=stream.device, dtype=torch.bfloat16)
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            square @ square
    return graph


class GraphMemory:
    """A pool of torch's allocator, and the stream that its memory belongs to.

    While it is in use, at least one graph captured in it must be alive.
    """

    def __init__(self, device: torch.device, rows: int, blocks: int) -> None:
        self.device, self.rows, self.blocks = device, rows, blocks
        self.stream = recording_stream(device)
        self.handle = torch.cuda.graph_pool_handle()

    def holds(self, device: torch.device, rows: int, blocks: int) -> bool:
        """Whether a step of that many rows, each of that many blocks, fits into the pool."""
        smaller = rows <= self.rows and rows * blocks <= self.rows * self.blocks
        return device == self.device and smaller

    def warm_up(self, step: Callable[[], Any]) -> None:
        """Run the step outside the pool and not on the capture stream, whose cuBLAS workspace must
        come from the pool of a graph."""
        with _RECORDING, torch.cuda.device(self.device):
            for _ in range(WARM_UPS):
                step()

    def record(self, step: Callable[[], Any]) -> tuple[Any, Any]:
        """Capture what a step launches. Returns the graph and what the step returned."""
        graph = torch.cuda.CUDAGraph()
        # other threads go on, and what they allocate meanwhile is not captured
        mode = "thread_local"
        with _RECORDING, torch.cuda.device(self.device), _no_collection():
            try:
                # a failed capture leaves its own stream current
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
        """Bytes the device gave the pool; None if another allocator than torch's own is used."""
        if torch.cuda.get_allocator_backend() != "native":
            return None
        segments = torch.cuda.memory_snapshot(self.handle)
        mine = (part for part in segments if part["segment_pool_id"] == self.handle)
        return sum(part["total_size"] for part in mine)
