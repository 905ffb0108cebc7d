"""What stands around kv_b_proj in an attached model: adapters, hooks, biases; questions refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from openmla.errors import UnsupportedError
from openmla.integrations.transformers import attach
from openmla.layers.weights import decode_weight
from tests.integrations.generation import captured
from tests.integrations.models import make_v4, model_of, padded_prompts
from tests.layers.quantised_linears import FP8Linear

FAMILIES = ("deepseek_v3", "deepseek_v32")
OLD = transformers.__version__.startswith("5.17.")


class LowRank(nn.Module):
    """An adapter as peft's layers are: a switch, a scale, two factors beside a linear."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.Linear(base.in_features, 4, bias=False)
        self.lora_B = nn.Linear(4, base.out_features, bias=False)
        self.scaling = {"default": 2.0}
        self.active_adapter = ["default"]
        self.merged_adapters: list[str] = []
        self._disable_adapters = False
        self.requires_grad_(False)

    @property
    def weight(self) -> Tensor:
        found: Tensor = self.base_layer.weight
        return found

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        out: Tensor = self.base_layer(hidden)
        if self._disable_adapters:
            return out
        return out + self.lora_B(self.lora_A(hidden)) * self.scaling["default"]


def adapted(family: str, device: str, *names: str) -> tuple[Any, list[LowRank]]:
    model, added = model_of(family), []
    for layer in model.model.layers:
        for name in names:
            added.append(LowRank(getattr(layer.self_attn, name)))
            setattr(layer.self_attn, name, added[-1])
    return model.to(device), added


def test_an_adapter_over_fp8() -> None:
    """It shows its base's bytes as a weight of its own; what it does is all of both."""
    base = FP8Linear(torch.randn(160, 32))
    adapter = LowRank(base)
    expected = decode_weight(base, 32, torch.float32)
    expected += 2.0 * adapter.lora_B.weight @ adapter.lora_A.weight
    torch.testing.assert_close(decode_weight(adapter, 32, torch.float32), expected)


@pytest.mark.parametrize("capture", [False, True])
@pytest.mark.parametrize("names", [("kv_b_proj",), ("o_proj",)])
@pytest.mark.parametrize("family", FAMILIES)
def test_switched_off_between_two_turns(
    family: str, names: tuple[str, ...], capture: bool, device: str
) -> None:
    """Over one kept cache, whose rows stay: what is computed from them follows the module."""
    if family == "deepseek_v32" and "kv_b_proj" in names and OLD:
        pytest.skip("transformers 5.17 keeps expanded keys of sparse models, and so old adapters")
    model, adapters = adapted(family, device, *names)
    ids, mask = (part.to(device) for part in padded_prompts(B=2, S=30))
    turn = torch.tensor([[5], [6]], device=device)

    def chat(tail: int) -> list[Tensor]:
        """Three turns of `tail` tokens and 5 more each, adapters on, off, on."""
        text, shown, past, logits = ids, mask, None, []
        for off in (False, True, False):
            for adapter in adapters:
                adapter._disable_adapters = off
            out = model.generate(
                text, attention_mask=shown, past_key_values=past, max_new_tokens=5,
                do_sample=False, return_dict_in_generate=True, output_logits=True,
            )  # fmt: skip
            logits += [part.clone() for part in out.logits]
            text = torch.cat([out.sequences, turn.expand(2, tail)], dim=1)
            past, shown = out.past_key_values, torch.ones_like(text)
            shown[:, : mask.shape[1]] = mask
        return logits

    expected = [chat(tail) for tail in (1, 3)]
    attach(model, block_size=4, capture=capture)
    for tail, alone in zip((1, 3), expected, strict=True):
        for ours, theirs in zip(chat(tail), alone, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


def test_decoded_once_while_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    model, adapters = adapted("deepseek_v3", "cpu", "kv_b_proj")
    decoded = []

    def counted(*args: Any) -> Tensor:
        decoded.append(args)
        return decode_weight(*args)

    monkeypatch.setattr("openmla.integrations.transformers.session.decode_weight", counted)
    attach(model, block_size=4)
    ids, _ = padded_prompts(B=1)
    past = model(ids).past_key_values
    for _ in range(5):
        model(ids[:, :1], past_key_values=past)
    assert len(decoded) == len(adapters)
    adapters[0].scaling["default"] = 1.0
    model(ids[:, :1], past_key_values=past)
    assert len(decoded) == len(adapters) + 1
    adapters[1].lora_B.weight = nn.Parameter(adapters[1].lora_B.weight + 1, requires_grad=False)
    model(ids[:, :1], past_key_values=past)
    assert len(decoded) == len(adapters) + 2


def test_quantised_weights_are_recorded_once(device: str) -> None:
    """Another generation decodes the same weights: the recorded step still serves."""
    model, _ = adapted("deepseek_v3", device, "kv_b_proj")
    attach(model, block_size=64, capture=True)
    ids = padded_prompts(B=1)[0].to(device)
    for _ in range(3):
        model.generate(ids, max_new_tokens=4, do_sample=False)
    assert captured(model).recordings == 1


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["hook", "pre-hook", "bias", "adapter's bias", "adapter per row"])
def test_what_a_weight_cannot_stand_for(family: str, kind: str) -> None:
    """Refused by name, before anything is written; afterwards the cache goes on."""
    model, _ = adapted(family, "cpu", "kv_b_proj")
    attach(model, block_size=4)
    ids, _ = padded_prompts(B=2)
    past = model(ids).past_key_values
    linear = model.model.layers[1].self_attn.kv_b_proj
    undo: Any = None
    if kind == "hook":
        undo = linear.register_forward_hook(lambda module, args, out: out * 2).remove
    elif kind == "pre-hook":
        undo = linear.register_forward_pre_hook(lambda module, args: None).remove
    elif kind == "adapter per row":  # as peft's adapter_names are handed on
        undo = linear.lora_A.register_forward_pre_hook(
            lambda module, args, kwargs: (args, kwargs), with_kwargs=True
        ).remove
    else:
        owner = linear.lora_B if kind == "adapter's bias" else linear.base_layer
        owner.bias = nn.Parameter(torch.ones(owner.out_features), requires_grad=False)
    message = "has a bias" if "bias" in kind else "of layer 1 has forward hooks"
    with pytest.raises(UnsupportedError, match=message):
        model(ids)
    if undo is None:
        owner.bias = None
    else:
        undo()
    assert model(ids[:, :1], past_key_values=past).logits.isfinite().all()


@pytest.mark.parametrize("family", [*FAMILIES, "deepseek_v4"])
def test_attention_weights_are_refused(family: str) -> None:
    model = make_v4() if family == "deepseek_v4" else model_of(family)
    attach(model)
    ids, _ = padded_prompts(B=1)
    for call in (model, model.model):
        with pytest.raises(UnsupportedError, match="output_attentions=True is not supported"):
            call(ids, output_attentions=True)
    with pytest.raises(UnsupportedError, match="output_attentions=True is not supported"):
        model.generate(ids, max_new_tokens=2, output_attentions=True, return_dict_in_generate=True)
    model(ids, output_attentions=False)
