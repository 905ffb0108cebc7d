"""Attention over expanded keys and values: prefill and context-chunk shapes."""

from __future__ import annotations

from functools import partial

from openmla.bench.harness import Job, attended, checked
from openmla.ops.mha_ragged import cost
from openmla.testing import RAGGED_SHAPES, RaggedCase


def job(case: RaggedCase, device: str) -> Job:
    needed = cost(
        case.query_lens, case.key_lens, H=case.H, E=case.E, V=case.V,
        itemsize=case.dtype.itemsize, causal=case.causal,
    )  # fmt: skip
    return Job(case.make(device), needed, checked(attended))


SHAPES = {name: partial(job, case) for name, case in RAGGED_SHAPES.items()}
