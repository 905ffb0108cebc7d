"""Latent attention over listed rows: decode, prefill and two-segment shapes."""

from __future__ import annotations

from functools import partial

from openmla.bench.harness import Job, attended, checked, total
from openmla.ops.mqa_sparse import cost
from openmla.testing import SPARSE_SHAPES, SparseCase


def job(case: SparseCase, device: str) -> Job:
    tokens = case.tokens()
    needed = total(
        cost(
            sum(part.num_rows(position) for _, position in tokens),
            0 if number else len(tokens),  # queries are read once for all segments
            H=case.H, D=case.D, C=case.C, format=part.format, itemsize=case.dtype.itemsize,
        )
        for number, part in enumerate(case.parts)
    )  # fmt: skip
    return Job(case.make(device), needed, checked(attended))


SHAPES = {name: partial(job, case) for name, case in SPARSE_SHAPES.items()}
