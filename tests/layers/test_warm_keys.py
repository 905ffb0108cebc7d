"""After warmup() random steps ask for no other kernel, found without a GPU."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest

QUICK = ("dense", "sparse", "v4", "dense-odd", "sparse-packed")
SLOW = (
    "dense-fp8", "dense-many", "dense-packed", "dense-bf16", "sparse-fp8", "portable-bf16",
    "portable-fp8",
)  # fmt: skip


@pytest.mark.skipif(find_spec("triton") is None, reason="package triton is not installed")
@pytest.mark.parametrize(
    "models", [QUICK, pytest.param(SLOW, marks=pytest.mark.slow)], ids=["quick", "slow"]
)
def test_random_steps_ask_for_no_other_kernel(models: tuple[str, ...]) -> None:
    """In a process of its own: kernels are not launched there, which other tests would miss."""
    command = [sys.executable, "-m", "tests.layers.kernel_keys", *models]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" 0 new in ") == len(models), done.stdout + done.stderr
