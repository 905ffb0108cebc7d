"""Quantize decode queries to e4m3, the step before mqa_paged and mqa_sparse with fp8 queries."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from openmla.bench.harness import Job, main
from openmla.ops import quantize_queries
from openmla.ops.quantize_queries import cost
from openmla.testing import Inputs


def check(inputs: Inputs, backend: str) -> float:
    """Every byte must equal the reference's."""
    found = inputs.run(quantize_queries, backend=backend)
    wanted = inputs.run(quantize_queries, backend="reference")
    same = torch.equal(found[0].view(torch.uint8), wanted[0].view(torch.uint8))
    return 0.0 if same and torch.equal(found[1], wanted[1]) else float("inf")


def job(T: int, H: int, C: int, R: int, device: str) -> Job:
    latent = torch.randn(H, T, C, device=device).bfloat16().transpose(0, 1)  # bmm's layout
    q_pe = torch.randn(T, H, R, device=device).bfloat16()
    inputs = Inputs({"latent": latent, "q_pe": q_pe}, {}, ())
    return Job(inputs, cost(T, H=H, D=C + R, itemsize=2), check)


def run(arguments: Sequence[str] | None = None) -> None:
    main(
        arguments,
        quantize_queries,
        {
            "tiny-4x4": partial(job, 4, 4, 32, 8),
            "v3-tp8-decode-b64": partial(job, 64, 16, 512, 64),
            "v3-decode-b128": partial(job, 128, 128, 512, 64),
        },
    )


if __name__ == "__main__":
    run()
