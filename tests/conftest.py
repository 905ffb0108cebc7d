"""Shared set-up: the CPU's bf16 switch, devices, poisoned allocations."""

from __future__ import annotations

import os

# Before torch loads: on CPUs whose AMX is masked, oneDNN's bf16 kernels die otherwise. A cap that
# is no use elsewhere does no harm there.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

if os.environ.get("TRITON_INTERPRET") == "1":
    import triton  # noqa: F401 - kernels run on CPU tensors then, which is known once it is loaded

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import settings

from openmla.testing import poisoned_memory

if TYPE_CHECKING:
    from tests.parallel.processes import Processes

# The same examples every time, so that a red run can be repeated. To search for new ones:
# HYPOTHESIS_PROFILE=search python -m pytest
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("search", max_examples=3000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

DEVICES: list[Any] = ["cpu"]
if torch.cuda.is_available():
    DEVICES.append(pytest.param("cuda", marks=pytest.mark.gpu))


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(autouse=True)
def inference_with_poison() -> Iterator[None]:
    """Every test runs as users are told to run, on memory that starts as NaN."""
    with torch.inference_mode(), poisoned_memory():
        yield


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Processes]:
    """Two ranks for all tests: starting them takes longer than most of what they do."""
    from tests.parallel.processes import Processes

    ranks = Processes(2)
    yield ranks
    ranks.close()
