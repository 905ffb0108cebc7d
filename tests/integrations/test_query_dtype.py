"""attach(query_dtype="fp8"): decode's queries in e4m3, dense and sparse; what is refused."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from openmla.errors import ConfigError
from openmla.integrations.transformers import attach, attachment_of, detach
from tests.integrations.generation import prompts
from tests.integrations.models import make_model, make_v4, model_of


@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v32"])
def test_decode_is_near(family: str, device: str) -> None:
    """Prompts are the same bits, a decoded token's logits near those of 16-bit queries."""
    model = model_of(family).to(device)
    ids = prompts((40,))[0].to(device)
    found = {}
    for query_dtype in (None, "fp8"):
        attach(model, block_size=4, cache_format="fp8", kv_scale=0.01, query_dtype=query_dtype)
        prompt = model(ids[:, :-1], use_cache=True)
        step = model(ids[:, -1:], past_key_values=prompt.past_key_values)
        found[query_dtype] = prompt.logits, step.logits[:, -1]
        told = attachment_of(model).explain()
        assert ("absorbed ones in e4m3" in told) == (query_dtype == "fp8")
        detach(model)
    (prompt, step), (same, near) = found[None], found["fp8"]
    if family == "deepseek_v3":
        assert torch.equal(prompt, same)
    error = float((near - step).norm() / step.norm())
    assert 0 < error < (0.2 if family == "deepseek_v32" else 0.05)


def test_refused() -> None:
    model = make_model("deepseek_v3")
    for options, message in (
        ({"query_dtype": "int8", "cache_format": "fp8"}, "must be None or 'fp8', got 'int8'"),
        ({"query_dtype": "fp8"}, "must be None over a cache of the default format"),
        ({"query_dtype": "fp8", "cache_format": "bf16"}, "must be None over a cache of bf16"),
    ):
        with pytest.raises(ConfigError, match=f"attach: query_dtype {message}"):
            attach(model, **options)  # type: ignore[arg-type]
    with pytest.raises(
        ConfigError, match=r"query_dtype must be None for queries in torch\.float64"
    ):
        attach(
            make_model("deepseek_v3").double(),
            query_dtype="fp8", cache_format="fp8", kv_scale=1.0,
        )  # fmt: skip
    with pytest.raises(ConfigError, match="attach: query_dtype must be None for deepseek_v4"):
        attach(make_v4(), query_dtype="fp8", cache_format="fp8")
    with pytest.raises(ConfigError, match="not attached"):
        attachment_of(model)
