"""Indexer scores over packed keys: prefill shapes, causal at the end of the context."""

from __future__ import annotations

from functools import partial

import torch

from openmla.bench.harness import Job, checked, scored
from openmla.cache.format import quantize_groups
from openmla.ops.index_logits_ragged import cost
from openmla.testing import Inputs

DI = 128


def job(n: int, S: int, B: int, HI: int, device: str) -> Job:
    """B requests of S keys each, of which the last n tokens are queries."""
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
    return Job(Inputs(tensors, {}, ("q_idx", "w_idx", "k_idx")), needed, checked(scored))


SHAPES = {
    "tiny-score-64-on-256": partial(job, 64, 256, 1, 8),
    "v32-score-8k": partial(job, 8192, 8192, 1, 64),
    "v32-score-4x2k": partial(job, 2048, 2048, 4, 64),
    "v32-score-2k-on-32k": partial(job, 2048, 32768, 1, 64),
    "v32-score-8k-on-128k": partial(job, 8192, 131072, 1, 64),
    "glm5-score-2k-on-32k": partial(job, 2048, 32768, 1, 32),
}
