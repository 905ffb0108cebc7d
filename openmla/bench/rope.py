"""Rotate query heads in place, with both pairings."""

from __future__ import annotations

from functools import partial

import torch

from openmla.bench.harness import Job, checked, rounded
from openmla.bench.inputs import rotation
from openmla.ops.rope import cost
from openmla.testing import Inputs

R, Q = 64, 4096


def job(T: int, H: int, pairing: str, device: str) -> Job:
    tensors = {
        "x": torch.randn(T, H, 192, device=device).bfloat16()[:, :, 128:],
        "positions": torch.randint(0, Q, (T,), device=device),
        "table": rotation(Q, R, device),
    }
    inputs = Inputs(tensors, {"pairing": pairing, "inverse": False}, ("x",))
    return Job(inputs, cost(T, H=H, R=R, itemsize=2), checked(rounded, "x"))


SHAPES = {
    f"{size}-{pairing}": partial(job, T, H, pairing)
    for size, T, H in (
        ("tiny-64x4", 64, 4),
        ("v3-decode-64", 64, 128),
        ("v3-prefill-8k", 8192, 128),
    )
    for pairing in ("pairs", "halves")
}
