"""Quantize attention outputs for a quantized o_proj: decode steps, and a prefill."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from openmla.bench.harness import Job, main
from openmla.bench.quantized import bytes_differ, output_inputs
from openmla.ops import quantize_out
from openmla.ops.quantize_out import cost
from openmla.testing import Inputs


def check(inputs: Inputs, backend: str) -> float:
    """Every byte must equal the reference's."""
    return bytes_differ(quantize_out, inputs, backend)


def job(n: int, H: int, V: int, format: str, device: str) -> Job:
    out = torch.randn(n, H, V, device=device).bfloat16()
    inputs = output_inputs({"out": out}, format, n, H * V, device)
    return Job(inputs, cost(n, H=H, V=V, itemsize=2, format=format), check)


def run(arguments: Sequence[str] | None = None) -> None:
    main(
        arguments,
        quantize_out,
        {
            "tiny-64x4": partial(job, 64, 4, 32, "fp8_128"),
            "v3-decode-b128": partial(job, 128, 128, 128, "fp8_128"),
            "v3-prefill-8k": partial(job, 8192, 128, 128, "fp8_128"),
            "v3-prefill-8k-nvfp4": partial(job, 8192, 128, 128, "nvfp4"),
        },
    )


if __name__ == "__main__":
    run()
