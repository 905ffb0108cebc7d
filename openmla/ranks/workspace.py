"""GatherWorkspace: one buffer per device for context gathered from ranks, shared by all steps."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

import torch
from torch import Tensor

ALIGNMENT = 256  # bytes; no less than for a separate tensor, so that kernels load alike
Shape = tuple[int, int]


class GatherWorkspace:
    """A buffer that is allocated when a plan first gathers, and again only if a plan needs more.
    Gathered rows last until the next layer gathers, so plans on one stream can share the buffer."""

    def __init__(self) -> None:
        self._buffers: dict[torch.device, Tensor] = {}  # bytes

    def __repr__(self) -> str:
        return f"GatherWorkspace({self.num_bytes} bytes)"

    @property
    def num_bytes(self) -> int:
        return sum(buffer.numel() for buffer in self._buffers.values())

    def reserve(self, device: torch.device, dtype: torch.dtype, *shapes: Shape) -> None:
        """Make room for split() calls with these shapes or smaller ones."""
        needed = _ends(dtype, shapes)[-1]
        held = self._buffers.get(device)
        if held is None or held.numel() < needed:
            self._buffers.pop(device, None)  # freed before the larger one is allocated
            with torch.inference_mode(False):  # steps in both modes write to it
                self._buffers[device] = torch.empty(needed, dtype=torch.uint8, device=device)

    def split(self, device: torch.device, dtype: torch.dtype, *shapes: Shape) -> Iterator[Tensor]:
        """Yield consecutive tensors of these shapes, uninitialized. A compiled step allocates its
        own memory."""
        if torch.compiler.is_compiling():
            yield from (torch.empty(shape, dtype=dtype, device=device) for shape in shapes)
            return
        self.reserve(device, dtype, *shapes)  # queries may be wider than planned
        buffer = self._buffers[device]
        for (rows, width), start in zip(shapes, _ends(dtype, shapes), strict=False):
            part = buffer[start : start + rows * width * dtype.itemsize]
            yield part.view(dtype).view(rows, width)


def power_of_two(count: int) -> int:
    """Round up to a power of two, so that the buffer grows rarely."""
    return 1 << max(count - 1, 0).bit_length()


def _ends(dtype: torch.dtype, shapes: tuple[Shape, ...]) -> list[int]:
    """Return where each tensor begins, and where the last one ends."""
    sizes = (-(-rows * width * dtype.itemsize // ALIGNMENT) * ALIGNMENT for rows, width in shapes)
    return list(accumulate(sizes, initial=0))
