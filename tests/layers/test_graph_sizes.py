"""Graphs of several sizes over one set of plan buffers, replayed in any order.

On a GPU they are CUDA graphs; on a CPU each size's first plan is used again, over what the buffers
hold then.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from openmla import make_plan, plan_buffers, slice_buffers
from tests.layers.engine import KINDS, NAMES, assert_true, describe, make_setting, tokens_of
from tests.layers.serving import record

pytest.importorskip("transformers")
SIZES = (1, 2, 4, 8)  # requests
EACH = 2  # tokens of a request at most
STEPS = [
    [("a", 1)],
    [("h", 1), ("g", 2), ("f", 1), ("e", 1), ("d", 2), ("c", 1), ("b", 1), ("a", 2)],
    [("b", 2), ("c", 1), ("a", 1)],
    [("d", 2)],
    [("e", 1), ("f", 2)],
    [("a", 2), ("b", 1), ("c", 2), ("d", 1), ("e", 2)],
    [("g", 1), ("h", 2)],
    [("a", 1), ("e", 0), ("h", 1), ("b", 1)],
    [("c", 1)],
]


@pytest.mark.parametrize("kind", KINDS)
def test_graphs_of_all_sizes_share_their_buffers(kind: str | int, device: str) -> None:
    setting = make_setting(kind, device)
    layer, cache = setting.server.layer, setting.server.cache
    setting.server.step([(name, 3 + 8 * i) for i, name in enumerate(NAMES)])
    sizes: Any = {"max_requests": SIZES[-1], "max_tokens": EACH * SIZES[-1], "max_blocks": 30}
    whole = plan_buffers(layer.config, cache, **sizes)
    columns = whole["window_table"].shape[1] if "window_table" in whole else 0
    hidden = torch.full((EACH * SIZES[-1], layer.config.hidden_size), float("nan"), device=device)
    positions = torch.zeros(EACH * SIZES[-1], dtype=torch.int64, device=device)
    graphs: dict[int, tuple[Callable[[], None], Tensor]] = {}
    backend = "auto" if device == "cpu" else "triton"
    for wanted in STEPS:
        size = next(size for size in SIZES if len(wanted) <= size)
        T = EACH * size
        into = slice_buffers(whole, max_requests=size, max_tokens=T)
        batch = describe(setting, wanted, window_columns=columns)
        options: Any = {"dtype": torch.float32, "backend": backend, "into": into}
        plan = make_plan(batch, layer.config, cache, **options)
        tokens, places = tokens_of(setting, batch)
        hidden.fill_(float("nan"))[: len(tokens)] = tokens
        positions.zero_()[: len(places)] = places
        if size not in graphs:
            graphs[size] = record(partial(layer, hidden[:T], positions[:T], cache, plan), device)
        replay, out = graphs[size]
        replay()
        assert_true(setting, out, places)
    assert set(graphs) == set(SIZES)
