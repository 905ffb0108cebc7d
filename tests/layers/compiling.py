"""A layer, or a model of them, inside torch.compile, and how many graphs that took."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo.backends.registry import lookup_backend


class Compiled:
    """Stands where the layer stood in a Server; tokens are marked as an engine marks them."""

    def __init__(self, layer: Any, backend: Any = "aot_eager", *, marked: bool = True) -> None:
        torch.compiler.reset()
        self.config, self.graphs, self.marked = layer.config, 0, marked
        compile_graph: Any = lookup_backend(backend)

        def counted(graph: fx.GraphModule, inputs: list[Any], **options: Any) -> Any:
            self.graphs += 1
            return compile_graph(graph, inputs, **options)

        self.run = torch.compile(layer, fullgraph=True, backend=counted)

    def __call__(self, hidden: Tensor, positions: Tensor, *caches_and_plans: Any) -> Tensor:
        if self.marked:
            for tokens in (hidden, positions):
                torch._dynamo.maybe_mark_dynamic(tokens, 0)
        out: Tensor = self.run(hidden, positions, *caches_and_plans)
        return out
