"""FlashMLA itself in CUDA graphs, where each token's number of rows changes between replays.

What each call computes is in the contract tests of mqa_sparse.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from openmla.ops import mqa_sparse
from openmla.testing import SparseCase
from tests.ops.mqa_sparse_cases import FAR, NEAR, PACKED, V4

NEEDED = pytest.mark.skipif(
    not torch.cuda.is_available() or find_spec("flash_mla") is None,
    reason="needs a GPU and the package flash_mla",
)


def captured(step: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    return graph, out


@pytest.mark.gpu
@NEEDED
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("kind", ["packed", "v4"])
def test_rows_change_between_replays(kind: str, early: bool) -> None:
    """With a schedule that is kept already, and with one that is the graph's own."""
    tokens = 5 if early else 6  # shapes of their own, or the first test would be early
    case = SparseCase("packed", (1,) * tokens, (700,) * tokens, PACKED, H=64, C=512, R=64,
                      contiguous=True)  # fmt: skip
    if kind == "v4":
        case = SparseCase("v4", (1,) * tokens, (2000,) * tokens, NEAR, FAR, H=128, **V4)
    inputs = case.make("cuda")

    def run(backend: str) -> Any:
        return inputs.run(mqa_sparse, backend=backend)

    if early:
        run("flashmla")
    else:
        import flash_mla  # noqa: F401 - it loads libraries, which a capture forbids
    graph, found = captured(lambda: run("flashmla"))
    lens = inputs["row_lens" if kind == "packed" else "row_lens_2"]
    for kept in (300, 70, 0, 1):
        lens.clamp_(max=kept)
        graph.replay()
        out, lse = run("reference")
        torch.testing.assert_close(found[1], lse, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(found[0], out, rtol=3e-2, atol=3e-2)
