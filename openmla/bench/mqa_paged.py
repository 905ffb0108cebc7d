"""Latent attention over a paged cache: decode and verification shapes."""

from __future__ import annotations

from functools import partial

from openmla.bench.harness import Job, attended, checked
from openmla.ops.mqa_paged import cost
from openmla.testing import PAGED_SHAPES, PagedCase


def job(case: PagedCase, device: str) -> Job:
    needed = cost(
        case.query_lens, case.seq_lens, H=case.H, D=case.C + case.R, C=case.C, format=case.format,
        itemsize=case.dtype.itemsize, causal=case.causal,
    )  # fmt: skip
    return Job(case.make(device), needed, checked(attended))


SHAPES = {name: partial(job, case) for name, case in PAGED_SHAPES.items()}
