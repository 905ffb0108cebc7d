"""A few kernels with the oldest Triton there is support for; other tests have the newest."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OLDEST = Path(sys.prefix) / "oldest-triton"
# One of every kind: what versions differ in is used by the last four.
CODE = """
import sys
import triton
from openmla.backends.requirements import REQUIRES, missing
from openmla.backends.triton._build import SHARED_MEMORY, builds_of, compile_build

assert triton.__version__.startswith(REQUIRES["triton"].oldest), triton.__version__
assert missing("triton") is None
for where, part, chip in (
    ("triton.merge_states", "", 90), ("triton.index_logits_ragged", "HI64", 90),
    ("triton.merge_quantize", "fp8_128-H16-V64", 90),
    # it widens e4m3 operands for this chip, which took more shared memory than there is
    ("triton.mha_ragged", "causal-E192-V128-fp8e4nv", 121),
    ("triton.mha_masked", "bits-E192-V128-fp8e4nv", 121),
    ("gluon.mqa_sparse", "many-heads-window", 90), ("gluon.mqa_sparse", "many-heads-slots", 90),
    ("gluon.mqa_sparse", "few-heads-slots-fp8_ds_mla-e4m3", 89),
    ("gluon.mha_ragged", "E192-V128-H128-causal-fp8e4nv", 90),
):
    builds = builds_of(*reversed(where.split(".")))
    build = next(b for b in builds if b.capability == chip and part in b.name)
    report = compile_build(build)
    assert report.scattered == 0, (build.name, report)
    assert report.spills <= 64 and report.shared <= SHARED_MEMORY[chip], (build.name, report)
    print(build.name, report)
"""


@pytest.mark.skipif(not OLDEST.exists(), reason="tools/setup_env.py puts the oldest Triton there")
def test_a_few_kernels_compile() -> None:
    path = os.pathsep.join([str(OLDEST), str(ROOT), os.environ.get("PYTHONPATH", "")])
    child = subprocess.run(
        [sys.executable, "-c", CODE],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert child.returncode == 0, child.stderr[-3000:]
    assert len(child.stdout.splitlines()) == 9
