"""torch.compile over padded steps: graphs by whether there is padding, not by how much."""

from __future__ import annotations

import pytest
import torch

from tests.layers.compiling import Compiled
from tests.layers.engine import assert_true, describe, make_setting, plan_of, tokens_of

pytestmark = pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")


@pytest.mark.parametrize(("kind", "graphs"), [("deepseek_v32", 3), (4, 1)])
def test_graphs_of_padding(kind: str | int, graphs: int, device: str) -> None:
    """None, one token, several: three graphs, but one of V4. A request has no tokens, padding is
    NaN."""
    setting = make_setting(kind, device)
    prompts = describe(setting, [("a", 40), ("b", 35), ("c", 20)])
    hidden, positions = tokens_of(setting, prompts)
    setting.server.layer(hidden, positions, setting.server.cache, plan_of(setting, prompts))
    compiled = Compiled(setting.server.layer)
    for padding in (3, 2, 5, 0, 1, 0, 4):
        wanted = [("a", 1), ("d", 0), ("b", 1), ("c", 1)]
        batch = describe(setting, wanted, padding=padding)
        plan = plan_of(setting, batch, compiled=True)
        tokens, positions = tokens_of(setting, batch)
        hidden = tokens.new_full((plan.num_tokens, tokens.shape[1]), torch.nan)
        hidden[: len(tokens)] = tokens
        places = torch.zeros(plan.num_tokens, dtype=torch.int64, device=device)
        places[: len(tokens)] = positions
        with torch.inference_mode():
            out = compiled(hidden, places, setting.server.cache, plan)
        assert_true(setting, out, positions)
    assert compiled.graphs == graphs
