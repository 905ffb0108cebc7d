"""Device properties: compute capability, multiprocessors, shared memory."""

from __future__ import annotations

from functools import cache

import torch


@cache
def _properties(index: int) -> tuple[tuple[int, int], int, int]:
    properties = torch.cuda.get_device_properties(index)
    shared_memory = getattr(properties, "shared_memory_per_block_optin", 0)
    units = properties.multi_processor_count
    return (properties.major, properties.minor), units, shared_memory


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def capability(device: torch.device) -> tuple[int, int] | None:
    """Return the compute capability of a CUDA device, (9, 0) for SM90; None elsewhere."""
    return _properties(_index(device))[0] if device.type == "cuda" else None


def multiprocessors(device: torch.device) -> int:
    """Return the streaming multiprocessors of a CUDA device; CPU threads elsewhere."""
    return _properties(_index(device))[1] if device.type == "cuda" else torch.get_num_threads()


def shared_memory(device: torch.device) -> int:
    """Return the maximum bytes of shared memory per block; 0 if there is none."""
    return _properties(_index(device))[2] if device.type == "cuda" else 0
