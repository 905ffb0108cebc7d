"""attach() with dots3: layers of two widths and head counts, some with a sliding window."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")

from openmla.integrations.transformers import attach, attachment_of, detach  # noqa: E402
from tests.integrations.generation import captured, new_tokens, prompts  # noqa: E402
from tests.integrations.models import make_dots3, on  # noqa: E402

W, K = 12, 16
EDGES = (W - 1, W, W + 1, K + 1, 40)  # a left-padded batch of five
ALL_KEYS = {"use_dsa": False}  # full layers instead of indexed ones


@pytest.fixture(autouse=True)
def _no_grad() -> Any:
    with torch.no_grad():
        yield


def relative(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


CASES: dict[str, tuple[int, dict[str, Any], bool]] = {
    "0": (0, {}, False),
    "1": (1, {}, False),
    "2": (2, {}, False),
    "captured": (0, {}, True),
    "full": (0, ALL_KEYS, False),
    "full-captured": (0, ALL_KEYS, True),
}


@pytest.mark.parametrize("case", CASES)
def test_same_tokens(case: str, device: str) -> None:
    """A padded batch, greedy, with beams and sampled, before and after attach()."""
    seed, changes, capture = CASES[case]
    model = make_dots3(seed, **changes).to(device)
    ids, mask = on(device, *prompts(EDGES, seed=seed))
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


@pytest.mark.parametrize("length", [1, W - 1, W, W + 1, K - 1, K, K + 1])
def test_prompts_at_every_edge(length: int, device: str) -> None:
    model = make_dots3(3).to(device)
    ids, mask = on(device, *prompts((length,) * 2, seed=4))
    expected = new_tokens(model, ids, mask, n=8)
    attach(model, block_size=4)
    assert torch.equal(new_tokens(model, ids, mask, n=8), expected)


@pytest.mark.parametrize("chunk", [1, W - 1, W, W + 1, K, 30])
def test_prefill_in_chunks(chunk: int, device: str) -> None:
    model = make_dots3().to(device)
    ids, mask = on(device, *prompts((50,)))
    expected = new_tokens(model, ids, mask, n=3)
    attach(model, block_size=4, workspace=16)
    assert torch.equal(new_tokens(model, ids, mask, n=3, prefill_chunk_size=chunk), expected)


@pytest.mark.parametrize("changes", [{}, ALL_KEYS], ids=["indexed", "full"])
def test_logits_with_and_without_a_cache(changes: dict[str, Any], device: str) -> None:
    model = make_dots3(**changes).to(device)
    ids, mask = on(device, *prompts(EDGES))
    real = mask.bool()
    expected = model(ids, attention_mask=mask, use_cache=False).logits[real]
    attach(model, block_size=4)
    pool = attachment_of(model).pool
    plain = model(ids, attention_mask=mask, use_cache=False).logits[real]
    assert pool.num_free == pool.num_blocks  # a pass without a cache leaves nothing behind
    cached = model(ids, attention_mask=mask, use_cache=True).logits[real]
    assert relative(plain, expected) < 1e-5 and relative(cached, expected) < 1e-5


def test_sequences_packed_into_a_row(device: str) -> None:
    """Positions that begin again separate sequences, and with them their windows."""
    model = make_dots3().to(device)
    ids, _ = on(device, *prompts((41,)))
    positions = torch.cat([torch.arange(17), torch.arange(24)])[None].to(device)
    expected = torch.cat([model(part).logits for part in ids.split([17, 24], 1)], 1)
    attach(model, block_size=4)
    actual = model(ids, position_ids=positions, use_cache=False).logits
    assert relative(actual, expected) < 1e-5


def test_kept_copied_cropped_and_moved_caches(device: str) -> None:
    model = make_dots3().to(device)
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
    model, assistant = make_dots3().to(device), make_dots3(1).to(device)
    ids, mask = on(device, *prompts((30,)))
    options: dict[str, Any] = {"n": 20, "suppress_tokens": [0]}
    expected = new_tokens(model, ids, mask, **options)
    for either in (model, assistant):
        attach(either, block_size=4)
    assert torch.equal(new_tokens(model, ids, mask, assistant_model=assistant, **options), expected)
    looked_up = new_tokens(model, ids, mask, prompt_lookup_num_tokens=3, **options)
    assert torch.equal(looked_up, expected)


def test_a_bf16_model_strays_no_further_than_by_itself() -> None:
    for seed in range(3):
        model = make_dots3(seed)
        ids, mask = prompts((40,) * 5, seed=seed)
        expected = model(ids, attention_mask=mask).logits
        model = model.to(torch.bfloat16)
        plain = model(ids, attention_mask=mask).logits.float()
        tokens = new_tokens(model, ids, mask, n=8)
        attach(model, block_size=4)
        actual = model(ids, attention_mask=mask).logits.float()
        assert relative(actual, expected) < 1.5 * relative(plain, expected)
        assert new_tokens(model, ids, mask, n=8).shape == tokens.shape


@pytest.mark.parametrize("formats", [("bf16", 1e-2), ("fp8", 0.2)], ids=str)
def test_lossy_caches_stay_near(formats: tuple[str, float]) -> None:
    # routed experts would amplify what rounding changes
    model = make_dots3(**ALL_KEYS, mlp_layer_types=["dense"] * 6)
    ids, _ = prompts((40,) * 2)
    expected = model(ids).logits
    attach(model, block_size=4, cache_format=formats[0])
    past = model(ids[:, :30]).past_key_values
    actual = model(ids[:, 30:], past_key_values=past).logits
    assert 0 < relative(actual, expected[:, 30:]) < formats[1]


def test_every_kind_is_explained_and_counted() -> None:
    model = make_dots3()
    attach(model, block_size=4)
    model(prompts((40,))[0], use_cache=True)
    attachment = attachment_of(model)
    shown = str(attachment.explain())
    assert "3 layers of kind 0: 0, 1, 5" in shown and "3 layers of kind 1: 2, 3, 4" in shown
    assert f"each over its last {W} keys" in shown and f"{K} of up to 40 keys" in shown
    # rows of 40 columns and 16 indexer channels, and rows of 60, of the whole context
    assert f"{3 * (40 + 16) * 4} B per token" in shown and f"{3 * 60 * 4} B per token" in shown
    latents = [cache.latent for cache in attachment.caches.values() if cache.latent is not None]
    assert sorted(latent.data.shape[2] for latent in latents) == [40] * 3 + [60] * 3
    assert len({id(each) for each in attachment.last_plans.values()}) == 2
