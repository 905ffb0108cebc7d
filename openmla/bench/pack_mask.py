"""Pack selections of prefill tokens into bit masks, whole sequences and one chunk of them."""

from __future__ import annotations

from functools import partial

import torch

from openmla.bench.harness import Job, equal
from openmla.ops.pack_mask import cost
from openmla.testing import Inputs


def job(T: int, S: int, K: int, start: int, length: int, device: str) -> Job:
    """T queries at the end of S keys select K each; the mask covers `length` keys from `start`."""
    generator = torch.Generator().manual_seed(0)
    positions = torch.full((T, K), -1, dtype=torch.int32)
    for t in range(T):
        chosen = torch.randperm(S - T + t + 1, generator=generator)[:K]
        positions[t, : len(chosen)] = chosen.int()
    num_words = -(-length // 32)
    tensors = {
        "topk_positions": positions.to(device),
        "key_starts": torch.full((T,), start, dtype=torch.int32, device=device),
        "key_lens": torch.full((T,), length, dtype=torch.int32, device=device),
    }
    inputs = Inputs(tensors, {"num_words": num_words}, ())
    return Job(inputs, cost(T, K=K, num_words=num_words), equal())


SHAPES = {
    "tiny-64-k64": partial(job, 64, 256, 64, 0, 256),
    "v32-prefill-4k": partial(job, 4096, 4096, 2048, 0, 4096),
    "v32-prefill-8k": partial(job, 8192, 8192, 2048, 0, 8192),
    "v32-chunk-2k-on-32k": partial(job, 2048, 32768, 2048, 8192, 8192),
}
