"""What every contract test does: skip with a reason, run the op first, then the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from openmla.errors import UnsupportedError
from openmla.testing import Inputs, assert_within_budget


def run_or_skip(op: Callable[..., Any], inputs: Inputs, backend: str) -> Any:
    """Run a named backend; what it cannot do is a skip with its own sentence."""
    try:
        return inputs.run(op, backend=backend)
    except UnsupportedError as reason:
        pytest.skip(str(reason).splitlines()[1].strip())


def check_attention(op: Callable[..., Any], inputs: Inputs, backend: str) -> None:
    """The contract of an op that returns (out, lse)."""
    actual = run_or_skip(op, inputs, backend)
    exact = inputs.double().run(op, backend="reference")
    peer = inputs.run(op, backend="reference")
    assert actual[0].dtype == peer[0].dtype and actual[1].dtype == peer[1].dtype
    assert_within_budget(actual, exact, peer)
