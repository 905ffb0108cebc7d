"""Top-k positions of rows of scores, at decode and prefill widths."""

from __future__ import annotations

from functools import partial

import torch

from openmla.bench.harness import Job, Op
from openmla.ops.index_topk import cost
from openmla.testing import Inputs


def check(op: Op, inputs: Inputs, backend: str) -> float:
    """One set per row, in any order, so the result is exact or wrong."""
    positions, lens = inputs.run(op, backend=backend)
    wanted, wanted_lens = inputs.run(op, backend="reference")
    K = positions.shape[1]
    padded = torch.arange(K, device=lens.device) >= lens[:, None]
    same = torch.equal(lens, wanted_lens) and bool((positions[padded] == -1).all())
    same &= torch.equal(positions.sort(dim=1).values, wanted.sort(dim=1).values)
    return 0.0 if same else float("inf")


def job(T: int, S: int, K: int, shortest: int, device: str, *, ties: bool = False) -> Job:
    """The first of T rows has `shortest` columns, the last one all S."""
    generator = torch.Generator(device).manual_seed(0)
    logits = torch.randn(T, S, generator=generator, device=device)
    if ties:
        logits = logits.mul_(2).round_()  # a dozen distinct values: the cutoff has ties
    row_lens = torch.linspace(shortest, S, T, device=device).round().int()
    if T == 1:
        row_lens.fill_(S)
    row_starts = torch.zeros_like(row_lens)
    tensors = {"logits": logits, "row_starts": row_starts, "row_lens": row_lens}
    needed = cost(T, int(row_lens.sum()), K=K)
    return Job(Inputs(tensors, {"K": K}, ()), needed, check)


SHAPES = {
    "tiny-decode-b4-s1k": partial(job, 4, 1000, 64, 1000),
    "tiny-ties-b4-s1k": partial(job, 4, 1000, 64, 1000, ties=True),
    "v32-decode-b1-s128k": partial(job, 1, 131072, 2048, 131072),
    "v32-decode-b64-s8k": partial(job, 64, 8192, 2048, 8192),
    "v32-decode-b64-s64k": partial(job, 64, 65536, 2048, 65536),
    "v32-ties-b64-s64k": partial(job, 64, 65536, 2048, 65536, ties=True),
    "v32-prefill-8k": partial(job, 8192, 8192, 2048, 1),
    "v32-score-2k-on-128k": partial(job, 2048, 131072, 2048, 129025),
}
