"""Latent attention over a paged cache: decode and verification shapes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from openmla.bench.harness import Job, main
from openmla.ops import mqa_paged
from openmla.ops.mqa_paged import cost
from openmla.testing import PAGED_SHAPES, Inputs, PagedCase, budget_used


def check(inputs: Inputs, backend: str) -> float:
    actual = inputs.run(mqa_paged, backend=backend)
    exact = inputs.double().run(mqa_paged, backend="reference")
    return max(budget_used(actual, exact, inputs.run(mqa_paged, backend="reference")))


def job(case: PagedCase, device: str) -> Job:
    needed = cost(
        case.query_lens,
        case.seq_lens,
        H=case.H,
        D=case.C + case.R,
        C=case.C,
        format=case.format,
        itemsize=case.dtype.itemsize,
        causal=case.causal,
    )
    return Job(case.make(device), needed, check)


def run(arguments: Sequence[str] | None = None) -> None:
    main(arguments, mqa_paged, {name: partial(job, case) for name, case in PAGED_SHAPES.items()})


if __name__ == "__main__":
    run()
