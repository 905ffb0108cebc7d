"""What generate() does besides one token after another, on attached models and around them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from openmla.errors import ConfigError

transformers = pytest.importorskip("transformers")

from transformers import modeling_layers  # noqa: E402

from openmla.integrations.transformers import attach, attachment_of, detach  # noqa: E402
from tests.integrations.models import IDS, MAKERS, make_model  # noqa: E402


@pytest.fixture(autouse=True)
def _no_grad() -> Any:
    with torch.no_grad():
        yield


def relative(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


@pytest.mark.skipif(not hasattr(modeling_layers, "MtpModel"), reason="an older transformers")
@pytest.mark.parametrize("num_layers", [1, 2])
def test_multi_token_prediction(
    num_layers: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Draft layers made from an attached model's config draft what they draft without it."""
    model = make_model("deepseek_v3", num_mtp_layers=num_layers).to(device)
    ids = IDS[:1].to(device)
    known = {id(parameter) for parameter in model.parameters()}
    drafted: list[Tensor] = []

    def made(cls: Any, /, main: Any, **options: Any) -> Any:
        torch.manual_seed(3)
        drafts = cls(main, num_layers).to(device).eval().requires_grad_(False)
        for parameter in drafts.parameters():
            if id(parameter) not in known and parameter.dim() > 1:
                parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
        drafts.register_forward_hook(lambda module, args, out: drafted.append(out[1]))
        return drafts

    monkeypatch.setattr(modeling_layers.MtpModel, "from_pretrained", classmethod(made))
    options = {"max_new_tokens": 12, "do_sample": False, "use_mtp": True}
    expected = model.generate(ids, **options)
    logits = list(drafted)
    drafted.clear()
    attach(model, block_size=4)
    assert torch.equal(model.generate(ids, **options), expected)
    assert len(drafted) == len(logits) > 1
    assert all(relative(a, e) < 1e-5 for a, e in zip(drafted, logits, strict=True))


@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_early_exit(kind: str, device: str) -> None:
    """The model drafts for itself without its last layers; V4 cannot, as transformers says."""
    if kind == "sparse" and transformers.__version__.startswith("5.17."):
        pytest.skip("transformers 5.17 cannot crop the cache layers that were left out")
    model = MAKERS[kind]().to(device)
    options = {"max_new_tokens": 12, "do_sample": False, "assistant_early_exit": 2}
    expected = model.generate(IDS[:1].to(device), **options)
    attach(model, block_size=4)
    assert torch.equal(model.generate(IDS[:1].to(device), **options), expected)


@pytest.mark.parametrize("kind", MAKERS)
def test_two_models_of_one_config_object(kind: str) -> None:
    """One is attached, the other left as it is; then that one too, by itself."""
    first = MAKERS[kind]()
    config = first.config
    second = type(first)(config).eval().requires_grad_(False)
    second.load_state_dict(first.state_dict())
    expected, implementation = first(IDS).logits, config._attn_implementation
    assert attach(first, block_size=256 if kind == "v4" else 4) is first
    assert config._attn_implementation == implementation and first.config is not config
    assert torch.equal(second(IDS).logits, expected)
    attach(second)
    assert relative(second(IDS).logits, expected) < 1e-5
    detach(first)
    assert relative(second(IDS).logits, expected) < 1e-5
    assert torch.equal(first(IDS).logits, expected)
    del first
    third = type(second)(config).eval()  # of the config as it always was
    third.load_state_dict(second.state_dict())
    assert torch.equal(third(IDS).logits, expected)


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("capture", [False, True])
def test_a_failed_pass_frees_its_blocks(kind: str, capture: bool, device: str) -> None:
    """At once, though the cache object and the exception are still there; reset() revives it."""
    model = MAKERS[kind]().to(device)
    ids = IDS.to(device)
    expected = model(ids).logits
    attach(model, capture=capture)
    attachment = attachment_of(model)
    past = model(ids, use_cache=True).past_key_values
    step = {
        "past_key_values": past,
        "position_ids": torch.full_like(ids[:, :1], 40),
        "use_cache": True,
    }

    def fail(*_: Any) -> None:
        raise RuntimeError("planted")

    handle = model.model.layers[1].mlp.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="planted"):
        model(input_ids=ids[:, :1], **step)
    handle.remove()
    assert all(pool.num_free == pool.num_blocks for pool in attachment.pools)
    with pytest.raises(ConfigError, match="the last forward pass with this cache failed"):
        model(input_ids=ids[:, :1], **step)
    past.reset()
    assert relative(model(ids, past_key_values=past).logits, expected) < 1e-5


@pytest.mark.parametrize("kind", MAKERS)
def test_inference_mode_and_back(kind: str, device: str) -> None:
    """Caches serve passes in either mode, whichever came first; so do the larger ones after."""
    with torch.inference_mode(False), torch.no_grad():
        model, ids = MAKERS[kind]().to(device), IDS.clone().to(device)
        expected, long = model(ids).logits, torch.cat([ids] * 8)  # more blocks than there are
        attach(model, block_size=128 if kind == "v4" else 4)
        for given in (ids, long):
            with torch.inference_mode():
                model(given)
            assert relative(model(given).logits[:2], expected) < 1e-5


@pytest.mark.parametrize("kind", MAKERS)
def test_compiled_forward(kind: str, device: str) -> None:
    model = MAKERS[kind]().to(device)
    ids = IDS.to(device)
    expected = model(ids).logits
    attach(model)
    compiled = torch.compile(model.forward, backend="eager")
    assert relative(compiled(ids).logits, expected) < 1e-5
