"""Quantize attention outputs for a quantized o_proj: decode steps, and a prefill."""

from __future__ import annotations

from functools import partial

import torch

from openmla.bench.harness import Job, equal
from openmla.bench.inputs import output_inputs
from openmla.ops.quantize_out import cost


def job(n: int, H: int, V: int, format: str, device: str) -> Job:
    out = torch.randn(n, H, V, device=device).bfloat16()
    inputs = output_inputs({"out": out}, format, n, H * V, device)
    needed = cost(n, H=H, V=V, itemsize=2, format=format)
    return Job(inputs, needed, equal("values", "scales"))


SHAPES = {
    "tiny-64x4": partial(job, 64, 4, 32, "fp8_128"),
    "v3-decode-b128": partial(job, 128, 128, 128, "fp8_128"),
    "v3-prefill-8k": partial(job, 8192, 128, 128, "fp8_128"),
    "v3-prefill-8k-nvfp4": partial(job, 8192, 128, 128, "nvfp4"),
}
