"""attach(query_dtype="fp8"): decode's queries in e4m3, dense and sparse; what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("transformers")

from openmla import LayerScales, Scales, calibrate
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
        assert ("absorbed queries in e4m3" in told) == (query_dtype == "fp8")
        detach(model)
    (prompt, step), (same, near) = found[None], found["fp8"]
    if family == "deepseek_v3":
        assert torch.equal(prompt, same)
    error = float((near - step).norm() / step.norm())
    assert 0 < error < (0.2 if family == "deepseek_v32" else 0.05)


@pytest.mark.parametrize("capture", [False, True])
@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v32"])
def test_calibrated_scales_of_queries(family: str, capture: bool, device: str) -> None:
    """Near queries with a scale per token and head; latents of any size give the same bits."""
    found = {}
    ids = prompts((40,))[0].to(device)
    for factor in (1.0, 2.0**12, 2.0**-12):
        model = model_of(family).to(device)
        for module in model.modules():
            if hasattr(module, "kv_a_layernorm"):
                with torch.no_grad():
                    module.kv_a_layernorm.weight.mul_(factor)
                    module.kv_b_proj.weight.div_(factor)
        scales = calibrate(model, [ids])
        for name in (None, "fp8", "fp8_static"):
            attach(
                model, block_size=4, cache_format="fp8", kv_scale=scales, query_dtype=name,
                capture=capture,
            )  # fmt: skip
            ids_out = model.generate(ids, max_new_tokens=3, do_sample=False, use_cache=True)
            prompt = model(ids[:, :-1], use_cache=True)
            step = model(ids[:, -1:], past_key_values=prompt.past_key_values)
            found[factor, name] = step.logits[:, -1]
            assert ids_out.shape[1] == 43
            detach(model)
    exact, dynamic, static = (found[1.0, name] for name in (None, "fp8", "fp8_static"))
    errors = [float((each - exact).norm() / exact.norm()) for each in (dynamic, static)]
    assert 0 < errors[1] < max(2 * errors[0], 0.05)
    for factor in (2.0**12, 2.0**-12):
        same = found[factor, "fp8_static"]
        torch.testing.assert_close(same, static, rtol=0, atol=0 if device == "cpu" else 1e-5)


def test_static_queries_need_calibrated_scales() -> None:
    model = make_model("deepseek_v3")
    ids = prompts((12,))[0]
    scales = calibrate(model, [ids])
    assert isinstance(scales, Scales)
    layers = {place: replace(each, q=None) for place, each in scales.layers.items()}
    for kv_scale in (1.0, Scales(layers), LayerScales(0.1, 0.1), None):
        with pytest.raises(ConfigError, match="'fp8_static' needs a q_scale for every layer, and"):
            attach(model, cache_format="fp8", kv_scale=kv_scale, query_dtype="fp8_static")
    packed = make_model("deepseek_v3", kv_lora_rank=128)
    with pytest.raises(ConfigError, match="needs cache_format 'fp8', got 'fp8_ds_mla'"):
        attach(packed, cache_format="fp8_ds_mla", query_dtype="fp8_static")
    with pytest.raises(ConfigError, match="attach: query_dtype must be None for deepseek_v4"):
        attach(make_v4(), query_dtype="fp8_static", cache_format="fp8")
    for each in (model, packed):
        with pytest.raises(ConfigError, match="not attached"):
            attachment_of(each)


def test_refused() -> None:
    model = make_model("deepseek_v3")
    for options, message in (
        (
            {"query_dtype": "int8", "cache_format": "fp8"},
            "must be None, 'fp8' or 'fp8_static', got 'int8'",
        ),
        ({"query_dtype": "fp8"}, "must be None for a cache of the default format"),
        ({"query_dtype": "fp8", "cache_format": "bf16"}, "must be None for a cache of bf16"),
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
