"""Steps of every kind give the bits that were recorded, on CPUs that compute like the recording.

On other CPUs, or with another torch, results only have to be near. After an intended change of
results, `python -m tests.corpus.record` writes the recording anew.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch

from tests.corpus.cases import (
    ALONE,
    ON_GPU,
    OVER_RANKS,
    RECORDED_ON_GPU,
    load,
    run_alone,
    run_on_gpu,
    run_over_ranks,
)
from tests.corpus.common import Summary, describe_gpu, differences, probe, summarize
from tests.parallel.processes import Processes


@lru_cache
def recorded() -> dict[str, Any]:
    return load()


@lru_cache
def computes_alike() -> bool:
    return bool(probe() == recorded()["probe"])


def check(name: str, found: Summary) -> None:
    exact = computes_alike()
    problems = differences(found, recorded()["cases"][name], exact=exact)
    assert not problems, "\n".join([f"{name}, {'bits' if exact else 'values'} differ:", *problems])


@pytest.mark.parametrize("name", ALONE)
def test_steps_of_one_process(name: str) -> None:
    check(name, run_alone(name))


@pytest.mark.parametrize("name", OVER_RANKS)
def test_steps_over_two_ranks(name: str, two_ranks: Processes) -> None:
    check(name, run_over_ranks(name, two_ranks))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ON_GPU)
def test_steps_on_a_gpu(name: str) -> None:
    """Bits of the GPU and the versions of the recording, else values near them."""
    kept = load(RECORDED_ON_GPU)
    exact = describe_gpu() == kept["probe"]
    assert not differences(run_on_gpu(name), kept["cases"][name], exact=exact)


def test_every_recorded_case_runs() -> None:
    assert set(recorded()["cases"]) == {*ALONE, *OVER_RANKS}
    assert set(load(RECORDED_ON_GPU)["cases"]) == set(ON_GPU)


def test_a_recording_is_near_itself_and_not_near_another() -> None:
    """The comparison where bits do not count: small differences pass, others do not."""
    values = torch.linspace(-1, 1, 12).view(3, 4)
    kept = summarize({"out": values, "lens": torch.arange(3)})
    near = summarize({"out": values * (1 + 1e-5), "lens": torch.arange(3)})
    assert not differences(near, kept, exact=False)
    assert differences(near, kept, exact=True)
    for other in (values * 1.01, values[:2], values.masked_fill(values > 0.9, torch.nan)):
        far = summarize({"out": other, "lens": torch.arange(3)})
        assert differences(far, kept, exact=False)
    moved = summarize({"out": values, "lens": torch.arange(1, 4)})
    assert differences(moved, kept, exact=False)
    assert differences(summarize({"out": values}), kept, exact=False)
