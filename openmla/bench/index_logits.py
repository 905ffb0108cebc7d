"""Indexer scores over a paged cache: decode and verification shapes."""

from __future__ import annotations

import random
from functools import partial
from typing import NamedTuple

import torch

from openmla.bench.harness import Job, checked, scored
from openmla.ops.index_logits import cost
from openmla.testing import Inputs, paged_rows, start_loc

BS, DI = 64, 128


class Size(NamedTuple):
    """B requests of n tokens each, causal over S keys."""

    B: int
    n: int
    S: int
    HI: int
    K: int = 2048  # for index_select
    format: str = "index_fp8"
    dtype: torch.dtype = torch.float8_e4m3fn

    def row_lens(self) -> list[int]:
        return [self.S - self.n + i + 1 for i in range(self.n)] * self.B

    def make(self, device: str) -> Inputs:
        generator = torch.Generator(device).manual_seed(0)
        T = self.B * self.n
        keys = [torch.randn(self.S, DI, generator=generator, device=device) for _ in range(self.B)]
        cache, table = paged_rows(
            keys, D=DI, format=self.format, kv_scale=torch.ones((), device=device), BS=BS,
            rng=random.Random(0), page_padding=0,
        )  # fmt: skip
        q_idx = torch.randn(T, self.HI, DI, generator=generator, device=device)
        w_idx = torch.randn(T, self.HI, generator=generator, device=device)
        tensors = {
            "q_idx": q_idx.to(self.dtype),
            "w_idx": w_idx * (self.HI * DI) ** -0.5,
            "cache": cache,
            "block_table": table,
            "query_start_loc": start_loc((self.n,) * self.B, device),
            "row_lens": torch.tensor(self.row_lens(), dtype=torch.int32, device=device),
        }
        scalars = {"format": self.format, "num_keys": self.S}
        return Inputs(tensors, scalars, ("q_idx", "w_idx"))


SIZES = {
    "tiny-decode-b4-s256": Size(4, 1, 256, 8, K=64),
    "tiny-verify2-b2-s200-bf16": Size(2, 2, 200, 8, 32, "index_bf16", torch.bfloat16),
    "v32-decode-b1-s128k": Size(1, 1, 131072, 64),
    "v32-decode-b64-s8k": Size(64, 1, 8192, 64),
    "v32-decode-b64-s64k": Size(64, 1, 65536, 64),
    "v32-decode-b64-s64k-bf16": Size(64, 1, 65536, 64, 2048, "index_bf16", torch.bfloat16),
    "v32-verify2-b32-s64k": Size(32, 2, 65536, 64),
    "v32-prefill-2k-s64k": Size(1, 2048, 65536, 64),
    "glm5-decode-b64-s64k": Size(64, 1, 65536, 32),
}


def job(size: Size, device: str) -> Job:
    needed = cost((size.n,) * size.B, size.row_lens(), HI=size.HI, DI=DI, format=size.format)
    return Job(size.make(device), needed, checked(scored))


SHAPES = {name: partial(job, size) for name, size in SIZES.items()}
