"""Counts values that saturated in fp8 in an attached model's caches, without waiting for them.

Writing ops count on the device. On a CPU the counters are read after every pass. On a GPU reading
would make each pass wait, so they are copied to the host after passes 1, 2, 4, 8 and so on, and a
later pass reads a copy once it has arrived.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from openmla.backends.requirements import say_once
from openmla.cache import LayerCache


class Clamped:
    """Warns the first time a counter is not 0."""

    def __init__(self) -> None:
        self.warned = False
        self.passes = 0
        self.arriving: list[tuple[Tensor, torch.cuda.Event]] = []  # one copy per device

    def lines(self, caches: Mapping[int, LayerCache]) -> list[str]:
        """One line for caches that have scales. Waits for the device."""
        if not any(part.layout.scaled for cache in caches.values() for part in cache.parts):
            return []
        found = counted(caches)
        if not found:
            return ["clamped: no value was too large for its scale"]
        worst = max(found, key=lambda layer: found[layer])
        told = (
            f"clamped: {sum(found.values())} values were too large for fp8 at their scales, "
            f"{found[worst]} of them in layer {worst}"
        )
        if not self.warned:
            self.warned = True
            say_once(f"attach: {told}. openmla.calibrate() finds scales that hold them.")
        return [told]

    def after_pass(self, caches: Mapping[int, LayerCache]) -> None:
        """Check the counters after a pass. Waits only to read a count that is not 0."""
        if self.warned or torch.compiler.is_compiling():
            return
        parts = (part for cache in caches.values() for part in cache.parts)
        counters = [part.clamped for part in parts if part.clamped is not None]
        if all(counter.device.type == "cpu" for counter in counters):
            self.lines(caches)
        elif all(counter.device.type == "cuda" for counter in counters):
            self._look_later(counters, caches)

    def _look_later(self, counters: Sequence[Tensor], caches: Mapping[int, LayerCache]) -> None:
        if torch.cuda.is_current_stream_capturing():
            return
        if self.arriving and all(event.query() for _, event in self.arriving):
            cut_off = any(bool(copy.any()) for copy, _ in self.arriving)
            self.arriving = []
            if cut_off:
                self.lines(caches)
                return
        self.passes += 1
        if self.passes & (self.passes - 1) == 0 and not self.arriving:
            self.arriving = [_copied(mine) for mine in _by_device(counters)]


def counted(caches: Mapping[int, LayerCache]) -> dict[int, int]:
    """How many values saturated so far, by layer. Waits for the device."""
    counts = {
        layer: sum(int(part.clamped) for part in cache.parts if part.clamped is not None)
        for layer, cache in caches.items()
    }
    return {layer: count for layer, count in counts.items() if count}


def _by_device(counters: Sequence[Tensor]) -> list[list[Tensor]]:
    found: dict[torch.device, list[Tensor]] = {}
    for counter in counters:
        found.setdefault(counter.device, []).append(counter)
    return list(found.values())


def _copied(counters: Sequence[Tensor]) -> tuple[Tensor, torch.cuda.Event]:
    """A copy on its way to the host, and the event that marks its arrival."""
    with torch.cuda.device(counters[0].device):
        copy = torch.stack(list(counters)).to("cpu", non_blocking=True)
        event = torch.cuda.Event()
        event.record()
    return copy, event
