"""Gather rows of a paged cache into a workspace, for every format."""

from __future__ import annotations

import random
from functools import partial

import torch

from openmla.bench.harness import Job, equal
from openmla.ops.cache_gather import cost
from openmla.testing import LATENT_FORMATS, Inputs, paged_rows, start_loc

BS, D = 64, 576


def job(lens: tuple[int, ...], format: str, device: str) -> Job:
    kv_scale = torch.tensor(0.1, device=device)
    rows = [torch.randn(S, D, device=device) for S in lens]
    cache, table = paged_rows(
        rows, D=D, format=format, kv_scale=kv_scale, BS=BS, rng=random.Random(0)
    )
    tensors = {
        "out": torch.zeros(sum(lens), D, dtype=torch.bfloat16, device=device),
        "cache": cache,
        "kv_scale": kv_scale,
        "block_table": table,
        "starts": torch.zeros(len(lens), dtype=torch.int32, device=device),
        "row_start_loc": start_loc(lens, device),
    }
    needed = cost(sum(lens), D=D, format=format, itemsize=2)
    return Job(Inputs(tensors, {"format": format}, ()), needed, equal("out"))


SHAPES = {
    f"{size}-{format}": partial(job, lens, format)
    for size, lens in (("tiny-2x100", (100,) * 2), ("v3-context-8x8k", (8192,) * 8))
    for format in LATENT_FORMATS
}
