"""Attention masks: columns that are no tokens anywhere, and tokens that are hidden later."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from openmla.errors import ShapeError
from openmla.integrations.transformers import attach, attachment_of
from openmla.integrations.transformers.masks import (
    Begun,
    Runs,
    _hashes,
    add_runs,
    hide_tokens,
    read_mask,
    runs_of,
)
from tests.integrations.models import (
    VOCAB,
    make_model,
    make_sparse,
    make_v4,
    model_of,
    padded_prompts,
)

FAMILIES = ("deepseek_v3", "deepseek_v32")


def positions_of(mask: Tensor) -> Tensor:
    return (mask.cumsum(1) - 1).clamp(min=0)


def test_what_a_mask_says() -> None:
    """Every mask of two rows of four columns, of which two are cached."""
    for bits in range(256):
        mask = torch.tensor([[bits >> (4 * b + j) & 1 for j in range(4)] for b in range(2)])
        cached: list[Runs] = [[(True, 2)], [(False, 1), (True, 1)]]
        if mask[1, 0]:
            with pytest.raises(ShapeError, match=r"attention_mask\[1, 0\] must be 0"):
                read_mask(2, 2, mask, cached)
            continue
        found = read_mask(2, 2, mask, cached)
        if found is None:
            assert mask.tolist() == [[1, 1, 1, 1], [0, 1, 1, 1]]
            continue
        assert torch.equal(found.new, mask[:, 2:].bool())
        assert found.hidden == [
            [p for p in range(2) if not mask[0, p]], [] if mask[1, 1] else [0]
        ]  # fmt: skip


def test_no_mask_is_taken_for_another() -> None:
    """Every mask of six cached columns and a new one, given for every other."""
    columns = [[bool(bits >> j & 1) for j in range(6)] for bits in range(64)]
    for mine in columns:
        for given in columns:
            mask = torch.tensor([[*given, True]])
            if any(b and not a for a, b in zip(mine, given, strict=True)):
                with pytest.raises(ShapeError, match="must be 0: the column was masked"):
                    read_mask(1, 1, mask, [runs_of(mine)])
                continue
            found = read_mask(1, 1, mask, [runs_of(mine)])
            assert (found is None) == (mine == given)
    assert len(_hashes(torch.tensor(columns)).unique()) == 64


@pytest.mark.parametrize("length", [1, 63, 4095, 4097, 10000])
def test_long_masks_are_recognised(length: int) -> None:
    """Over the ends of the tables that say so."""
    gone = length // 3
    cached: list[Runs] = [[(True, length)], [(False, gone), (True, length - gone)]]
    mask = torch.ones(2, length + 1)
    mask[1, :gone] = 0
    assert read_mask(2, 1, mask, cached) is None
    mask[1, -2] = 0
    found = read_mask(2, 1, mask, cached)
    assert found is not None and found.hidden == [[], [length - gone - 1]]


def test_holes_that_move_are_told() -> None:
    """As many as before, and their columns sum up to the same."""
    model = attach(make_model("deepseek_v3"), block_size=4)
    ids, _ = padded_prompts(B=1, S=12)
    mask = torch.ones_like(ids)
    mask[0, 3:5] = 0
    for other in ((2, 5), (1, 6), (0, 7)):
        past = model(ids, attention_mask=mask, position_ids=positions_of(mask)).past_key_values
        moved = torch.ones(1, 13, dtype=mask.dtype)
        moved[0, list(other)] = 0
        with pytest.raises(ShapeError, match=r"attention_mask\[0, 3\] must be 0"):
            model(ids[:, :1], attention_mask=moved, past_key_values=past)


@pytest.mark.parametrize("whole", [True, False])
def test_a_mask_that_was_copied_says_the_same(whole: bool) -> None:
    """As begin_reading() has a GPU do it: once, after its event."""
    cached: list[Runs] = [[(False, 1)], [(True, 1)]]
    for bits in range(64):
        mask = torch.tensor([[bits >> (3 * b + j) & 1 for j in range(3)] for b in range(2)])
        mask[0, 0] = 0
        waited: list[bool] = []
        event = SimpleNamespace(synchronize=lambda: waited.append(True))  # noqa: B023
        mask.openmla_begun = Begun(mask.bool() if whole else _hashes(mask), event, whole)  # type: ignore[attr-defined]
        expected, found = read_mask(2, 2, mask.clone(), cached), read_mask(2, 2, mask, cached)
        assert waited == [True] and not hasattr(mask, "openmla_begun")
        if expected is None:
            assert found is None
            continue
        assert found is not None and torch.equal(found.new, expected.new)
        assert found.hidden == expected.hidden
    full = torch.ones(2, 5)
    full.openmla_begun = Begun(full.bool() if whole else _hashes(full), event, whole)  # type: ignore[attr-defined]
    assert read_mask(2, 5, full, [[], []]) is None


def test_runs_are_added_and_hidden() -> None:
    runs = runs_of([False, True, True, False, True])
    assert runs == [(False, 1), (True, 2), (False, 1), (True, 1)]
    add_runs(runs, [(True, 2), (False, 1)])
    assert runs == [(False, 1), (True, 2), (False, 1), (True, 3), (False, 1)]
    runs = runs_of([False, True, True, False, True])
    assert hide_tokens(runs, [1, 2]) == [(False, 1), (True, 1), (False, 3)]


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_holes(family: str, cached: bool, device: str) -> None:
    """Columns that are no tokens, anywhere: the others see one another and nothing else."""
    model = model_of(family).to(device)
    ids, mask = (part.to(device) for part in padded_prompts(B=3, S=40))
    mask[0, 5] = mask[0, 17:20] = mask[1, 30] = mask[2, ::7] = 0
    expected = model(ids, attention_mask=mask, position_ids=positions_of(mask)).logits
    attach(model, block_size=4)
    ours = model(ids, attention_mask=mask, position_ids=positions_of(mask), use_cache=cached).logits
    torch.testing.assert_close(ours[mask.bool()], expected[mask.bool()], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_columns_that_are_no_tokens_are_as_in_transformers(
    family: str, rows: int, cached: bool, device: str
) -> None:
    """Behind a row's first token: in the middle and on the right, in a batch of any size."""
    model = model_of(family).to(device)
    ids, mask = (part[-rows:].to(device) for part in padded_prompts(B=3, S=40))
    mask[0, 17:20] = mask[0, 30] = mask[:, -4:] = 0
    mask[-1, -9:] = 0
    expected = model(ids, attention_mask=mask, position_ids=positions_of(mask)).logits
    attach(model, block_size=4)
    ours = model(ids, attention_mask=mask, position_ids=positions_of(mask), use_cache=cached).logits
    see = mask.cumsum(1) > 0
    torch.testing.assert_close(ours[see], expected[see], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 2])
def test_a_classifier_may_pool_a_column_that_is_no_token(rows: int) -> None:
    """It takes the last token that is not pad_token_id, whatever the mask says of it."""
    from transformers import DeepseekV3ForSequenceClassification

    torch.manual_seed(0)
    model = DeepseekV3ForSequenceClassification(make_model("deepseek_v3").config).eval()
    ids, mask = (part.flip(1) for part in padded_prompts(B=2))
    ids, mask = ids[-rows:].clamp(min=2), mask[-rows:]
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).logits
        attach(model, block_size=4)
        actual = model(ids, attention_mask=mask).logits
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("keep", [0, 1, 3, torch.tensor([-1])])
@pytest.mark.parametrize("cached", [True, False])
def test_right_padding_is_refused_whatever_generate_keeps(keep: Any, cached: bool) -> None:
    model = attach(make_model("deepseek_v3"))
    ids, mask = (part.flip(1) for part in padded_prompts(B=2))
    options = {"max_new_tokens": 2, "logits_to_keep": keep, "use_cache": cached}
    with pytest.raises(ShapeError, match=r"generate\(\) needs prompts that are padded on the left"):
        model.generate(ids, attention_mask=mask, **options)
    model(ids, attention_mask=mask, logits_to_keep=keep if isinstance(keep, Tensor) else 0)


def test_where_tokens_are_is_uploaded_once_in_a_pass() -> None:
    model = attach(make_model("deepseek_v3"), block_size=4)
    ids, mask = padded_prompts(B=3, S=40)
    elsewhere = torch.device("meta")
    with torch.no_grad():
        past = model(ids, attention_mask=mask).past_key_values
        session = past.layers[0].session
        first = session.picked_on(elsewhere)
        assert first is not None and session.picked_on(elsewhere) is first
        longer = torch.cat([mask, mask.new_ones(3, 1)], dim=1)
        model(ids[:, :1], attention_mask=longer, past_key_values=past)
    assert session.picked_on(elsewhere) is None  # of a pass that has no padding


@pytest.mark.parametrize("last", [0, 1])
@pytest.mark.parametrize("family", FAMILIES)
def test_cached_tokens_hidden_later(family: str, last: int, device: str) -> None:
    """A second turn hides tokens of the first, here and there, and may end in one that is none."""
    model = model_of(family).to(device)
    ids, mask = (part.to(device) for part in padded_prompts(B=3, S=40))
    new = torch.randint(2, VOCAB, (3, 6), generator=torch.Generator().manual_seed(3)).to(device)
    later = torch.cat([mask, torch.ones_like(new)], dim=1)
    later[0, 39] = later[1, 10:22] = later[2, 8] = later[2, 41] = 0
    later[1, -1] = last

    def run() -> Tensor:
        past = model(ids, attention_mask=mask, position_ids=positions_of(mask)).past_key_values
        where = positions_of(later)[:, 40:]
        logits: Tensor = model(
            new, attention_mask=later, position_ids=where, past_key_values=past
        ).logits[:, -1]
        again = torch.cat([later, later.new_ones(3, 1)], dim=1)
        more = model(
            new[:, :1],
            attention_mask=again,
            position_ids=positions_of(again)[:, -1:],
            past_key_values=past,
        ).logits[:, -1]
        return torch.stack([logits, more])

    expected = run()
    attach(model, block_size=4)
    torch.testing.assert_close(run(), expected, rtol=1e-4, atol=1e-4)
    pool = attachment_of(model).pool
    assert pool.num_free == pool.num_blocks


@pytest.mark.parametrize("index_format", ["index_fp8", "index_bf16"])
@pytest.mark.parametrize("format", ["fp8_ds_mla", "bf16"])
def test_rows_move_as_they_are_stored(format: str, index_format: str) -> None:
    """Hiding and showing nothing new: a lossy cache answers as one that never had the tokens."""
    model = make_sparse("deepseek_v32", kv_lora_rank=128, index_head_dim=128)
    attach(model, block_size=4, cache_format=format, index_format=index_format)
    ids, _ = padded_prompts(B=1, S=30)
    shown = torch.ones_like(ids)
    shown[0, 3] = shown[0, 9:14] = 0
    where = torch.arange(30)[None]
    past = model(ids[:, :29], position_ids=where[:, :29]).past_key_values
    hidden = model(
        ids[:, 29:], attention_mask=shown, position_ids=where[:, 29:], past_key_values=past
    ).logits
    kept = shown[0, :29].bool()
    rows = attachment_of(model).caches[0]
    pool = attachment_of(model).pool
    request = pool.requests[0]
    held = int(kept.sum()) + 1
    assert pool.seq_len(request) == held and rows.latent is not None and rows.index is not None
    slots = pool.slot_mapping([(request, 0, held)])  # type: ignore[union-attr]
    fresh = model(ids[:, :29], position_ids=where[:, :29]).past_key_values
    whole = pool.slot_mapping([(fresh.layers[0].session.requests[0], 0, 29)])  # type: ignore[union-attr]
    for part, D in ((rows.latent, 136), (rows.index, 128)):
        one = torch.tensor(1.0)
        wide = part.layout.read(part.data, slots[: held - 1], one, torch.float32, D)
        assert torch.equal(wide, part.layout.read(part.data, whole[kept], one, torch.float32, D))
    assert hidden.isfinite().all()


def test_a_full_pool_hides_nothing() -> None:
    """What cannot be had is told, and the cache is as it was."""
    model = make_model("deepseek_v3")
    attach(model, block_size=4, num_blocks=6)
    ids, mask = padded_prompts(B=1, S=22)
    past = model(ids).past_key_values
    expected = model(ids[:, :1], past_key_values=past).logits
    past.crop(-1)
    later = torch.cat([mask, mask[:, :1]], dim=1)
    later[0, 2] = 0
    from openmla.errors import CacheFullError

    with pytest.raises(CacheFullError):
        model(ids[:, :1], attention_mask=later, past_key_values=past)
    again = model(ids[:, :1], past_key_values=past).logits
    torch.testing.assert_close(again, expected)


@pytest.mark.parametrize("capture", [False, True])
@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3", "deepseek_v32"])
def test_left_padding_column_by_column(family: str, capture: bool, device: str) -> None:
    """prefill_chunk_size=1: padding comes as single columns, which a decode step looks like."""
    model = model_of(family).to(device)
    ids, mask = (part.to(device) for part in padded_prompts(B=3, S=14))
    options = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
    expected = model.generate(ids, **options)
    attach(model, block_size=4, capture=capture)
    assert torch.equal(model.generate(ids, prefill_chunk_size=1, **options), expected)


def test_a_chat_whose_rows_end_at_different_times(device: str) -> None:
    """generate() fills a finished row with pad tokens, which the next turn's mask hides."""
    model = make_model("deepseek_v3").to(device)
    ids, mask = (part.to(device) for part in padded_prompts(B=2, S=12))
    turn = torch.tensor([[0, 8, 9], [11, 12, 13]], device=device)
    ends = torch.tensor([[1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1]], device=device)

    def chat() -> Tensor:
        first = model.generate(
            ids, attention_mask=mask, max_new_tokens=6, do_sample=False,
            return_dict_in_generate=True,
        )  # fmt: skip
        shown = torch.cat([mask, ends, turn.ne(0).long()], dim=1)
        both = torch.cat([first.sequences, turn], dim=1)
        out: Tensor = model.generate(
            both, attention_mask=shown, past_key_values=first.past_key_values,
            max_new_tokens=6, do_sample=False,
        )  # fmt: skip
        return out

    expected = chat()
    attach(model, block_size=4)
    assert torch.equal(chat(), expected)


@pytest.mark.parametrize("same", [False, True])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_assistants_that_draft_pad_tokens(seed: int, same: bool, device: str) -> None:
    """transformers guesses an assistant's mask from its tokens: drafted pads look like padding."""
    model = make_model("deepseek_v3", seed).to(device)
    assistant = make_model("deepseek_v3", seed if same else 7).to(device)
    ids = padded_prompts(B=1, seed=seed)[0].to(device)
    options = {"max_new_tokens": 30, "do_sample": False}
    pad = int(model.generate(ids, **options)[0, ids.shape[1] + 4])
    for either in (model, assistant):
        either.generation_config.pad_token_id = pad
    expected = model.generate(ids, **options)
    assert (expected[0, ids.shape[1] :] == pad).any()
    attach(model, block_size=4)
    attach(assistant, block_size=4)
    ours = model.generate(ids, assistant_model=assistant, **options)
    assert torch.equal(ours, expected)


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("hidden", [range(30, 40), range(10, 14), [0, 1, 2, 20, 38]])
@pytest.mark.parametrize("rows", [1, 2])
def test_v4_takes_prompts_with_columns_that_are_no_tokens(
    rows: int, hidden: Any, kept: bool
) -> None:
    """Tokens are what they are without them, and a kept cache goes on."""
    model = make_v4()
    ids, mask = padded_prompts(B=rows, S=40)
    mask[:] = 1
    mask[0, list(hidden)] = 0
    if kept:
        mask[:, -1] = 1
    shown, first = mask[0].bool(), padded_prompts(B=rows, S=9, seed=5)[0]
    past = None
    if kept:
        alone = model(torch.cat([first[:1], ids[:1, shown]], dim=1)).logits[:, 9:]
    else:
        alone = model(ids[:1, shown]).logits
    attach(model)
    whole = mask
    if kept:
        past = model(first).past_key_values
        whole = torch.cat([torch.ones_like(first), mask], dim=1)
    ours = model(ids, attention_mask=whole, past_key_values=past).logits
    torch.testing.assert_close(ours[:1, shown], alone, rtol=1e-4, atol=1e-4)


def test_v4_generates_from_a_token() -> None:
    model = attach(make_v4())
    ids = padded_prompts(B=1)[0]
    mask = torch.ones_like(ids)
    mask[0, -2:] = 0
    with pytest.raises(ShapeError, match="must be 1 in the last column of every row"):
        model.generate(ids, attention_mask=mask, max_new_tokens=2)


def test_v4_takes_nothing_out() -> None:
    model = make_v4()
    attach(model)
    ids = torch.arange(2, 12)[None]
    past, where = model(ids).past_key_values, torch.tensor([[10]])
    mask = torch.ones(1, 11, dtype=torch.long)
    mask[0, 4] = 0
    with pytest.raises(ShapeError, match="must be 1 for cached tokens of deepseek_v4"):
        model(ids[:, :1], attention_mask=mask, position_ids=where, past_key_values=past)
    mask = torch.ones(1, 11, dtype=torch.long)
    mask[0, -1] = 0
    with pytest.raises(ShapeError, match="must be 1 in the last column of every row"):
        model(ids[:, :1], attention_mask=mask, position_ids=where, past_key_values=past)
