"""Prompts, and what attached models and models alone make of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from openmla.integrations.transformers import attach, attachment_of, detach
from openmla.integrations.transformers.captured import CapturedDecode
from tests.integrations.models import VOCAB


def prompts(lens: tuple[int, ...], seed: int = 0) -> tuple[Tensor, Tensor]:
    """Prompts padded on the left, and their mask."""
    S = max(lens)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, VOCAB, (len(lens), S), generator=generator)
    mask = (torch.arange(S) >= S - torch.tensor(lens)[:, None]).long()
    return ids * mask, mask


def generate(model: Any, ids: Tensor, mask: Tensor | None = None, **options: Any) -> Any:
    """Greedy unless told otherwise; sequences and logits."""
    settings = {"max_new_tokens": 64, "do_sample": False, **options}
    return model.generate(
        ids,
        attention_mask=torch.ones_like(ids) if mask is None else mask,
        output_logits=True,
        return_dict_in_generate=True,
        **settings,
    )


def new_tokens(
    model: Any, ids: Tensor, mask: Tensor | None = None, n: int = 64, **kw: Any
) -> Tensor:
    """What generate() adds to the prompts, up to n tokens a row."""
    mask = torch.ones_like(ids) if mask is None else mask
    options = {"max_new_tokens": n, "do_sample": False, **kw}
    out: Tensor = model.generate(ids, attention_mask=mask, **options)
    return out[:, ids.shape[1] :]


def worst_logits(actual: Any, expected: Any) -> float:
    """The largest relative error of a step."""
    return max(
        float((a - e).norm() / e.norm())
        for a, e in zip(actual.logits, expected.logits, strict=True)
    )


def captured(model: Any) -> CapturedDecode:
    """What records the decode step of an attached model."""
    found = attachment_of(model).captured
    assert isinstance(found, CapturedDecode) and found in attachment_of(model).handles
    return found


def check_ways(model: Any, ids: Tensor, mask: Tensor, *, seed: int, capture: bool) -> None:
    """Greedy, with beams and sampled: the same tokens before and after attach(), and two plans in a
    captured step, one for each kind of layer."""
    ways: tuple[dict[str, Any], ...] = (
        {"n": 24},
        {"n": 8, "num_beams": 3},
        {"n": 12, "do_sample": True},
    )

    def run() -> list[Tensor]:
        torch.manual_seed(seed)
        return [new_tokens(model, ids, mask, **way) for way in ways]

    expected = run()
    attach(model, block_size=4, capture=capture)
    for actual, tokens in zip(run(), expected, strict=True):
        assert torch.equal(actual, tokens)
    if capture:
        assert {len(each.buffers) for each in captured(model).recorded.values()} == {2}
    detach(model)
    assert torch.equal(new_tokens(model, ids, mask, n=4), expected[0][:, :4])
