"""An attached model with quantised kv_b_proj: called for prompts where cheaper, copies told."""

from __future__ import annotations

import pytest
import torch

from openmla.integrations.transformers import attach, attachment_of
from tests.integrations.models import make_model, padded_prompts
from tests.layers.quantised_linears import FP8Linear, with_fp8


def test_prompts_call_the_linear_and_copies_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("deepseek_v3")
    linears = []
    for module in model.modules():
        if hasattr(module, "kv_b_proj"):
            module.kv_b_proj = FP8Linear(module.kv_b_proj.weight.detach())
            linears.append(module.kv_b_proj)
    ids, _ = padded_prompts(B=1, S=60)
    expected = model(ids).logits  # by the linears, which round activations
    attach(model, block_size=4)
    for linear in linears:
        linear.rows.clear()
    first = model(ids, use_cache=True)
    copied = first.logits
    assert not any(linear.rows for linear in linears)  # this CPU does not multiply fp8
    each = 4 * linears[0].weight.numel()
    attachment = attachment_of(model)
    assert attachment.memory().decoded_bytes == len(linears) * each
    other = model(ids, use_cache=True)
    assert attachment.memory().decoded_bytes == 2 * len(linears) * each  # of each cache in use
    told = f"decoded   {2 * len(linears) * each / 2**10:.1f} KiB: copies of kv_b_proj"
    assert told in str(attachment.memory())
    del first, other
    assert attachment.memory().decoded_bytes == 0
    with_fp8(monkeypatch)
    past = model(ids).past_key_values
    assert all(linear.rows == [60] for linear in linears)
    itself = model(ids).logits
    model(ids[:, :1], past_key_values=past)
    assert all(linear.rows == [60, 60] for linear in linears)  # a decode step is absorbed
    near = [float((logits - expected).norm()) for logits in (itself, copied)]
    assert near[0] < 0.5 * near[1], near
    torch.testing.assert_close(itself, expected, rtol=1e-3, atol=1e-3)
