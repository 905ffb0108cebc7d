"""Triton kernels on a machine without a GPU: compiled for real targets, run in the interpreter.

The interpreter and the compiler cannot share a process, so the contract tests of every op with a
Triton kernel run once more in one of their own, with "triton" as the only backend.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
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
    " or (folded-128 and tokens) or (has_its_own_bits and packed) or (tokens_once and v4)"
    " or (test_compress_kv and float16)"
    # what SM90's kernels of 64 heads are for, which are not interpreted: the same as fewer heads
    " or v3-prompt or v4-prompt or 33-heads or 100-heads"
    " or (own_bits and (cpu-64 or 64-heads)) or ((behind_a_window or large_or_small) and cpu-80)"
    " or cpu-200 or cpu-600 or every_time)"
)


def test_there_are_kernels() -> None:
    assert {"mqa_paged", "mqa_sparse"} <= set(OPS)
    reason = why_not(Problem("mqa_paged", format="bf16", D=576, C=512), "triton")
    assert reason == "runs on cuda, this is cpu"


@pytest.mark.parametrize("op", OPS)
def test_contract_in_the_interpreter(op: str) -> None:
    """All that the contract asks of a backend, kernel by kernel on CPU tensors."""
    environment = {
        **os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"
    }  # fmt: skip
    command = [sys.executable, "-m", "pytest", "--no-header", "-p", "no:cacheprovider"]
    command += [f"tests/ops/test_{op}.py", "-k", f"triton and not {SLOW}", "--tb=short"]
    run = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-1000:]
    assert " passed" in run.stdout


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("op", OPS)
def test_default_rows_compile(op: str, target: int) -> None:
    """Shared memory within each target's limit, hardly a spilled byte."""
    from openmla.backends.triton._build import SHARED_MEMORY, compile_build

    builds = import_module(f"openmla.backends.triton.{op}").builds()
    builds = [build for build in builds if build.capability == target]
    assert builds
    for build in builds:
        report = compile_build(build)
        assert 0 < report.registers <= 255, (build.name, report)
        assert report.shared <= SHARED_MEMORY[target], (build.name, report)
        assert report.spills <= SPILLS, (build.name, report)
        assert not report.in_turn, build.name
