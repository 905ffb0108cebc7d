"""Quantize expanded heads to e4m3 for fp8 prefill: queries, keys, values."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from openmla.bench.harness import Job, main
from openmla.ops import quantize_heads
from openmla.ops.quantize_heads import allocate_heads, cost
from openmla.testing import Inputs


def check(inputs: Inputs, backend: str) -> float:
    """Every byte must equal the reference's."""
    held = []
    for name in (backend, "reference"):
        copy = inputs.clone()
        copy.run(quantize_heads, backend=name)
        held.append(copy["values"].view(torch.uint8).clone())
    return float((held[0] != held[1]).float().mean())


def job(S: int, H: int, P: int, R: int, keys_contiguous: bool, device: str) -> Job:
    tensors = {
        "values": allocate_heads(
            S, H, P + R, torch.device(device), keys_contiguous=keys_contiguous
        ),
        "row_scale": None,
        "x": torch.randn(S, H, P, device=device).bfloat16(),
        "shared": torch.randn(S, R, device=device).bfloat16() if R else None,
        "head_scale": torch.full((1, H), 0.125, device=device),
        "requests": torch.zeros(S, dtype=torch.int64, device=device),
    }
    return Job(Inputs(tensors, {}, ()), cost(S, H=H, P=P, R=R, itemsize=2), check)  # type: ignore[arg-type]


def run(arguments: Sequence[str] | None = None) -> None:
    main(
        arguments,
        quantize_heads,
        {
            "tiny-64x4": partial(job, 64, 4, 32, 0, False),
            "v3-queries-8k": partial(job, 8192, 128, 192, 0, False),
            "v3-keys-8k": partial(job, 8192, 128, 128, 64, False),
            "v3-values-8k": partial(job, 8192, 128, 128, 0, True),
        },
    )


if __name__ == "__main__":
    run()
