"""attach(batch_invariant=True): what attention hands to o_proj does not depend on the batch.

The model's linears are the caller's; here they multiply row by row, so that attention is given the
same bits.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from openmla.errors import ConfigError

transformers = pytest.importorskip("transformers")

from openmla.integrations.transformers import (  # noqa: E402 - transformers may be missing
    attach,
    attachment_of,
)
from tests.integrations.models import make_model, make_sparse, make_v4  # noqa: E402

MODELS = {
    "dense": lambda: make_model("deepseek_v3"),
    "sparse": lambda: make_sparse("deepseek_v32"),
    "v4": make_v4,
}
library_linear = torch.nn.functional.linear


def linear_by_rows(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    rows = [library_linear(row.clone()[None], weight, bias)[0] for row in x.flatten(0, -2)]
    return torch.stack(rows).view(*x.shape[:-1], -1)


def attended(model: Any, rows: list[list[int]], steps: int) -> list[Tensor]:
    """What layer 0's output projection is given for the first row: its prompt, then `steps` more
    tokens, padded on the left beside the others."""
    found: list[Tensor] = []
    attention = model.model.layers[0].self_attn
    output = attention.o_a_proj if hasattr(attention, "o_a_proj") else attention.o_proj
    handle = output.register_forward_pre_hook(lambda _, args: found.append(args[0]))
    S = max(map(len, rows))
    ids = torch.tensor([[0] * (S - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (S - len(row)) + [1] * len(row) for row in rows])
    past = None
    for step in range(steps + 1):
        places = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        done = model(
            input_ids=ids, attention_mask=mask, position_ids=places, past_key_values=past,
            use_cache=True,
        )  # fmt: skip
        past = done.past_key_values
        ids = torch.tensor([[5 + step + b] for b in range(len(rows))])
        mask = torch.cat([mask, torch.ones(len(rows), 1).long()], 1)
    handle.remove()
    n = len(rows[0])
    return [found[0].view(len(rows), S, -1)[0, S - n :]] + [
        each.view(len(rows), -1)[0] for each in found[1:]
    ]


@pytest.mark.parametrize("capture", [None, True], ids=["eager", "captured"])
@pytest.mark.parametrize("kind", MODELS)
def test_a_row_among_others(
    kind: str, capture: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.nn.functional, "linear", linear_by_rows)
    prompt = [(7 * i) % 89 + 3 for i in range(40)]
    others = [[4, 5, 6], [(3 * i) % 80 + 2 for i in range(61)], [9] * 25]
    model = attach(MODELS[kind](), batch_invariant=True, capture=capture)
    alone = attended(model, [prompt], 3)
    among = attended(model, [prompt, *others], 3)
    for one, other in zip(alone, among, strict=True):
        assert torch.equal(one, other)
    assert "invariant results do not depend on the batch" in attachment_of(model).explain()


def test_refusals() -> None:
    with pytest.raises(ConfigError, match="batch_invariant must be of type bool, got str"):
        attach(make_model("deepseek_v3"), batch_invariant="yes")  # type: ignore[arg-type]
