"""attach(prefill_dtype="fp8"): prompts are near, decoding is the model's own, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from openmla.errors import ConfigError
from openmla.integrations.transformers import attach, attachment_of, detach
from tests.integrations.generation import prompts
from tests.integrations.models import make_v4, model_of


def first_attention(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """What the first layer's attention gives: behind it, experts may be chosen differently."""
    found: list[torch.Tensor] = []
    module = next(each for each in model.modules() if hasattr(each, "kv_b_proj"))
    handle = module.register_forward_hook(lambda _, __, outputs: found.append(outputs[0]))
    model(ids)
    handle.remove()
    return found[0]


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe_lite"])
def test_prompts_are_near(family: str, device: str) -> None:
    model = model_of(family).to(device)
    ids = prompts((40,))[0].to(device)
    attach(model, block_size=4)
    exact = first_attention(model, ids)
    detach(model)
    attach(model, block_size=4, prefill_dtype="fp8")
    actual, plan = first_attention(model, ids), attachment_of(model).last_plan
    assert plan is not None and plan.group("expanded") is not None
    assert "expanded queries and keys in e4m3" in plan.explain()
    assert 0 < float((actual - exact).norm() / exact.norm()) < 0.065
    past = model(ids[:, :-1], use_cache=True).past_key_values
    model(ids[:, -1:], past_key_values=past)
    plan = attachment_of(model).last_plan
    assert plan is not None
    assert plan.group("expanded") is None  # a token is absorbed: nothing is in e4m3


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"prefill_dtype": "int8"}, "attach: prefill_dtype must be 'fp8' or None, got 'int8'."),
        ({"prefill_dtype": 8}, "attach: prefill_dtype must be 'fp8' or None, got 8."),
    ],
)
def test_refused(asked: dict[str, Any], message: str) -> None:
    model = model_of("deepseek_v3")
    with pytest.raises(ConfigError) as error:
        attach(model, **asked)
    assert message in str(error.value)
    assert not any(hasattr(module, "openmla") for module in model.modules())


def test_v4_expands_nothing() -> None:
    with pytest.raises(ConfigError, match="it expands nothing"):
        attach(make_v4(), prefill_dtype="fp8")


def test_float64_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"must be None for queries in torch\.float64"):
        attach(model_of("deepseek_v3").to(torch.float64), prefill_dtype="fp8")
