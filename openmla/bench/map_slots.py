"""Map positions to slots: one rank and eight, columns kept in place or moved to the front."""

from __future__ import annotations

from functools import partial

import torch

from openmla.bench.harness import Job, equal
from openmla.ops.map_slots import cost
from openmla.testing import Inputs, start_loc

BS = 64


def job(B: int, n: int, K: int, S: int, cp_size: int, device: str) -> Job:
    """K positions for each of n tokens of B requests with S keys, on the last of some ranks."""
    generator = torch.Generator(device).manual_seed(0)
    M = -(-S // (BS * cp_size))
    order = torch.randperm(B * M, generator=generator, device=device)
    picked = torch.randint(-1, S, (B * n, K), generator=generator, device=device)
    tensors = {
        "positions": picked.int(),
        "block_table": order.int().view(B, M),
        "query_start_loc": start_loc((n,) * B, device),
    }
    scalars = {
        "BS": BS,
        "num_blocks": B * M,
        "cp_size": cp_size,
        "cp_rank": cp_size - 1,
        "compact": cp_size > 1,
    }
    return Job(Inputs(tensors, scalars, ()), cost(B * n, K=K), equal())


SHAPES = {
    "tiny-decode-b4-k64": partial(job, 4, 1, 64, 1000, 1),
    "tiny-cp2-decode-b4-k64": partial(job, 4, 1, 64, 1000, 2),
    "v32-decode-b64-s64k": partial(job, 64, 1, 2048, 65536, 1),
    "v32-cp8-decode-b64-s64k": partial(job, 64, 1, 2048, 65536, 8),
    "v32-verify2-b32-s64k": partial(job, 32, 2, 2048, 65536, 1),
    "v32-prefill-8k": partial(job, 1, 8192, 2048, 8192, 1),
}
