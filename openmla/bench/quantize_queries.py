"""Quantize decode queries to e4m3, the step before mqa_paged and mqa_sparse with fp8 queries."""

from __future__ import annotations

from functools import partial

import torch

from openmla.bench.harness import Job, equal
from openmla.ops.quantize_queries import cost
from openmla.testing import Inputs


def job(T: int, H: int, C: int, R: int, device: str) -> Job:
    latent = torch.randn(H, T, C, device=device).bfloat16().transpose(0, 1)  # bmm's layout
    q_pe = torch.randn(T, H, R, device=device).bfloat16()
    inputs = Inputs({"latent": latent, "q_pe": q_pe}, {}, ())
    return Job(inputs, cost(T, H=H, D=C + R, itemsize=2), equal())


SHAPES = {
    "tiny-4x4": partial(job, 4, 4, 32, 8),
    "v3-tp8-decode-b64": partial(job, 64, 16, 512, 64),
    "v3-decode-b128": partial(job, 128, 128, 512, 64),
}
