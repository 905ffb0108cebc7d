"""attach() with dots3: layers of two widths and head counts, some with a sliding window."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")

from openmla.errors import ShapeError  # noqa: E402
from openmla.integrations.transformers import attach, attachment_of, detach  # noqa: E402
from openmla.integrations.transformers.attachment import ROLLBACK  # noqa: E402
from tests.integrations.generation import check_ways, new_tokens, prompts  # noqa: E402
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
    check_ways(model, ids, mask, seed=seed, capture=capture)


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
    # rows of 40 columns and 16 indexer channels, and rows of 60
    assert f"{3 * (40 + 16) * 4} B per token of the whole context" in shown
    kept = f"{3 * 60 * 4} B per token of a step and of the {W + ROLLBACK} tokens before it"
    assert kept in shown
    latents = [cache.latent for cache in attachment.caches.values() if cache.latent is not None]
    assert sorted(latent.data.shape[2] for latent in latents) == [40] * 3 + [60] * 3
    assert len({id(each) for each in attachment.last_plans.values()}) == 2


@pytest.mark.parametrize("capture", [False, True])
def test_sliding_layers_keep_a_ring(capture: bool, device: str) -> None:
    """Rows behind the window are recycled: of 130 tokens, sliding layers keep a third."""
    model = make_dots3().to(device)
    ids, mask = on(device, *prompts((50, 47)))
    expected = new_tokens(model, ids, mask, n=80, prefill_chunk_size=20)
    attach(model, block_size=4, capture=capture)
    attachment = attachment_of(model)
    assert torch.equal(new_tokens(model, ids, mask, n=80, prefill_chunk_size=20), expected)
    past = model(ids, attention_mask=mask).past_key_values
    step = torch.ones((2, 1), dtype=torch.int64, device=device)
    for n in range(1, 81):
        longer = torch.cat([mask, step.expand(2, n)], 1)
        model(step, attention_mask=longer, past_key_values=past)
    whole, rows = attachment.pools
    held = -(-(W + ROLLBACK + 1) // 4) + 1
    assert whole.num_blocks - whole.num_free == sum(-(-n // 4) for n in (130, 127))
    assert 2 * (held - 2) <= rows.num_blocks - rows.num_free <= 2 * held
    for layer, cache in attachment.caches.items():
        assert cache.latent is not None
        blocks = (rows if layer in (2, 3, 4) else whole).num_blocks
        assert cache.latent.num_blocks == blocks
    used = (whole.num_blocks - whole.num_free) * 4 * 3 * (40 + 16) * 4
    used += (rows.num_blocks - rows.num_free) * 4 * 3 * 60 * 4
    assert attachment.used_bytes() == used
    del past
    assert all(pool.num_free == pool.num_blocks for pool in attachment.pools)


def test_what_rings_do_not_allow() -> None:
    model = make_dots3()
    ids, mask = prompts((60,))
    attach(model, block_size=4)
    past = model(ids).past_key_values
    with pytest.raises(ShapeError, match=r"can be cut to 0 or 28..60 tokens \(rollback=32\)"):
        past.crop(-40)
    assert past.get_seq_length() == 60
    hidden = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
    hidden[:, 30] = 0
    with pytest.raises(ShapeError, match="rows before the window are gone"):
        model(ids[:, :1], attention_mask=hidden, past_key_values=past)
    past.reset()
    assert relative(model(ids, past_key_values=past).logits, model(ids).logits) < 1e-6


def test_queries_that_only_look(device: str) -> None:
    """Padding columns after a row's tokens look at its window and are not cached."""
    model = make_dots3().to(device)
    ids, _ = on(device, *prompts((40, 40)))
    mask = torch.ones_like(ids)
    mask[0, 30:] = 0
    expected = model(ids[:1, :30]).logits
    attach(model, block_size=4)
    past = model(ids, attention_mask=mask).past_key_values
    actual = model(ids, attention_mask=mask).logits[:1, :30]
    assert relative(actual, expected) < 1e-5
    more, _ = on(device, *prompts((3, 3), seed=5))
    longer = torch.cat([mask, torch.ones_like(more)], 1)
    positions = torch.tensor([[30, 31, 32], [40, 41, 42]], device=device)
    step = {"attention_mask": longer, "position_ids": positions}
    out = model(more, past_key_values=past, **step).logits[:1]
    detach(model)
    alone = model(torch.cat([ids[:1, :30], more[:1]], 1)).logits[:, 30:]
    assert relative(out, alone) < 1e-5
