"""FlashMLA itself in CUDA graphs: at every replay schedules are the step's, as lengths are then.

What each call computes is in the contract tests of mqa_paged and mqa_sparse.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

from openmla.ops import mqa_paged, mqa_sparse
from openmla.testing import PagedCase, SparseCase
from tests.ops.mqa_sparse_cases import FAR, NEAR, PACKED, V4

NEEDED = pytest.mark.skipif(
    not torch.cuda.is_available() or find_spec("flash_mla") is None,
    reason="needs a GPU and the package flash_mla",
)
LAYERS = 3


class Layers:
    """A dense step over several caches, and what the reference makes of it."""

    def __init__(self, new: int) -> None:
        case = PagedCase(
            "layers", (new,) * 20, tuple(range(90, 2090, 100)), H=64, C=512, R=64, BS=64,
            contiguous=True,
        )  # fmt: skip
        with torch.inference_mode(False):
            inputs = case.make("cuda")
            self.tensors = {name: tensor.clone() for name, tensor in inputs.tensors.items()}
            self.caches = [inputs["cache"].contiguous().clone() for _ in range(LAYERS)]
            for layer, cache in enumerate(self.caches):
                cache.mul_(1 + layer / 4)
        self.scalars = inputs.scalars

    def run(self, backend: str) -> list[tuple[Tensor, Tensor]]:
        found = []
        for cache in self.caches:
            arguments = {**self.tensors, "cache": cache}
            found.append(mqa_paged(*arguments.values(), **self.scalars, backend=backend))
        return found

    def check(self, found: list[tuple[Tensor, Tensor]]) -> None:
        for (out, lse), (wanted, wanted_lse) in zip(found, self.run("reference"), strict=True):
            torch.testing.assert_close(lse, wanted_lse, rtol=1e-3, atol=1e-3)
            torch.testing.assert_close(out, wanted, rtol=3e-2, atol=3e-2)


def captured(step: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    return graph, out


@pytest.mark.gpu
@NEEDED
@pytest.mark.parametrize("new", [1, 2])
def test_lengths_change_between_replays(new: int) -> None:
    layers = Layers(new)
    layers.check(layers.run("flashmla"))
    graphs = [captured(lambda: layers.run("flashmla")) for _ in range(2)]
    lens = layers.tensors["seq_lens"]
    for shorter in (0, 63, 1):  # the first has 90
        lens.sub_(shorter).clamp_(min=new)
        for graph, found in graphs:
            graph.replay()
            layers.check(found)
        layers.check(layers.run("flashmla"))
    lens.copy_(lens.flip(0).clamp(max=90))
    for graph, found in reversed(graphs):
        graph.replay()
        layers.check(found)


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
