"""What an attached model does not do again: expanding in the modules, looking at weights."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from openmla.errors import UnsupportedError
from openmla.integrations.transformers import attach, attachment_of, detach
from tests.integrations.models import model_of, padded_prompts


def test_modules_expand_only_what_no_layer_stored(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    model = model_of("deepseek_v3").to(device)
    attention = type(model.model.layers[0].self_attn)
    original, calls = attention.expand_kv, []

    def counted(self: nn.Module, kv_nope: Tensor, k_rot: Tensor) -> Any:
        calls.append(kv_nope.shape)
        return original(self, kv_nope, k_rot)

    monkeypatch.setattr(attention, "expand_kv", counted)
    ids = padded_prompts(B=2)[0].to(device)
    layers = len(model.model.layers)
    expected = model(ids).logits
    assert len(calls) == layers
    attach(model)
    twin = deepcopy(model)
    calls.clear()
    assert torch.allclose(model(ids, use_cache=True).logits, expected, atol=1e-4)
    assert torch.allclose(twin(ids, use_cache=True).logits, expected, atol=1e-4)
    assert not calls
    assert attachment_of(twin).caches and attachment_of(twin) is not attachment_of(model)
    assert torch.allclose(model(ids, use_cache=False).logits, expected, atol=1e-4)
    assert len(calls) == layers  # nothing was stored: whole sequences
    detach(model)
    assert "expand_kv" not in vars(model.model.layers[0].self_attn)
    assert torch.allclose(model(ids).logits, expected, atol=1e-4)
    assert torch.allclose(twin(ids, use_cache=True).logits, expected, atol=1e-4)


def test_a_plain_weight_is_looked_at_once_until_it_changes() -> None:
    model = model_of("deepseek_v3")
    attach(model)
    ids, _ = padded_prompts(B=2)
    past = model(ids).past_key_values
    session, module = past.layers[1].session, model.model.layers[1].self_attn
    linear = module.kv_b_proj

    def looked_at() -> Any:
        return session.absorbed(module, 1, torch.float32)

    first = looked_at()
    assert looked_at() is first
    with torch.no_grad():
        linear.weight.mul_(2)  # seen through the views, which are not made again
    assert looked_at() is first and torch.equal(first.kv_b, linear.weight)
    linear.weight.data = linear.weight.data.clone()  # as model.to() does it
    second = looked_at()
    assert second is not first and second.kv_b.data_ptr() == linear.weight.data_ptr()
    linear.weight = nn.Parameter(linear.weight * 3, requires_grad=False)
    assert torch.equal(looked_at().kv_b, linear.weight)
    linear.forward = lambda hidden: nn.functional.linear(hidden, linear.weight) * 5
    assert torch.allclose(looked_at().kv_b, linear.weight * 5)
    del linear.forward
    assert looked_at().kv_b.data_ptr() == linear.weight.data_ptr()
    module.kv_b_proj = nn.Linear(linear.in_features, linear.out_features, bias=False)
    module.kv_b_proj.requires_grad_(False)
    assert looked_at().kv_b.data_ptr() == module.kv_b_proj.weight.data_ptr()


def test_what_was_looked_at_serves_every_cache_until_detached() -> None:
    model = model_of("deepseek_v3")
    attach(model)
    ids, _ = padded_prompts(B=2)
    attachment = attachment_of(model)
    with torch.inference_mode():
        one = model(ids)
    known = dict(attachment.known)
    assert sorted(known) == list(range(len(model.model.layers)))
    other = model(ids)  # a cache of its own, and not in inference mode
    assert other.past_key_values.layers[0].session is not one.past_key_values.layers[0].session
    assert all(attachment.known[layer] is views for layer, views in known.items())
    assert torch.equal(one.logits, other.logits)
    detach(model)
    assert not attachment.known  # nothing keeps weights that the model lets go of


@pytest.mark.parametrize("kind", ["hook", "pre-hook", "bias"])
def test_what_a_plain_weight_cannot_stand_for_later(kind: str) -> None:
    """Refused in the middle of a conversation, too."""
    model = model_of("deepseek_v3")
    attach(model)
    ids, _ = padded_prompts(B=2)
    past = model(ids).past_key_values
    linear = model.model.layers[1].self_attn.kv_b_proj
    if kind == "hook":
        linear.register_forward_hook(lambda module, args, out: out * 2)
    elif kind == "pre-hook":
        linear.register_forward_pre_hook(lambda module, args: None)
    else:
        linear.bias = nn.Parameter(torch.ones(linear.out_features), requires_grad=False)
    message = "has a bias" if kind == "bias" else "has forward hooks"
    with pytest.raises(UnsupportedError, match=message):
        model(ids[:, :1], past_key_values=past)
