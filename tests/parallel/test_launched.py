"""Under torchrun, and by device meshes: tiny V3, V3.2 and V4 generate the tokens of one process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

ROOT = Path(__file__).parents[2]


def launched(*program: str) -> str:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*launcher, "--nproc-per-node", "2", *program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_models_under_torchrun() -> None:
    said = launched("-m", "tests.parallel.launched")
    for kind in ("dense", "sparse", "v4"):
        for rank in (0, 1):
            assert f"rank {rank} of 2: {kind} True" in said


@pytest.mark.slow
def test_the_example_under_torchrun() -> None:
    said = launched("examples/two_ranks.py")
    for rank in (0, 1):
        assert f"rank {rank} of 2: 20 tokens after 300, tokens the same as alone" in said
