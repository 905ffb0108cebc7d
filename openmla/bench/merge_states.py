"""Merge two partial attentions: the rows of a prefill chunk."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from openmla.bench.harness import Job, attended, checked
from openmla.ops.merge_states import cost
from openmla.testing import Inputs


def partials(n: int, H: int, V: int, device: str) -> dict[str, Tensor]:
    """Outputs and lse of two attentions."""
    tensors = {}
    for side in ("", "other_"):
        tensors[f"{side}out"] = torch.randn(n, H, V, device=device).bfloat16()
        tensors[f"{side}lse"] = torch.randn(n, H, device=device)
    return tensors


def job(n: int, H: int, V: int, device: str) -> Job:
    tensors = partials(n, H, V, device)
    check = checked(attended, "out", "lse")
    return Job(Inputs(tensors, {}, tuple(tensors)), cost(n, H=H, V=V, itemsize=2), check)


SHAPES = {
    "tiny-64x4": partial(job, 64, 4, 32),
    "v3-tp8-prefill-8k": partial(job, 8192, 16, 128),
    "v3-prefill-8k": partial(job, 8192, 128, 128),
}
