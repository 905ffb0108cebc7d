"""What tests of ops share: run or skip, compare with the reference, break arguments, read bytes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from openmla.backends import BACKENDS
from openmla.errors import UnsupportedError
from openmla.testing import Inputs, assert_within_budget, budget_used

# FlashMLA sums 576 columns in one chain, which tensor cores truncate: 1.11 to 1.36 of lse's budget
# in four cases on an H200. Its kernels are not ours to mend.
LSE_SLACK = {"flashmla": 1.5}
TRITON = pytest.param("triton", marks=pytest.mark.triton)
GLUON = pytest.param("gluon", marks=pytest.mark.gluon)


def backends(op: str) -> list[Any]:
    """An op's backends to parametrise a test with."""
    marked: dict[str, Any] = {"gluon": GLUON, "triton": TRITON}
    return [marked.get(name, name) for name in BACKENDS[op]]


def slow_interpreted(cases: Sequence[Any], slow: Collection[str]) -> list[Any]:
    """Cases to parametrise a test with, of which Triton's interpreter leaves out those named."""
    assert set(slow) <= {str(case) for case in cases}, "a case that is not there"
    mark = pytest.mark.slow_interpreted
    return [pytest.param(case, marks=mark if str(case) in slow else ()) for case in cases]


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
    assert all(part.is_contiguous() for part in (*actual, *peer))  # compiled graphs rely on it
    used = budget_used(actual, exact, peer)
    if used.lse > LSE_SLACK.get(backend, 1.0) or used.out > 1:
        assert_within_budget(actual, exact, peer)  # says what errs


def check_e4m3(op: Callable[..., Any], inputs: Inputs, backend: str) -> None:
    """The contract with e4m3 queries: over fp8 rows tensor cores add their products up in fewer
    bits than the interpreter and the reference do. Over packed rows queries are widened."""
    actual = run_or_skip(op, inputs, backend)
    exact = inputs.double().run(op, backend="reference")
    peer = inputs.run(op, backend="reference")
    assert actual[0].dtype == peer[0].dtype == torch.bfloat16
    assert actual[1].dtype == peer[1].dtype == torch.float32
    assert all(part.is_contiguous() for part in (*actual, *peer))
    scalars = inputs.scalars
    formats = {part[0] for part in scalars.get("segments", [(scalars.get("format"),)])}
    columns = inputs["q_latent"].shape[-1] if actual[0].is_cuda and formats == {"fp8"} else 0
    used = budget_used(actual, exact, peer, columns)
    assert max(used) <= 1, f"errs {used.out:.2f} and {used.lse:.2f} times its budget"


def broken(base: Inputs, **changes: Any) -> Inputs:
    """Inputs with one argument replaced, or a tensor changed by a function of itself."""
    tensors, scalars = dict(base.tensors), dict(base.scalars)
    for name, change in changes.items():
        if name in tensors:
            tensors[name] = change(tensors[name])
        else:
            scalars[name] = change
    return Inputs(tensors, scalars, base.widen)


def put(index: tuple[int, ...], value: int) -> Callable[[Tensor], Tensor]:
    """A change for broken(): one element."""

    def change(tensor: Tensor) -> Tensor:
        tensor = tensor.clone()
        tensor[index] = value
        return tensor

    return change


def page_bytes(cache: Tensor) -> Tensor:
    """A copy of every byte of the allocation under a cache view, padding included."""
    whole = torch.as_strided(cache, (cache.shape[0], cache.stride(0)), (cache.stride(0), 1))
    return whole.clone().view(torch.uint8).cpu()
