"""attach() for sparse models: the same tokens as the model alone, around and past the top-k."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import Tensor

from openmla.errors import ConfigError, UnsupportedError

transformers = pytest.importorskip("transformers")

from openmla.integrations.transformers import (  # noqa: E402 - transformers may be missing
    attach,
    attachment_of,
    detach,
)
from tests.integrations.models import SEEDS, SPARSE, K, make_sparse, on  # noqa: E402


def prompts(lens: tuple[int, ...], padding: int = 0, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Rows of these lengths, padded on the left to the longest and `padding` more."""
    S = max(lens) + padding
    generator = torch.Generator().manual_seed(seed)
    ids, mask = torch.zeros(len(lens), S, dtype=torch.long), torch.zeros(len(lens), S).long()
    for b, n in enumerate(lens):
        ids[b, S - n :] = torch.randint(2, 97, (n,), generator=generator)
        mask[b, S - n :] = 1
    return ids, mask


def generate(model: Any, ids: Tensor, mask: Tensor, **options: Any) -> Tensor:
    """New tokens only, so that paddings can be compared."""
    settings = {"max_new_tokens": 64, "do_sample": False, **options}
    out: Tensor = model.generate(ids, attention_mask=mask, **settings)
    return out[:, ids.shape[1] :]


UNEVEN = (60, K, K - 1, K + 1, 3)  # longer than, equal to, around and shorter than K


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("family", SPARSE)
def test_same_tokens(family: str, seed: int, device: str) -> None:
    """64 new tokens for a left-padded batch of five, greedy, in blocks of 4 and of 64."""
    model = make_sparse(family, seed).to(device)
    ids, mask = on(device, *prompts(UNEVEN, seed=seed))
    expected = generate(model, ids, mask)
    # the model agrees with itself under another padding, or nobody could agree with it
    assert torch.equal(
        generate(model, *on(device, *prompts(UNEVEN, padding=7, seed=seed))), expected
    )
    for block_size in (4, 64):
        modules = attachment_of(attach(model, block_size=block_size)).modules
        assert len(modules) == 3
        assert torch.equal(generate(model, ids, mask), expected)
        plan = attachment_of(model).last_plan
        assert plan is not None and plan.select is not None
        detach(model)
    assert torch.equal(generate(model, ids, mask), expected)


@pytest.mark.parametrize("family", SPARSE)
def test_chunk_edges_around_the_top_k(family: str, device: str) -> None:
    model = make_sparse(family).to(device)
    ids, mask = on(device, *prompts((70,)))
    expected = generate(model, ids, mask, max_new_tokens=16)
    attach(model, block_size=4, workspace=16)
    for chunk in (K - 1, K, K + 1, 2 * K, 7):
        actual = generate(model, ids, mask, max_new_tokens=16, prefill_chunk_size=chunk)
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("length", [5, K - 17, K - 16, K, K + 40])
@pytest.mark.parametrize("family", SPARSE)
def test_contexts_that_grow_past_the_top_k(family: str, length: int, device: str) -> None:
    """Short of K throughout, reaching it, starting at it, far past it."""
    model = make_sparse(family, seed=3).to(device)
    ids, mask = on(device, *prompts((length,) * 2, seed=4))
    expected = generate(model, ids, mask, max_new_tokens=16)
    attach(model, block_size=4)
    assert torch.equal(generate(model, ids, mask, max_new_tokens=16), expected)


@pytest.mark.parametrize("family", SPARSE)
def test_logits_with_and_without_a_cache(family: str, device: str) -> None:
    model = make_sparse(family).to(device)
    ids, mask = on(device, *prompts(UNEVEN))
    real = mask.bool()
    with torch.no_grad():
        expected = model(ids, attention_mask=mask, use_cache=False).logits[real]
        attach(model, block_size=4)
        pool = attachment_of(model).pool
        plain = model(ids, attention_mask=mask, use_cache=False).logits[real]
        assert pool.num_free == pool.num_blocks  # a pass without a cache leaves nothing behind
        cached = model(ids, attention_mask=mask, use_cache=True).logits[real]
    assert (plain - expected).norm() < 1e-5 * expected.norm()
    assert (cached - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.parametrize("family", SPARSE)
def test_beams_sampling_and_kept_caches(family: str, device: str) -> None:
    model = make_sparse(family).to(device)
    ids, mask = on(device, *prompts((40, 30)))
    options: dict[str, Any] = {"max_new_tokens": 20}
    beams = generate(model, ids, mask, num_beams=3, **options)
    torch.manual_seed(5)
    sampled = generate(model, ids, mask, do_sample=True, **options)
    first = model(ids, attention_mask=mask, use_cache=True)
    more = torch.randint(2, 97, (2, 5)).to(device)
    longer = torch.cat([mask, torch.ones_like(more)], 1)
    expected = model(more, attention_mask=longer, past_key_values=first.past_key_values).logits
    attach(model, block_size=4)
    assert torch.equal(generate(model, ids, mask, num_beams=3, **options), beams)
    torch.manual_seed(5)
    assert torch.equal(generate(model, ids, mask, do_sample=True, **options), sampled)
    past = model(ids, attention_mask=mask, use_cache=True).past_key_values
    twin = copy.deepcopy(past)
    other = torch.randint(2, 97, (2, 9)).to(device)
    model(other, attention_mask=torch.cat([mask, torch.ones_like(other)], 1), past_key_values=twin)
    actual = model(more, attention_mask=longer, past_key_values=past).logits
    assert (actual - expected).norm() < 1e-5 * expected.norm()
    # speculative tokens taken back: both caches forget them
    past.crop(-5)
    actual = model(more, attention_mask=longer, past_key_values=past).logits
    assert (actual - expected).norm() < 1e-5 * expected.norm()


def test_a_growing_pool_keeps_indexer_keys() -> None:
    model = make_sparse("deepseek_v32")
    ids, mask = prompts((300, 200))
    expected = generate(model, ids, mask, max_new_tokens=8)
    attach(model, block_size=4)
    before = attachment_of(model).pool.num_blocks
    assert torch.equal(generate(model, ids, mask, max_new_tokens=8), expected)
    assert attachment_of(model).pool.num_blocks > before


def test_bytes_in_use_count_the_indexer_keys() -> None:
    model = make_sparse("glm_moe_dsa")
    attach(model, block_size=4, cache_format="bf16", index_format="index_fp8")
    ids, mask = prompts((8,))
    out = model(ids, attention_mask=mask, use_cache=True)
    assert out.past_key_values.get_seq_length() == 8
    # three layers of 40 latent columns, two of them with an indexer of their own
    assert attachment_of(model).used_bytes() == 8 * (3 * 40 * 2 + 2 * (16 + 4))


@pytest.mark.parametrize(
    "formats",
    [("bf16", "index_bf16"), ("fp8", "index_fp8"), ("fp16", "index_fp8_exact")],
    ids=str,
)
def test_lossy_caches_run(formats: tuple[str, str]) -> None:
    model = make_sparse("deepseek_v32")
    ids, mask = prompts((60,))
    attach(model, cache_format=formats[0], index_format=formats[1], block_size=8)
    assert generate(model, ids, mask, max_new_tokens=8).shape == (1, 8)


def test_the_packed_row_of_real_models() -> None:
    """fp8_ds_mla at its own geometry: 512 + 64, near the exact cache in every logit."""
    model = make_sparse("deepseek_v32", kv_lora_rank=512, qk_rope_head_dim=64, index_head_dim=128)
    ids, mask = prompts((60,))
    expected = model(ids, attention_mask=mask, use_cache=False).logits
    attach(model, cache_format="fp8_ds_mla", block_size=8)
    past = transformers.DynamicCache(config=model.config)
    parts = [
        model(ids[:, i : i + 10], attention_mask=mask[:, : i + 10], past_key_values=past).logits
        for i in range(0, 60, 10)
    ]
    actual = torch.cat(parts, 1)
    # before K keys nothing is chosen, so rounding cannot choose differently
    early = (actual - expected)[:, :K].norm() / expected[:, :K].norm()
    assert 1e-4 < early < 0.1
    assert torch.equal(actual.isnan(), torch.zeros_like(actual, dtype=torch.bool))


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("deepseek_v32", {"indexer_rope_interleave": True}),
        ("glm_moe_dsa", {"indexer_rope_interleave": False}),
        ("hy_v4", {"indexer_rope_interleave": True}),
        ("deepseek_v32", {"index_topk_freq": 2}),
        ("axk2", {"indexer_types": ["full", "shared", "full"]}),
    ],
    ids=str,
)
def test_fields_that_transformers_does_not_read(family: str, fields: dict[str, Any]) -> None:
    """Its classes fix the pairing and, some, that every layer has an indexer; so does attach()."""
    model = make_sparse(family, **fields)
    ids, mask = prompts((60,))
    expected = model(ids, attention_mask=mask, use_cache=False).logits
    attach(model, block_size=4)
    actual = model(ids, attention_mask=mask, use_cache=False).logits
    assert (actual - expected).norm() < 1e-5 * expected.norm()


class Adapted(torch.nn.Module):
    """A linear with something added, as adapters do it: the old module is still called."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        self.base, self.weight = base, base.weight
        self.delta = torch.randn(base.weight.shape) * base.weight.shape[1] ** -0.5

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + x @ self.delta.T
        return out


@pytest.mark.parametrize("name", ["wq_b", "weights_proj", "wk"])
def test_adapters_that_come_after_attach(name: str) -> None:
    model = make_sparse("deepseek_v32")
    ids, mask = prompts((60,))
    attach(model, block_size=4)
    model(ids, attention_mask=mask, use_cache=False)
    for layer in model.model.layers:
        indexer = layer.self_attn.indexer
        setattr(indexer, name, Adapted(getattr(indexer, name)))
    actual = model(ids, attention_mask=mask, use_cache=False).logits
    detach(model)
    assert not model.model.layers[0].self_attn.indexer._forward_pre_hooks
    expected = model(ids, attention_mask=mask, use_cache=False).logits
    assert (actual - expected).norm() < 1e-5 * expected.norm()


def test_a_failed_pass_without_a_cache_gives_its_blocks_back() -> None:
    model = make_sparse("deepseek_v32")
    attach(model, block_size=4, num_blocks=24)
    pool = attachment_of(model).pool
    ids, mask = prompts((40,))

    def fail(*_: Any) -> None:
        raise RuntimeError("planted")

    handle = model.model.layers[1].mlp.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="planted"):
        model(ids, attention_mask=mask, use_cache=False)
    gc.collect()
    assert pool.num_free == 24
    with pytest.raises(RuntimeError, match="planted"):
        model.model(ids, attention_mask=mask, use_cache=False)  # past the model's own hooks
    handle.remove()
    generate(model, ids, mask, max_new_tokens=4)


def test_kept_caches_do_not_keep_selections() -> None:
    model = make_sparse("glm_moe_dsa")
    attach(model, block_size=4)
    past = model(prompts((60,))[0], use_cache=True).past_key_values
    assert past.layers[0].session.selection is None


def test_a_copied_model_starts_with_an_empty_pool() -> None:
    model = make_sparse("deepseek_v32")
    ids, mask = prompts((60,))
    expected = generate(model, ids, mask, max_new_tokens=6)
    attach(model, block_size=4)
    kept = model(ids, attention_mask=mask, use_cache=True).past_key_values
    twin = copy.deepcopy(model)
    assert kept.get_seq_length() == 60
    pool = attachment_of(twin).pool
    assert pool.num_free == pool.num_blocks and not attachment_of(twin).caches
    assert torch.equal(generate(twin, ids, mask, max_new_tokens=6), expected)
    assert attachment_of(model).pool.num_free == 64 - 15
    detach(twin)
    assert torch.equal(generate(twin, ids, mask, max_new_tokens=6), expected)
    assert torch.equal(generate(model, ids, mask, max_new_tokens=6), expected)


def test_float64_models() -> None:
    model = make_sparse("deepseek_v32").double()
    ids, mask = prompts((60,))
    expected = model(ids, attention_mask=mask, use_cache=False).logits
    attach(model, cache_format="fp32", block_size=4)
    actual = model(ids, attention_mask=mask, use_cache=False).logits
    assert (actual - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.parametrize("family", SPARSE)
def test_sequences_packed_into_rows(family: str) -> None:
    """Told apart by their positions alone, in a pass without a cache."""
    model = make_sparse(family)
    ids = torch.randint(2, 97, (2, 60), generator=torch.Generator().manual_seed(0))
    positions = torch.stack([torch.arange(60), torch.cat([torch.arange(12), torch.arange(48)])])
    expected = model(ids, position_ids=positions, use_cache=False).logits
    attach(model, block_size=4)
    actual = model(ids, position_ids=positions, use_cache=False).logits
    assert (actual - expected).norm() / expected.norm() < 1e-5
    assert attachment_of(model).pool.num_free == attachment_of(model).pool.num_blocks


def test_refusals() -> None:
    model = make_sparse("deepseek_v32")
    with pytest.raises(ConfigError, match="'bf16' is not known for index rows"):
        attach(model, index_format="bf16")
    with pytest.raises(ConfigError, match="'index_fp8' is not known for latent rows"):
        attach(model, cache_format="index_fp8")
    assert not hasattr(model.model.layers[0].self_attn, "openmla")
    attach(model)
    ids, _ = prompts((30,))
    with pytest.raises(ConfigError, match="'openmla_sparse' but is not attached"):
        type(model)(model.config).eval().requires_grad_(False)(ids)
    square = torch.ones(1, 1, 30, 30, dtype=torch.bool).tril()
    key = "deepseek_sparse_attention"
    if not transformers.__version__.startswith("5.17."):
        key = "indexed_attention"
    with pytest.raises(UnsupportedError, match="masks per query are not supported"):
        model(ids, attention_mask={key: square}, use_cache=False)
    detach(model)
    assert "expand_kv" not in vars(model.model.layers[0].self_attn)


def test_others_are_refused_with_a_reason() -> None:
    model: Any = torch.nn.Module()
    model.config = transformers.CONFIG_MAPPING["glm5_next"]()
    with pytest.raises(
        UnsupportedError, match="glm5_next_text, the text model of glm5_next, is not "
    ):
        attach(model)
