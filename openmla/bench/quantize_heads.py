"""Quantize expanded heads to e4m3 for fp8 prefill: queries, keys, values."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from openmla.bench.harness import Job, equal
from openmla.ops.quantize_heads import allocate_heads, cost
from openmla.testing import Inputs


def job(S: int, H: int, P: int, R: int, keys_contiguous: bool, device: str) -> Job:
    tensors: dict[str, Any] = {
        "values": allocate_heads(
            S, H, P + R, torch.device(device), keys_contiguous=keys_contiguous
        ),
        "row_scale": None,
        "x": torch.randn(S, H, P, device=device).bfloat16(),
        "shared": torch.randn(S, R, device=device).bfloat16() if R else None,
        "head_scale": torch.full((1, H), 0.125, device=device),
        "requests": torch.zeros(S, dtype=torch.int64, device=device),
    }
    return Job(Inputs(tensors, {}, ()), cost(S, H=H, P=P, R=R, itemsize=2), equal("values"))


SHAPES = {
    "tiny-64x4": partial(job, 64, 4, 32, 0, False),
    "v3-queries-8k": partial(job, 8192, 128, 192, 0, False),
    "v3-keys-8k": partial(job, 8192, 128, 128, 64, False),
    "v3-values-8k": partial(job, 8192, 128, 128, 0, True),
}
