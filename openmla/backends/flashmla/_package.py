"""Variants of the flash_mla package: requirements and kept schedules.

sgl-flash-mla has the kernels for Hopper and for rows of V3.2 and V4 under use_legacy=True.
FlashMLA itself dropped them in its release of September 2026.
"""

from __future__ import annotations

import inspect
from functools import cache
from importlib import import_module
from typing import Any

import torch

# The scheduler of its decode kernels keeps five integers per sequence in shared memory.
MAX_SEQUENCES = 8192
CURE = "Install sgl-flash-mla"

# A schedule for selected rows depends on shapes only, so it is built once. Prefill schedules are
# not kept: there are too many shapes, and the schedule is the smallest part of the work.
MAX_TOKENS, MAX_KEPT = 1024, 4096
_KEPT: dict[tuple[Any, ...], Any] = {}


def flash_mla() -> Any:
    return import_module("flash_mla")


@cache
def _takes(function: Any) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def legacy(function: Any) -> dict[str, bool]:
    """Return the switch that enables the legacy kernels, if `function` has one."""
    return {"use_legacy": True} if "use_legacy" in _takes(function) else {}


def why_not_installed() -> str | None:
    """Return what the installed package lacks; not checked without a GPU, as it would load."""
    if not torch.cuda.is_available():
        return None
    package = flash_mla()
    taken = _takes(package.flash_mla_with_kvcache)
    if "use_legacy" not in taken and "enable_batch_invariant" in taken:
        return f"needs kernels that FlashMLA has dropped. {CURE}"
    if "attn_sink" not in taken:  # this release made lse natural-log everywhere
        return f"needs a FlashMLA that takes sinks, of 2026. {CURE}"
    if "use_legacy" in taken and not package.has_legacy():
        return "needs the legacy kernels, which this flash_mla was built without"
    return None


def capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


class Schedule:
    """FlashMLA's schedule object for a call of one shape, kept or new. Leaving the `with` block
    stores it after the call, which fills it.

    A schedule filled during graph capture is empty until the graph runs and belongs to that graph,
    so it is not kept. A kept schedule is never dropped, because a graph may read it.
    """

    def __init__(self, tokens: int, *shape: Any) -> None:
        self.key = (tokens, *shape)
        self.kept = _KEPT.get(self.key)
        self.keep = tokens <= MAX_TOKENS and len(_KEPT) < MAX_KEPT and not capturing()

    def __enter__(self) -> Any:
        self.used = flash_mla().get_mla_metadata()[0] if self.kept is None else self.kept
        return self.used

    def __exit__(self, failed: object, *_: object) -> None:
        if failed is not None or self.kept is not None or not self.keep:
            return
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()  # another stream may be the next to read it
        _KEPT.setdefault(self.key, self.used)
