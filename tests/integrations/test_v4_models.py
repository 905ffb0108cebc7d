"""attach() on DeepSeek V4: the same tokens as transformers, whose padded batches are wrong."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor

from openmla import CacheFullError, ConfigError, ShapeError

transformers = pytest.importorskip("transformers")

from openmla.integrations.transformers import attach, attachment_of, detach  # noqa: E402
from tests.integrations.generation import new_tokens, prompts  # noqa: E402
from tests.integrations.models import VOCAB, make_v4, on  # noqa: E402


@pytest.fixture(autouse=True)
def _no_grad() -> Any:
    with torch.no_grad():
        yield


@pytest.mark.parametrize("seed, S", [(0, 600), (1, 130), (2, 3), (3, 257)])
def test_generates_what_transformers_does(seed: int, S: int, device: str) -> None:
    model = make_v4(seed).to(device)
    ids, _ = on(device, *prompts((S,) * 4, seed))
    expected = new_tokens(model, ids)
    attach(model)
    assert torch.equal(new_tokens(model, ids), expected)
    detach(model)
    assert torch.equal(new_tokens(model, ids, n=8), expected[:, :8])


@pytest.mark.parametrize("seed, lens", [(0, (600, 5, 129, 372)), (1, (1, 127, 128, 200))])
def test_padded_rows_are_the_rows_alone(seed: int, lens: tuple[int, ...], device: str) -> None:
    """Against one unpadded row at a time: transformers' own padded batch is not the same."""
    model = make_v4(seed).to(device)
    ids, mask = on(device, *prompts(lens, seed))
    rows = [ids[b : b + 1, -n:] for b, n in enumerate(lens)]
    expected = [new_tokens(model, row)[0] for row in rows]
    logits = [model(row).logits[0] for row in rows]
    attach(model)
    actual = new_tokens(model, ids, mask)
    for b in range(len(lens)):
        assert torch.equal(actual[b], expected[b])
    for options in ({}, {"use_cache": False}):
        whole = model(ids, attention_mask=mask, **options).logits
        for b, n in enumerate(lens):
            assert relative(whole[b, -n:], logits[b]) < 1e-5


def relative(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


@pytest.mark.parametrize("steps", [(127, 1, 1, 71), (128, 4, 68), (3, 1, 120, 76), (1,) * 20])
def test_prefill_in_any_chunks_equals_one_pass(steps: tuple[int, ...], device: str) -> None:
    model = make_v4().to(device)
    ids, _ = on(device, *prompts((sum(steps),) * 2))
    expected = model(ids, use_cache=False).logits
    attach(model)
    past, parts, start = None, [], 0
    for n in steps:
        out = model(ids[:, start : start + n], past_key_values=past, use_cache=True)
        past, start = out.past_key_values, start + n
        parts.append(out.logits)
    assert relative(torch.cat(parts, 1), expected) < 1e-5


@pytest.mark.parametrize("terms", [{}, {"attention_factor": 1.5}], ids=str)
def test_a_nested_yarn_scales_entries_as_the_model_does(terms: dict[str, float]) -> None:
    yarn = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 256}
    share = {"partial_rotary_factor": 0.25}
    ropes = {
        "main": {"rope_type": "default", "rope_theta": 10000.0, **share},
        "compress": {**yarn, "rope_theta": 160000.0, **share, **terms},
    }
    model = make_v4(rope_scaling=None, rope_parameters=ropes)
    ids, _ = prompts((150, 150))
    expected = model(ids, use_cache=False).logits
    attach(model)
    assert relative(model(ids).logits, expected) < 1e-5


def test_rows_move_repeat_copy_and_crop() -> None:
    """What a cache is asked for by beams, candidates and assistants; states move with the rows."""
    model = make_v4()
    ids, _ = prompts((150,) * 3)
    more, _ = prompts((9,) * 4, seed=7)
    plain = deepcopy(model)
    attach(model)
    past = model(ids).past_key_values
    kept = deepcopy(past)
    past.reorder_cache(torch.tensor([2, 0, 0]))
    past.batch_repeat_interleave(2)
    past.batch_select_indices(torch.tensor([0, 2, 3, 5]))
    order = [2, 0, 0, 0]
    for part in (more[:, :4], more[:, 4:]):
        logits = model(part, past_key_values=past).logits
    expected = plain(torch.cat([ids[order], more], 1)).logits
    assert relative(logits, expected[:, -5:]) < 1e-5
    past.crop(-8)
    again = model(more[:, 1:], past_key_values=past).logits
    assert relative(again, expected[:, -8:]) < 1e-5
    with pytest.raises(ShapeError, match=r"can be cut to 0 or \d+..159 tokens \(rollback=32\)"):
        past.crop(-100)
    assert past.get_seq_length() == 159
    token = model(more[:1, :1].expand(3, 1), past_key_values=kept).logits
    alone = plain(torch.cat([ids, more[:1, :1].expand(3, 1)], 1)).logits
    assert relative(token, alone[:, -1:]) < 1e-5
    pool = attachment_of(model).pool
    del past, kept
    assert pool.num_free == pool.num_blocks and not pool.requests


def test_beams(device: str) -> None:
    """Beam search: the best beams have the scores that they have alone, and are those of
    transformers, whose V4 cache reorders beams since 5.23 (5.22 is wrong)."""
    model = make_v4(5).to(device)
    ids, _ = on(device, *prompts((40, 40)))
    plain = deepcopy(model)
    attach(model)
    if tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 23):
        expected = new_tokens(plain, ids, num_beams=3)
        assert torch.equal(expected, new_tokens(plain, ids, num_beams=3, use_cache=False))
        assert torch.equal(new_tokens(model, ids, num_beams=3), expected)
    options = {"num_beams": 3, "return_dict_in_generate": True, "output_scores": True}
    out = model.generate(ids, max_new_tokens=12, do_sample=False, **options)
    logits = plain(out.sequences[:, :-1]).logits[:, 39:].log_softmax(-1)
    chosen = logits.gather(2, out.sequences[:, 40:, None])[..., 0]
    assert torch.allclose(chosen.sum(1) / 12, out.sequences_scores, atol=1e-5)


def test_recycled_windows_and_bytes() -> None:
    """Raw rows do not grow with the context; everything comes back."""
    model = make_v4()
    attach(model)
    attachment = attachment_of(model)
    ids, _ = prompts((700,))
    past = model(ids).past_key_values
    model(ids[:, :1], past_key_values=past)
    entries, rows, states = attachment.pools
    assert rows.num_blocks - rows.num_free <= 3
    assert states.num_blocks - states.num_free == 1
    assert entries.num_blocks - entries.num_free == 3
    used = sum(
        count * part.data[0].numel() * part.data.element_size()
        for cache in attachment.caches.values()
        for part, count in (
            (cache.compressed, 3),
            (cache.index, 3),
            (cache.window, rows.num_blocks - rows.num_free),
            (cache.state, 1),
        )
        if part is not None
    )
    assert attachment.used_bytes() == used
    past.reset()
    assert attachment.used_bytes() == 0
    plan = attachment.last_plan
    assert plan is not None and "entries" in plan.explain()


@pytest.mark.parametrize("format, bound", [("bf16", 2e-2), ("fp8_dsv4", 0.15), ("fp16", 3e-3)])
def test_cache_formats(format: str, bound: float) -> None:
    model = make_v4(head_dim=128, qk_rope_head_dim=64, index_head_dim=64, num_hidden_layers=3)
    ids, _ = prompts((200, 200))
    expected = model(ids).logits
    attach(model, cache_format=format)
    past = model(ids[:, :190]).past_key_values
    actual = model(ids[:, 190:], past_key_values=past).logits
    assert 0 < relative(actual, expected[:, 190:]) < bound


def test_bf16_model_runs_near_float32() -> None:
    model = make_v4(1, num_hidden_layers=3)
    ids, _ = prompts((140,))
    expected = model(ids).logits
    model = model.to(torch.bfloat16)
    plain = model(ids).logits.float()
    attach(model)
    actual = model(ids).logits.float()
    # top-k flips make either stray; ours must not stray more
    assert relative(actual, expected) < 1.5 * relative(plain, expected)


@pytest.mark.parametrize("capture", [None, True])
def test_the_plans_of_a_pass_share_their_tensors(capture: bool | None) -> None:
    model = make_v4()
    attach(model, capture=capture)
    ids, mask = prompts((20, 13))
    past = model.generate(
        ids, attention_mask=mask, max_new_tokens=3, return_dict_in_generate=True
    ).past_key_values
    plans = list(past.layers[0].session.plans.values())
    assert sorted(plan.ratio for plan in plans) == [0, 4, 128]
    for name in ("positions", "window_table", "block_table", "state_slots", "query_start_loc"):
        assert len({id(getattr(plan.shared, name)) for plan in plans}) == 1, name
    assert len({id(plan.slot_mapping) for plan in plans}) == 1


def test_a_pass_that_failed() -> None:
    """What a failed pass leaves is not taken for another's; its cache says what happened to it."""
    model = make_v4()
    ids, _ = prompts((20, 20))
    expected = model(ids).logits
    attach(model)
    past = model(ids[:, :12]).past_key_values
    handle = model.model.layers[2].mlp.register_forward_pre_hook(_fail)
    with pytest.raises(RuntimeError, match="planted"):
        model(ids[:, 12:], past_key_values=past)
    with pytest.raises(RuntimeError, match="planted"):
        model(ids, use_cache=False)
    handle.remove()
    assert relative(model(ids).logits, expected) < 1e-5
    model.model(ids, use_cache=False)
    assert attachment_of(model).current.own_cache is None
    with pytest.raises(ConfigError, match="the last forward pass with this cache failed"):
        model(ids[:, 12:], past_key_values=past)
    past.reset()
    assert relative(model(ids, past_key_values=past).logits, expected) < 1e-5
    with pytest.raises(ShapeError, match=r"rows of the cache must be in 0\.\.1, got 5"):
        past.reorder_cache(torch.tensor([0, 5]))
    del past
    assert not attachment_of(model).pool.requests


def test_a_mask_by_position_and_of_the_inner_model() -> None:
    model = make_v4()
    ids, mask = prompts((40, 30))
    expected = model(ids[1:, 10:]).logits[0]
    inner = model.model(ids[1:, 10:]).last_hidden_state[0]
    attach(model)
    assert relative(model(ids, mask).logits[1, 10:], expected) < 1e-5
    actual = model.model(ids, attention_mask=mask).last_hidden_state[1, 10:]
    assert relative(actual, inner) < 1e-5
    with pytest.raises(TypeError, match="multiple values"):
        model(ids, mask, input_ids=ids)


def test_a_row_of_padding_only() -> None:
    """Its tokens mean nothing; the other rows' are what they are without it."""
    model = make_v4()
    ids, mask = prompts((40, 30))
    mask[1] = 0
    expected = new_tokens(model, ids[:1], n=8)
    attach(model)
    assert torch.equal(new_tokens(model, ids, mask, n=8)[:1], expected)
    beams: dict[str, Any] = {"num_beams": 2, "n": 4}
    assert torch.equal(
        new_tokens(model, ids, mask, **beams)[:1], new_tokens(model, ids[:1], **beams)
    )


@pytest.mark.parametrize("capture", [False, True])
def test_past_the_positions_of_the_config(capture: bool) -> None:
    model = make_v4(max_position_embeddings=64)
    ids, _ = prompts((60,))
    expected = new_tokens(model, ids, n=80)
    attach(model, capture=capture)
    assert torch.equal(new_tokens(model, ids, n=80), expected)


def _fail(*args: Any) -> None:
    raise RuntimeError("planted")


def test_bad_input() -> None:
    model = make_v4()
    with pytest.raises(ConfigError, match="block_size must be a multiple of 128 for deepseek_v4"):
        attach(model, block_size=64)
    with pytest.raises(ConfigError, match="format fp8_dsv4 needs rows of a multiple of 64"):
        attach(model, cache_format="fp8_dsv4")
    with pytest.raises(ConfigError, match=r"workspace .*deepseek_v4"):
        attach(model, workspace=512)
    attach(model, num_blocks=2)
    ids, mask = prompts((20, 12))
    with pytest.raises(ShapeError, match=r"row 0 continues at 0 with 20 tokens, got \[1, 2, 3, 4"):
        model(ids, position_ids=torch.arange(1, 21)[None].expand(2, -1))
    with pytest.raises(CacheFullError, match="needs 1 more block, and 0 of 2 are free"):
        model(prompts((9, 9, 9))[0])
    assert attachment_of(model).pool.num_free == 2
    past = model(ids, attention_mask=mask).past_key_values
    with pytest.raises(ShapeError, match="must have as many rows as the cache, 2, got 1"):
        model(ids[:1, :1], past_key_values=past)
    full = transformers.DynamicCache(config=model.config)
    detach(model)
    model(ids, past_key_values=full)
    attach(model)
    with pytest.raises(ConfigError, match="this cache has 20 tokens from before attach"):
        model(ids[:, :1], past_key_values=full)
    detach(model)
    assert "forward" not in vars(model.model.layers[1].self_attn.compressor)
    assert model(ids).logits.shape == (2, 20, VOCAB)
