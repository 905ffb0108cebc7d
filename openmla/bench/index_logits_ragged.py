"""Indexer scores over packed keys: prefill shapes, causal at the end of the context."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from openmla.bench.harness import Job, main
from openmla.bench.index_logits import score_budget
from openmla.cache.format import quantize_groups
from openmla.ops import index_logits_ragged
from openmla.ops.index_logits_ragged import cost
from openmla.testing import Inputs

DI = 128

# tokens, keys of each request, requests, heads
SHAPES = {
    "tiny-score-64-on-256": (64, 256, 1, 8),
    "v32-score-8k": (8192, 8192, 1, 64),
    "v32-score-4x2k": (2048, 2048, 4, 64),
    "v32-score-2k-on-32k": (2048, 32768, 1, 64),
    "v32-score-8k-on-128k": (8192, 131072, 1, 64),
    "glm5-score-2k-on-32k": (2048, 32768, 1, 32),
}


def check(inputs: Inputs, backend: str) -> float:
    actual = inputs.run(index_logits_ragged, backend=backend)
    exact = inputs.double().run(index_logits_ragged, backend="reference")
    return score_budget(actual, exact, inputs.run(index_logits_ragged, backend="reference"))


def job(n: int, S: int, B: int, HI: int, device: str) -> Job:
    generator = torch.Generator(device).manual_seed(0)
    T = n * B
    keys = torch.randn(S * B, DI, generator=generator, device=device)
    k_idx, k_scale = quantize_groups(keys, exact=False)
    q_idx = torch.randn(T, HI, DI, generator=generator, device=device)
    w_idx = torch.randn(T, HI, generator=generator, device=device)
    lens = [S - n + i + 1 for i in range(n)] * B
    starts = torch.arange(B, dtype=torch.int32, device=device).repeat_interleave(n) * S
    tensors = {
        "q_idx": q_idx.to(torch.float8_e4m3fn),
        "w_idx": w_idx * (HI * DI) ** -0.5,
        "k_idx": k_idx,
        "k_scale": k_scale,
        "starts": starts,
        "ends": starts + torch.tensor(lens, dtype=torch.int32, device=device),
    }
    needed = cost(lens, S=S * B, HI=HI, DI=DI, itemsize=1)
    return Job(Inputs(tensors, {}, ("q_idx", "w_idx", "k_idx")), needed, check)


def run(arguments: Sequence[str] | None = None) -> None:
    main(
        arguments,
        index_logits_ragged,
        {name: partial(job, *shape) for name, shape in SHAPES.items()},
    )


if __name__ == "__main__":
    run()
