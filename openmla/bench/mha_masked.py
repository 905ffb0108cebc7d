"""Attention over expanded keys and values with a bit mask: prefill and context-chunk shapes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from openmla.bench.harness import Job, main
from openmla.ops import mha_masked
from openmla.ops._register import Cost
from openmla.ops.mha_masked import cost
from openmla.testing import MASKED_SHAPES, Inputs, MaskedCase, budget_used


def check(inputs: Inputs, backend: str) -> float:
    actual = inputs.run(mha_masked, backend=backend)
    exact = inputs.double().run(mha_masked, backend="reference")
    return max(budget_used(actual, exact, inputs.run(mha_masked, backend="reference")))


def job(case: MaskedCase, device: str) -> Job:
    needed = [
        cost(n, S, H=case.H, E=case.E, V=case.V, itemsize=case.dtype.itemsize)
        for n, S in zip(case.query_lens, case.key_lens, strict=True)
    ]
    total = Cost(sum(each.bytes for each in needed), sum(each.flops for each in needed))
    return Job(case.make(device), total, check)


def run(arguments: Sequence[str] | None = None) -> None:
    main(arguments, mha_masked, {name: partial(job, case) for name, case in MASKED_SHAPES.items()})


if __name__ == "__main__":
    run()
