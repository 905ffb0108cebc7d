"""Project queries into latent space and outputs out of it, with fp8 and with 16-bit weights."""

from __future__ import annotations

from functools import partial

import torch

from openmla.bench.harness import Job, checked, rounded
from openmla.ops.project_heads import cost
from openmla.testing import Inputs


def job(T: int, H: int, P: int, C: int, into: bool, eight_bits: bool, device: str) -> Job:
    """`into`: project queries by w_uk; else outputs by w_uv, a transpose."""
    K, N = (P, C) if into else (C, P)
    w = torch.randn(H, P, C, device=device) / 8
    stored = (64 * w).to(torch.float8_e4m3fn) if eight_bits else w.bfloat16()
    tensors = {
        "out": torch.empty(T, H, N, device=device, dtype=torch.bfloat16),
        "x": torch.randn(T, H, K, device=device).bfloat16(),
        "w": stored if into else stored.transpose(1, 2),
    }
    if eight_bits:
        tensors["w_scale"] = torch.full((H, 1, 1), 1 / 64, device=device)
    size = cost(T, H=H, K=K, N=N, itemsize=2, w_itemsize=1 if eight_bits else 2)
    inputs = Inputs(tensors, {}, ("out", "x", *(() if eight_bits else ("w",))))
    return Job(inputs, size, checked(rounded, "out"))


SHAPES = {
    f"{size}-{'w_uk' if into else 'w_uv'}-{'fp8' if eight_bits else 'bf16'}": partial(
        job, T, H, P, C, into, eight_bits
    )
    for size, T, H, P, C in (
        ("tiny-4", 4, 2, 32, 64),
        ("v3-tp8-decode-1", 1, 16, 128, 512),
        ("v3-decode-16", 16, 128, 128, 512),
        ("v3-decode-128", 128, 128, 128, 512),
    )
    for into in (True, False)
    for eight_bits in (True, False)
}
