"""Latent attention over listed rows: decode, prefill and two-segment shapes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from openmla.bench.harness import Job, main
from openmla.ops import mqa_sparse
from openmla.ops._register import Cost
from openmla.ops.mqa_sparse import cost
from openmla.testing import SPARSE_SHAPES, Inputs, SparseCase, budget_used


def check(inputs: Inputs, backend: str) -> float:
    actual = inputs.run(mqa_sparse, backend=backend)
    exact = inputs.double().run(mqa_sparse, backend="reference")
    return max(budget_used(actual, exact, inputs.run(mqa_sparse, backend="reference")))


def job(case: SparseCase, device: str) -> Job:
    tokens = case.tokens()
    needed = [
        cost(
            sum(part.num_rows(position) for _, position in tokens),
            0 if number else len(tokens),  # queries are read once for all segments
            H=case.H,
            D=case.D,
            C=case.C,
            format=part.format,
            itemsize=case.dtype.itemsize,
        )
        for number, part in enumerate(case.parts)
    ]
    total = Cost(sum(each.bytes for each in needed), sum(each.flops for each in needed))
    return Job(case.make(device), total, check)


def run(arguments: Sequence[str] | None = None) -> None:
    main(arguments, mqa_sparse, {name: partial(job, case) for name, case in SPARSE_SHAPES.items()})


if __name__ == "__main__":
    run()
