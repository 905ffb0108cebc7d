"""Test cases, poisoned memory and error budgets for ops, also for integrators.

    inputs = PagedCase("mine", query_lens=(1, 4), seq_lens=(70, 9)).make("cuda")
    actual = inputs.run(mqa_paged, backend="mine")      # before the reference, see below
    exact = inputs.double().run(mqa_paged, backend="reference")
    peer = inputs.run(mqa_paged, backend="reference")
    assert_within_budget(actual, exact, peer)

The op under test runs first, so that it cannot read the right answer from reused memory.
"""

from openmla.testing.budgets import (
    Attended,
    Budget,
    assert_within_budget,
    budget_used,
    lse_budget,
    out_budget,
)
from openmla.testing.cases import (
    GARBAGE_BLOCK,
    INDEX_FORMATS,
    LATENT_FORMATS,
    PAGED_SHAPES,
    RAGGED_SHAPES,
    Inputs,
    PagedCase,
    RaggedCase,
    paged_rows,
    start_loc,
)
from openmla.testing.memory import poison, poisoned_memory, strided
from openmla.testing.sparse_cases import (
    MASKED_SHAPES,
    SPARSE_SHAPES,
    MaskedCase,
    SegmentCase,
    SparseCase,
    SparseInputs,
)

__all__ = [
    "GARBAGE_BLOCK",
    "INDEX_FORMATS",
    "LATENT_FORMATS",
    "MASKED_SHAPES",
    "PAGED_SHAPES",
    "RAGGED_SHAPES",
    "SPARSE_SHAPES",
    "Attended",
    "Budget",
    "Inputs",
    "MaskedCase",
    "PagedCase",
    "RaggedCase",
    "SegmentCase",
    "SparseCase",
    "SparseInputs",
    "assert_within_budget",
    "budget_used",
    "lse_budget",
    "out_budget",
    "paged_rows",
    "poison",
    "poisoned_memory",
    "start_loc",
    "strided",
]
