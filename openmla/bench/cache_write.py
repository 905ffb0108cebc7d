"""Write rows into a paged cache, for every format."""

from __future__ import annotations

from functools import partial

import torch

from openmla.bench.harness import Job, equal
from openmla.bench.inputs import blank_cache
from openmla.ops.cache_write import cost
from openmla.testing import LATENT_FORMATS, Inputs

BS, C, R = 64, 512, 64


def job(T: int, format: str, device: str) -> Job:
    slots = torch.randperm(2 * T, device=device)[:T]
    rows = torch.randn(T, C + R, device=device).bfloat16()
    tensors = {
        "cache": blank_cache(2 * T, BS, format, C + R, device),
        "kv_c": rows[:, :C],
        "k_pe": rows[:, C:],
        "slot_mapping": slots,
        "kv_scale": torch.tensor(0.1, device=device),
    }
    needed = cost(T, D=C + R, format=format, itemsize=2)
    return Job(Inputs(tensors, {"format": format}, ()), needed, equal("cache"))


SHAPES = {
    f"{size}-{format}": partial(job, T, format)
    for size, T in (("tiny-64", 64), ("v3-decode-128", 128), ("v3-prefill-8k", 8192))
    for format in LATENT_FORMATS
}
