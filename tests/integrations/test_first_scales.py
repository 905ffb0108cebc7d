"""attach(kv_scale="first"): the first pass finds the scales that calibrate() would."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from openmla import ConfigError, OpenMLAError, Scales, allocate_cache, attach, calibrate, detach
from openmla.errors import UnsupportedError
from openmla.integrations.options import AttachOptions
from openmla.integrations.transformers import attachment_of
from openmla.integrations.transformers.check import _first_scales
from openmla.integrations.transformers.scales import places
from tests.integrations.generation import captured, new_tokens, prompts
from tests.integrations.models import MODELS, SPARSE, make_model, make_v4, model_of


def found_in(model: Any, calibrated: Any) -> dict[int, Any]:
    """What calibrate() found, by layer number as attachments have scales."""
    assert isinstance(calibrated, Scales)
    where = places(model, attachment_of(model).modules)
    return {layer: calibrated.layers[place] for layer, place in where.items()}


def cached_bytes(model: Any) -> list[Tensor]:
    caches = attachment_of(model).caches
    parts = [part for layer in sorted(caches) for part in caches[layer].parts]
    return [part.data.view(torch.uint8).clone() for part in parts]


@pytest.mark.filterwarnings("ignore:attach. the decode step of this model cannot be captured")
@pytest.mark.parametrize("query_dtype", [None, "fp8_static"])
@pytest.mark.parametrize("family", [*MODELS, *SPARSE])
def test_tokens_and_rows_are_those_of_calibrate(
    family: str, query_dtype: str | None, device: str
) -> None:
    """A sparse model's prompt attends to rows as they are stored, so that what calibrate() finds in
    it, with rows that are not rounded, may differ after the first layer."""
    model = model_of(family).to(device)
    ids = prompts((40,))[0].to(device)
    calibrated = calibrate(model, [ids])

    def run(kv_scale: Any) -> tuple[Any, ...]:
        options: dict[str, Any] = {"cache_format": "fp8", "query_dtype": query_dtype}
        attach(model, block_size=4, kv_scale=kv_scale, **options)
        tokens, attachment = new_tokens(model, ids, n=6), attachment_of(model)
        assert attachment.clamped() == {}
        where, told = places(model, attachment.modules), str(attachment.explain())
        found = {place: attachment.scales[layer] for layer, place in where.items()}
        rows = cached_bytes(model)
        detach(model)
        return tokens, rows, Scales(found), told

    tokens, rows, scales, told = run("first")
    least = min(each.row for each in scales.layers.values())
    assert f"scales    found in the first pass: kv_scale {least:.4g} to" in told
    if family in MODELS:
        assert scales == calibrated
    wanted_tokens, wanted_rows, _, told = run(scales)
    assert torch.equal(tokens, wanted_tokens) and "first pass" not in told
    for one, other in zip(rows, wanted_rows, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("capture", [False, True])
def test_later_passes_keep_them(capture: bool, device: str) -> None:
    """Another prompt, another cache, more blocks, a copy of the model."""
    model = make_model("deepseek_v3").to(device)
    first, second = (prompts((n,), seed=n)[0].to(device) for n in (20, 300))
    calibrated = calibrate(model, [first])
    attach(model, block_size=4, cache_format="fp8", kv_scale="first", capture=capture)
    untouched = deepcopy(model)
    attachment = attachment_of(model)
    assert attachment.scales == {} and attachment.awaits_scales
    new_tokens(model, first, n=4)
    scales = dict(attachment.scales)
    assert scales == found_in(model, calibrated)
    # latents that no longer fit are clipped, not measured again
    for module in attachment.modules:
        with torch.no_grad():
            module.kv_a_layernorm.weight.mul_(300.0)  # type: ignore[union-attr, operator]
    new_tokens(model, second, n=4)
    assert attachment.scales == scales and attachment.clamped()
    for layer, cache in attachment.caches.items():
        assert cache.latent is not None and float(cache.latent.kv_scale) == scales[layer].row
    if capture:
        assert captured(model).recordings > 0
    assert attachment_of(deepcopy(model)).scales == scales
    new_tokens(untouched, second, n=2)
    assert attachment_of(untouched).scales not in ({}, scales)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_not_measured(side: str, device: str) -> None:
    """Neither where nothing is before it, nor behind tokens, where it has queries of its own."""
    model = make_model("deepseek_v3").to(device)
    ids = prompts((30, 30))[0].to(device)
    mask = torch.ones_like(ids)
    hidden = slice(0, 10) if side == "left" else slice(20, 30)
    ids[0, hidden], mask[0, hidden] = 0, 0
    with torch.no_grad():
        model.model.embed_tokens.weight[0] = torch.nan
    given = {"input_ids": ids, "attention_mask": mask}
    calibrated = calibrate(model, [given])
    if side == "right":
        assert calibrated == calibrate(model, [ids[:1, :20], ids[1:]])
    attach(model, cache_format="fp8", kv_scale="first")
    with torch.no_grad():
        model(**given, use_cache=True)
    assert attachment_of(model).scales == found_in(model, calibrated)


def test_a_pass_without_tokens_finds_nothing(device: str) -> None:
    model = make_model("deepseek_v3").to(device)
    ids = prompts((12,))[0].to(device)
    attach(model, cache_format="fp8", kv_scale="first")
    attachment = attachment_of(model)
    with torch.no_grad():
        model(ids, attention_mask=torch.zeros_like(ids), use_cache=True)
        assert attachment.scales == {}
        model(ids, use_cache=True)
    assert len(attachment.scales) == len(attachment.modules)
    for layer, cache in attachment.caches.items():
        assert cache.latent is not None
        assert float(cache.latent.kv_scale) == attachment.scales[layer].row


def test_values_that_are_not_finite() -> None:
    model = make_model("deepseek_v3")
    ids = prompts((12,))[0]
    attach(model, cache_format="fp8", kv_scale="first")
    with torch.no_grad():
        model.model.embed_tokens.weight[5] = torch.nan
        broken = torch.full_like(ids, 5)
        with pytest.raises(ConfigError, match="attach: layer 0: latent must be finite"):
            model(broken, use_cache=True)
        ids[ids == 5] = 6
        assert model(ids, use_cache=True).logits.isfinite().all()


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (make_model, {"cache_format": "bf16"}, "kv_scale must be None with cache_format='bf16'"),
        (make_model, {}, "kv_scale must be None with cache_format=None"),
        (lambda name: make_v4(), {"cache_format": "fp8"}, "kv_scale 'first' is not supported"),
    ],
)
def test_attach_raises(make: Any, options: dict[str, Any], message: str) -> None:
    model = make("deepseek_v3")
    with pytest.raises(OpenMLAError, match=f"^attach: {message}"):
        attach(model, kv_scale="first", **options)
    with pytest.raises(ConfigError, match="not attached"):
        attachment_of(model)


def test_a_group_is_not_supported() -> None:
    config = attachment_of(attach(make_model("deepseek_v3"))).config
    options = AttachOptions(cache_format="fp8", kv_scale="first", group=object())
    with pytest.raises(UnsupportedError, match="'first' is not supported with a group"):
        _first_scales(options, config)


def test_a_layers_cache_cannot_find_its_own() -> None:
    model = make_model("deepseek_v3")
    config = attachment_of(attach(model)).config
    with pytest.raises(
        ConfigError, match=r"'first' is supported by attach\(\) only\. Call calibrate"
    ):
        allocate_cache(config, num_blocks=2, block_size=4, format="fp8", kv_scale="first")  # type: ignore[arg-type]
