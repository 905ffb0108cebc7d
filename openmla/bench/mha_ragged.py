"""Attention over expanded keys and values: prefill and context-chunk shapes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from openmla.bench.harness import Job, main
from openmla.ops import mha_ragged
from openmla.ops.mha_ragged import cost
from openmla.testing import RAGGED_SHAPES, Inputs, RaggedCase, budget_used


def check(inputs: Inputs, backend: str) -> float:
    actual = inputs.run(mha_ragged, backend=backend)
    exact = inputs.double().run(mha_ragged, backend="reference")
    return max(budget_used(actual, exact, inputs.run(mha_ragged, backend="reference")))


def job(case: RaggedCase, device: str) -> Job:
    needed = cost(
        case.query_lens,
        case.key_lens,
        H=case.H,
        E=case.E,
        V=case.V,
        itemsize=case.dtype.itemsize,
        causal=case.causal,
    )
    return Job(case.make(device), needed, check)


def run(arguments: Sequence[str] | None = None) -> None:
    main(arguments, mha_ragged, {name: partial(job, case) for name, case in RAGGED_SHAPES.items()})


if __name__ == "__main__":
    run()
