"""Triton kernels on a machine without a GPU: compiled for real targets, run in the interpreter.

The interpreter and the compiler cannot share a process, so the contract tests of every op with a
Triton kernel run once more in one of their own, with "triton" as the only backend.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from openmla.backends import BACKENDS, Problem, why_not

pytest.importorskip("triton")
ROOT = Path(__file__).resolve().parents[2]
OPS = sorted(op for op, backends in BACKENDS.items() if "triton" in backends)
TARGETS = (80, 90, 120)  # the others are `openmla doctor --compile all`'s
SPILLS = 64  # bytes
# minutes in the interpreter, and nothing others do not show; all of it runs on a GPU
SLOW = (
    "(short-prefill or rejected_drafts or folded-1- or overlap-1- or speculative or near_scores"
    " or (folded-128 and tokens))"
)


def test_there_are_kernels() -> None:
    assert {"mqa_paged", "mqa_sparse"} <= set(OPS)
    reason = why_not(Problem("mqa_paged", format="bf16", D=576, C=512), "triton")
    assert reason == "runs on cuda, this is cpu"


def interpret(op: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"
    }  # fmt: skip
    command = [sys.executable, "-m", "pytest", "--no-header", "-p", "no:cacheprovider"]
    command += [f"tests/ops/test_{op}.py", "-k", f"triton and not {SLOW}", "--tb=short"]
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)


@pytest.fixture(scope="module")
def interpreted() -> Iterator[dict[str, Future[subprocess.CompletedProcess[str]]]]:
    """Two ops at a time: a process is busy with one thread."""
    with ThreadPoolExecutor(2) as pool:
        yield {op: pool.submit(interpret, op) for op in OPS}


@pytest.mark.parametrize("op", OPS)
def test_contract_in_the_interpreter(
    op: str, interpreted: dict[str, Future[subprocess.CompletedProcess[str]]]
) -> None:
    """All that the contract asks of a backend, kernel by kernel on CPU tensors."""
    run = interpreted[op].result()
    assert run.returncode == 0, run.stdout[-4000:]
    assert " passed" in run.stdout


def compiled(number: int) -> tuple[str, int, int, int, int]:
    """In a process of its own: kernels do not travel, numbers do."""
    from openmla.backends.triton._build import all_builds, compile_build

    build = list(all_builds())[number]
    report = compile_build(build)
    return build.name, build.capability, report.registers, report.spills, report.shared


def test_default_rows_compile() -> None:
    """Shared memory within each target's limit, hardly a spilled byte."""
    from openmla.backends.triton._build import SHARED_MEMORY, all_builds

    builds = [i for i, build in enumerate(all_builds()) if build.capability in TARGETS]
    assert len(builds) > 50
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        for name, target, registers, spills, shared in pool.map(compiled, builds):
            assert 0 < registers <= 255, (name, target)
            assert shared <= SHARED_MEMORY[target], (name, target, shared)
            assert spills <= SPILLS, (name, target, spills)
