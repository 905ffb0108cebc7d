"""Helpers for benchmarks of quantized outputs: buffers among the inputs, bytewise comparison."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from openmla.cache.format import raw_view
from openmla.outputs import get_output_format, make_output
from openmla.testing import Inputs


def output_inputs(
    tensors: dict[str, Tensor], format: str, n: int, columns: int, device: str
) -> Inputs:
    """Arguments of an op that writes n quantized rows with scales: buffers, then tensors."""
    scale = 1.0 if get_output_format(format).global_scale else None
    made = make_output(format, n, columns, global_scale=scale, device=device)
    assert made.scales is not None
    scalars = {"global_scale": made.global_scale, "format": format}
    return Inputs({"values": made.values, "scales": made.scales, **tensors}, scalars, ())


def bytes_differ(op: Callable[..., Any], inputs: Inputs, backend: str) -> float:
    """0 if a backend writes what the reference does, else infinity."""
    made = []
    for name in (backend, "reference"):
        fresh = inputs.clone()
        fresh.run(op, backend=name)
        made.append([raw_view(fresh[part]) for part in ("values", "scales")])
    same = all(torch.equal(a, b) for a, b in zip(*made, strict=True))
    return 0.0 if same else float("inf")
