"""Attention over expanded keys and values with a bit mask: prefill and context-chunk shapes."""

from __future__ import annotations

from functools import partial

from openmla.bench.harness import Job, attended, checked, total
from openmla.ops.mha_masked import cost
from openmla.testing import MASKED_SHAPES, MaskedCase


def job(case: MaskedCase, device: str) -> Job:
    needed = total(
        cost(n, S, H=case.H, E=case.E, V=case.V, itemsize=case.dtype.itemsize)
        for n, S in zip(case.query_lens, case.key_lens, strict=True)
    )
    return Job(case.make(device), needed, checked(attended))


SHAPES = {name: partial(job, case) for name, case in MASKED_SHAPES.items()}
