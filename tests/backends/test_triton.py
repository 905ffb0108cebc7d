"""Triton kernels on a machine without a GPU: compiled for real targets, run in the interpreter.

The interpreter and the compiler cannot share a process, so the contract tests of all ops with a
Triton kernel run once more in others, with "triton" as the only backend. What would take minutes
there is marked slow_interpreted and runs on a GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from openmla.backends import BACKENDS, Problem, why_not
from tools.gpu_tests import PART_OF

pytest.importorskip("triton")
ROOT = Path(__file__).resolve().parents[2]
OPS = sorted(op for op, backends in BACKENDS.items() if "triton" in backends)
OTHERS = (80, 121)  # the oldest and the newest; the rest are `openmla doctor --compile all`'s
SPILLS = 64  # bytes
PARTS = 3  # of the contract tests: a process each, which takes seconds to start


def test_there_are_kernels() -> None:
    assert {"mqa_paged", "mqa_sparse"} <= set(OPS)
    reason = why_not(Problem("mqa_paged", format="bf16", D=576, C=512), "triton")
    assert reason == "runs on cuda, this is cpu"


@pytest.mark.parametrize("part", range(PARTS))
def test_contracts_in_the_interpreter(part: int) -> None:
    """All that the contracts ask of a backend, kernel by kernel on CPU tensors."""
    environment = {
        **os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1",
        PART_OF: f"{part}/{PARTS}",
    }  # fmt: skip
    command = [sys.executable, "-m", "pytest", "--no-header", "-p", "no:cacheprovider"]
    command += ["-p", "tools.gpu_tests", "tests/ops", "--tb=short"]
    command += ["-m", "triton and not slow_interpreted"]
    run = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-1000:]
    assert " passed" in run.stdout


def assert_compiles(build: Any) -> None:
    """Shared memory within its target's limit, hardly a spilled byte, products that overlap,
    reductions over neighbouring lanes."""
    from openmla.backends.triton._build import SHARED_MEMORY, compile_build

    report = compile_build(build)
    assert 0 < report.registers <= 255, (build.name, report)
    assert report.shared <= SHARED_MEMORY[build.capability], (build.name, report)
    assert report.spills <= SPILLS, (build.name, report)
    assert not report.serialized, build.name
    assert report.scattered == 0, build.name


def builds_of(op: str, target: int) -> list[Any]:
    from openmla.backends.triton import _build

    there = [backend for backend in _build.COMPILED if backend in BACKENDS[op]]
    builds = chain(*(_build.builds_of(op, name) for name in there))
    return [build for build in builds if build.capability == target]


@pytest.mark.parametrize("op", OPS)
def test_rows_compile_for_the_gpu_they_were_measured_on(op: str) -> None:
    builds = builds_of(op, 90)
    assert builds
    for build in builds:
        assert_compiles(build)


@pytest.mark.parametrize("op", OPS)
def test_one_row_compiles_for_others(op: str) -> None:
    for target in OTHERS:
        assert_compiles(builds_of(op, target)[0])


@pytest.mark.parametrize("op", OPS)
def test_sm_121_has_the_builds_of_sm_120(op: str) -> None:
    """By name and constants: the chips differ in their number of multiprocessors."""
    builds = [
        [(build.name, build.constants, build.num_warps, build.num_stages) for build in found]
        for found in (builds_of(op, 120), builds_of(op, 121))
    ]
    assert builds[0] and builds[0] == builds[1]


def test_top_k_fits_in_registers_on_amd() -> None:
    from openmla.backends.triton._build import GFX942, compile_build

    builds = builds_of("index_topk", GFX942)
    assert {build.constants["BLOCK"] for build in builds} == {4096, 8192}
    assert [compile_build(build).spills for build in builds] == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("target", OTHERS)
@pytest.mark.parametrize("op", OPS)
def test_all_rows_compile_for_others(op: str, target: int) -> None:
    for build in builds_of(op, target):
        assert_compiles(build)
