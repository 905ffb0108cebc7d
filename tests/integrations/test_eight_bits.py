"""attach(absorbed_format="fp8"): decode reads eight bits, prompts the model's own; all is told."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from openmla.errors import ConfigError
from openmla.integrations.transformers import attach, attachment_of, detach
from tests.integrations.generation import captured, generate, prompts
from tests.integrations.models import make_model, make_v4, model_of, padded_prompts
from tests.layers.quantised_linears import FP8Linear
from tests.plan.groups import forms_of


def linears_of(model: Any) -> list[Any]:
    return [m.kv_b_proj for m in model.modules() if hasattr(m, "kv_b_proj")]


def decoded_step(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Logits of one token after a prompt."""
    past = model(ids[:, :-1], use_cache=True).past_key_values
    logits: torch.Tensor = model(ids[:, -1:], past_key_values=past).logits[:, -1]
    return logits


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe_lite", "deepseek_v32"])
def test_decode_is_near_and_prompts_are_exact(family: str, device: str) -> None:
    model = model_of(family).to(device)
    ids = prompts((40,))[0].to(device)
    attach(model, block_size=4)
    prompt, step = model(ids).logits, decoded_step(model, ids)
    detach(model)
    attach(model, block_size=4, absorbed_format="fp8")
    again, plan = model(ids).logits, attachment_of(model).last_plan
    assert plan is not None
    if forms_of(plan) == {"expanded"}:
        assert torch.equal(again, prompt)
    actual, sparse = decoded_step(model, ids), attachment_of(model).config.indexer is not None
    error = float((actual - step).norm() / step.norm())
    assert 0 < error < (0.2 if sparse else 0.05)  # an indexer may choose other keys


def test_copies_are_shared_and_told() -> None:
    model = make_model("deepseek_v3")
    ids, _ = padded_prompts(B=1, S=20)
    attachment = attachment_of(attach(model, block_size=4, absorbed_format="fp8"))
    assert attachment.memory().absorbed_error is None  # nothing is made yet
    first = model(ids, use_cache=True)
    report, config = attachment.memory(), attachment.config
    each = linears_of(model)[0].weight.numel() + 16 * config.num_heads
    assert report.absorbed_bytes == each * len(linears_of(model))
    assert report.absorbed_error is not None and 0.01 < report.absorbed_error < 0.04
    assert report.decoded_bytes == 0
    assert report.held_bytes == report.block_bytes + report.absorbed_bytes
    line = next(line for line in str(report).splitlines() if line.startswith("absorbed  "))
    assert line.endswith(
        f"KiB: fp8 copy of kv_b_proj, besides the model's own; largest error of a head "
        f"{report.absorbed_error:.4f}"
    )
    assert attachment.explain().splitlines()[-1] == line
    second = model(ids, use_cache=True)
    assert attachment.memory().absorbed_bytes == report.absorbed_bytes  # both caches read one copy
    for linear in linears_of(model):
        linear.weight.data.mul_(-1)
    third = model(ids, use_cache=True)
    assert attachment.memory().absorbed_bytes == 2 * report.absorbed_bytes  # the old are in use
    del first, second
    assert attachment.memory().absorbed_bytes == report.absorbed_bytes
    del third
    assert attachment.memory().absorbed_bytes == report.absorbed_bytes  # kept for the next
    detach(model)
    assert attachment.memory().absorbed_bytes == 0


def test_an_fp8_model_is_read_as_it_is() -> None:
    model = make_model("deepseek_v3")
    for module in model.modules():
        if hasattr(module, "kv_b_proj"):
            module.kv_b_proj = FP8Linear(module.kv_b_proj.weight.detach())
    ids, _ = padded_prompts(B=1, S=30)
    attach(model, block_size=4)
    expected = decoded_step(model, ids)
    detach(model)
    attachment = attachment_of(attach(model, block_size=4, absorbed_format="fp8"))
    actual = decoded_step(model, ids)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    kept = model(ids, use_cache=True)
    report = attachment.memory()
    assert (report.absorbed_bytes, report.absorbed_error, report.decoded_bytes) == (0, 0, 0)
    assert "absorbed  0 B: the model's own fp8 kv_b_proj, without a copy" in str(report)
    decoded = 4 * linears_of(model)[0].weight.numel()  # for a prompt, while a layer expands it
    assert report.workspace_bytes == attachment.workspace_bytes + decoded
    del kept


@pytest.mark.parametrize("change", ["in place", "replaced", "without a trace"])
def test_changed_weights_are_followed(change: str, device: str) -> None:
    """The next generation decodes by them, recorded steps too."""
    model = make_model("deepseek_v3").to(device)
    ids, mask = (tensor.to(device) for tensor in padded_prompts())
    attach(model, block_size=4, absorbed_format="fp8", capture=True)
    first = generate(model, ids, mask, max_new_tokens=6)
    again = generate(model, ids, mask, max_new_tokens=6)
    assert torch.equal(first.sequences, again.sequences)
    before = captured(model).recordings
    with torch.no_grad():
        for linear in linears_of(model):
            if change == "in place":
                linear.weight.neg_()
            elif change == "replaced":
                linear.weight = torch.nn.Parameter(-linear.weight, requires_grad=False)
            else:
                linear.weight.data.neg_()
    ours = generate(model, ids, mask, max_new_tokens=6)
    assert captured(model).recordings > before
    detach(model)
    attach(model, block_size=4, absorbed_format="fp8")
    fresh = generate(model, ids, mask, max_new_tokens=6)
    assert torch.equal(ours.sequences, fresh.sequences)
    for one, other in zip(ours.logits, fresh.logits, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert not torch.equal(ours.logits[1], first.logits[1])


class Factor(torch.nn.Module):
    """A linear that an adapter changes, by a number."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        self.base, self.factor = base, 1.0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(hidden) * self.factor
        return out


def test_adapters_are_followed_over_one_cache(device: str) -> None:
    model = make_model("deepseek_v3").to(device)
    for module in model.modules():
        if hasattr(module, "kv_b_proj"):
            module.kv_b_proj = Factor(module.kv_b_proj)
    ids = prompts((40,))[0].to(device)
    attach(model, block_size=4, absorbed_format="fp8")
    attachment = attachment_of(model)

    def turns() -> list[torch.Tensor]:
        past, logits = model(ids, use_cache=True).past_key_values, []
        for factor in (1.0, 0.5, 1.0):
            for linear in linears_of(model):
                linear.factor = factor
            logits.append(model(ids[:, :1], past_key_values=past).logits)
        return logits

    eight = turns()
    assert attachment.memory().absorbed_bytes > 0
    detach(model)
    attach(model, block_size=4)
    for one, other in zip(eight, turns(), strict=True):
        assert float((one - other).norm() / other.norm()) < 0.05
    assert float((eight[1] - eight[0]).norm() / eight[0].norm()) > 0.1


def test_other_formats_are_refused_before_anything_is_changed() -> None:
    model = make_model("deepseek_v3")
    with pytest.raises(ConfigError, match="attach: absorbed_format must be None or 'fp8', got 'i"):
        attach(model, absorbed_format="int8")
    assert not any(hasattr(module, "openmla") for module in model.modules())
    with pytest.raises(ConfigError, match="must be None for deepseek_v4, which has no kv_b"):
        attach(make_v4(), absorbed_format="fp8")
