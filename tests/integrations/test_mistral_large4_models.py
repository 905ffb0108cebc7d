"""attach() with Mistral Large 4: layers with and without RoPE, shared latents and selections."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")

from openmla.integrations.transformers import attach, attachment_of  # noqa: E402
from tests.integrations.generation import check_ways, new_tokens, prompts  # noqa: E402
from tests.integrations.models import make_mistral_large4, on  # noqa: E402

K = 16
EDGES = (K - 1, K, K + 1, 3, 40)  # a left-padded batch of five
SHARED: dict[str, Any] = {"kv_source_layers": [0, 1, 0, 1, 0, 1]}
CHOICES = {**SHARED, "indexer_types": ["full", "full", "shared", "full", "shared", "shared"]}
ONE_SELECTS = {"indexer_types": ["full"] + ["shared"] * 5}  # layers without RoPE select no keys
MODELS: dict[str, dict[str, Any]] = {"own": {}, "shared": SHARED, "choices": CHOICES}


@pytest.fixture(autouse=True)
def _no_grad() -> Any:
    with torch.no_grad():
        yield


def relative(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


CASES: dict[str, tuple[int, dict[str, Any], bool]] = {
    "0": (0, {}, False),
    "1-shared": (1, SHARED, False),
    "2-choices": (2, CHOICES, False),
    "captured": (0, {}, True),
    "captured-choices": (1, CHOICES, True),
    "one-selects": (0, ONE_SELECTS, False),
    "captured-one-selects": (2, {**SHARED, **ONE_SELECTS}, True),
}


@pytest.mark.parametrize("case", CASES)
def test_same_tokens(case: str, device: str) -> None:
    """A padded batch, greedy, with beams and sampled, before and after attach()."""
    seed, changes, capture = CASES[case]
    model = make_mistral_large4(seed, **changes).to(device)
    ids, mask = on(device, *prompts(EDGES, seed=seed))
    check_ways(model, ids, mask, seed=seed, capture=capture)


@pytest.mark.parametrize("length", [1, K - 1, K, K + 1])
def test_prompts_at_every_edge(length: int, device: str) -> None:
    model = make_mistral_large4(3, **CHOICES).to(device)
    ids, mask = on(device, *prompts((length,) * 2, seed=4))
    expected = new_tokens(model, ids, mask, n=8)
    attach(model, block_size=4)
    assert torch.equal(new_tokens(model, ids, mask, n=8), expected)


@pytest.mark.parametrize("chunk", [1, K, 30])
def test_prefill_in_chunks(chunk: int, device: str) -> None:
    model = make_mistral_large4(**SHARED).to(device)
    ids, mask = on(device, *prompts((50,)))
    expected = new_tokens(model, ids, mask, n=3)
    attach(model, block_size=4, workspace=16)
    assert torch.equal(new_tokens(model, ids, mask, n=3, prefill_chunk_size=chunk), expected)


@pytest.mark.parametrize("name", MODELS)
def test_logits_with_and_without_a_cache(name: str, device: str) -> None:
    model = make_mistral_large4(**MODELS[name]).to(device)
    ids, mask = on(device, *prompts(EDGES))
    real, positions = mask.bool(), (mask.cumsum(1) - 1).clamp(min=0)
    given = {"attention_mask": mask, "position_ids": positions}  # absolute: they scale queries
    expected = model(ids, **given, use_cache=False).logits[real]
    attach(model, block_size=4)
    pool = attachment_of(model).pool
    plain = model(ids, **given, use_cache=False).logits[real]
    assert pool.num_free == pool.num_blocks  # a pass without a cache leaves nothing behind
    cached = model(ids, **given, use_cache=True).logits[real]
    assert relative(plain, expected) < 1e-5 and relative(cached, expected) < 1e-5


@pytest.mark.parametrize("name", MODELS)
def test_kept_copied_cropped_and_moved_caches(name: str, device: str) -> None:
    model = make_mistral_large4(**MODELS[name]).to(device)
    ids, _ = on(device, *prompts((30,) * 3))
    more, other = (on(device, prompts((9,) * 3, seed=seed)[0])[0] for seed in (7, 8))
    order = torch.tensor([2, 0, 0], device=device)
    expected = model(torch.cat([ids, more], 1)).logits[:, 30:]
    moved = model(torch.cat([ids[order], more], 1)).logits[:, 30:]
    attach(model, block_size=4)
    past = model(ids).past_key_values
    twin = copy.deepcopy(past)
    model(other, past_key_values=twin)
    assert relative(model(more, past_key_values=past).logits, expected) < 1e-5
    past.crop(-9)
    for part, logits in ((more[:, :4], expected[:, :4]), (more[:, 4:], expected[:, 4:])):
        assert relative(model(part, past_key_values=past).logits, logits) < 1e-5
    twin.crop(-9)
    twin.reorder_cache(order)
    assert relative(model(more, past_key_values=twin).logits, moved) < 1e-5
    pool = attachment_of(model).pool
    del past, twin
    assert pool.num_free == pool.num_blocks and not pool.requests


def test_assisted_decoding(device: str) -> None:
    model = make_mistral_large4(**SHARED).to(device)
    assistant = make_mistral_large4(1, **SHARED).to(device)
    ids, mask = on(device, *prompts((30,)))
    options: dict[str, Any] = {"n": 20, "suppress_tokens": [0]}
    expected = new_tokens(model, ids, mask, **options)
    for either in (model, assistant):
        attach(either, block_size=4)
    actual = new_tokens(model, ids, mask, assistant_model=assistant, **options)
    assert torch.equal(actual, expected)


def test_bytes_of_each_kind(device: str) -> None:
    """Layers without RoPE have narrower rows; layers that share latents have none."""
    model = make_mistral_large4(**CHOICES).to(device)
    attach(model, block_size=4)
    model(on(device, prompts((20,))[0])[0])
    caches = attachment_of(model).caches
    assert [caches[n].latent is not None for n in range(6)] == [True, True] + [False] * 4
    assert [caches[n].index is not None for n in range(6)] == [True, True, False, True] + [
        False
    ] * 2
    widths = [caches[n].latent.data.shape[-1] for n in (0, 1)]  # type: ignore[union-attr]
    assert widths == [40, 32]


@pytest.mark.parametrize("name", ["own", "shared"])
def test_bf16_is_as_close_to_fp32_as_transformers(name: str, device: str) -> None:
    """Step by step: in a prefill the projections decide, and both forms round them alike."""
    model = make_mistral_large4(**MODELS[name]).to(device)
    ids, _ = on(device, *prompts((40,) * 3))
    exact = model(ids).logits[:, 20:]
    model = model.bfloat16()

    def error() -> float:
        past = model(ids[:, :20]).past_key_values
        steps = [model(ids[:, t : t + 1], past_key_values=past).logits for t in range(20, 40)]
        return relative(torch.cat(steps, 1).float(), exact)

    theirs = error()
    attach(model, block_size=4)
    assert error() < 1.1 * theirs
