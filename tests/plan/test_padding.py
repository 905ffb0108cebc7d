"""Batch(padding=): tokens of no request, and requests of no tokens, in plans of every kind."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from openmla import PRESETS, Batch, LayerCache, MLAConfig, ShapeError, allocate_cache, make_plan
from tests.plan import dense, v4
from tests.plan.groups import absorbed_of, forms_of, routes_of

KINDS = ("tiny-v3", "tiny-v3.2", "tiny-minicpm3", 0, 4, 128)  # presets, V4's compress ratios


def make_step(
    kind: str | int, query_lens: list[int], seq_lens: list[int], padding: int
) -> tuple[Batch, MLAConfig, LayerCache]:
    if isinstance(kind, int):
        cache = v4.make_cache(kind)
        return v4.make_batch(cache, query_lens, seq_lens, padding=padding), v4.CONFIG, cache
    config, batch = PRESETS[kind], dense.make_batch(query_lens, seq_lens)
    assert batch.slot_mapping is not None
    slots = torch.cat([batch.slot_mapping, torch.full((padding,), -1)])
    cache = allocate_cache(config, num_blocks=128, block_size=4, format="fp32")
    return replace(batch, slot_mapping=slots, padding=padding), config, cache


@pytest.mark.parametrize("kind", KINDS)
def test_padding_adds_rows_that_belong_to_nobody(kind: str | int) -> None:
    batch, config, cache = make_step(kind, [1, 2, 0], [9, 140, 0], 4)
    plan = make_plan(batch, config, cache)
    assert plan.num_tokens == batch.num_tokens == 7 and plan.slot_mapping.shape == (7,)
    assert plan.slot_mapping[3:].tolist() == [-1] * 4 and bool((plan.slot_mapping[:3] >= 0).all())
    assert forms_of(plan) <= {"absorbed", "chosen"}
    for form in forms_of(plan):
        assert all(int(start_loc[-1]) <= 3 for start_loc in absorbed_of(plan, form).start_locs)
    if plan.shared is not None:
        assert int(plan.shared.query_start_loc[-1]) == 3
        assert plan.shared.positions.shape == (7,)
    assert plan.padding == (0 if isinstance(kind, int) else 4)  # V4's only group has it
    assert "padding   4 tokens of no request: reads nothing, outputs 0" in plan.explain()
    assert "3 query tokens and 4 of padding" in repr(batch)


@pytest.mark.parametrize("device_lens", [False, True])
def test_longrope_turns_padding_by_no_offset(device_lens: bool) -> None:
    batch, config, cache = make_step("tiny-minicpm3", [1, 2], [9, 40], 3)
    config = replace(config, rope=replace(config.rope, original_positions=16))
    if device_lens:
        batch = replace(batch, device_seq_lens=torch.tensor([9, 40], dtype=torch.int32))
    offsets = make_plan(batch, config, cache).rope_offsets
    assert offsets is not None
    assert offsets.tolist() == [0, *[config.max_positions] * 2, 0, 0, 0]


@pytest.mark.parametrize("kind", KINDS)
def test_the_rest_of_a_plan_is_as_without(kind: str | int) -> None:
    padded, plain = (make_plan(*make_step(kind, [1, 2], [9, 140], count)) for count in (5, 0))
    if not isinstance(kind, int):  # V4's only group has its padding
        assert repr(padded.groups) == repr(plain.groups)
        assert repr(padded.select) == repr(plain.select)
    assert routes_of(padded) == routes_of(plain) and padded.backends == plain.backends
    assert torch.equal(padded.slot_mapping[:3], plain.slot_mapping)


@pytest.mark.parametrize("device_lens", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_request_of_no_tokens_needs_no_blocks(kind: str | int, device_lens: bool) -> None:
    """Whatever length it has, its row of the table is not looked at."""
    batch, config, cache = make_step(kind, [1, 0, 2], [9, 40, 140], 0)
    table = batch.block_table.clone()
    table[1] = -1
    changes: dict[str, Any] = {"block_table": table}
    if device_lens:
        changes["device_seq_lens"] = torch.tensor([9, 40, 140], dtype=torch.int32)
    plan = make_plan(replace(batch, **changes), config, cache)
    if kind == "tiny-v3":
        lens = absorbed_of(plan).reads[0].lens
        assert lens is not None and lens.tolist() == [9, 0, 140]


GOOD = dense.make_batch([1, 2], [5, 8])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"padding": -1}, "padding must be an integer of at least 0, got -1."),
        ({"padding": 1.0}, "padding must be an integer of at least 0, got 1.0."),
        ({"padding": True}, "padding must be an integer of at least 0, got True."),
        ({"padding": None}, "padding must be an integer of at least 0, got None."),
        ({"padding": 2}, "slot_mapping must be [T] int64 with T=5, got (3,) torch.int64."),
    ],
)
def test_bad_padding(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ShapeError) as error:
        replace(GOOD, **changes)
    assert str(error.value) == f"batch: {message}"


def test_padding_must_not_be_written() -> None:
    """Even to a slot that is free."""
    config = PRESETS["tiny-v3"]
    cache = allocate_cache(config, num_blocks=64, block_size=4, format="fp32")
    assert GOOD.slot_mapping is not None and cache.latent is not None
    kept = cache.latent.data.clone()
    batch = replace(
        GOOD, padding=2, slot_mapping=torch.cat([GOOD.slot_mapping, torch.tensor([-1, 77])])
    )
    with pytest.raises(ShapeError) as error:
        make_plan(batch, config, cache)
    assert str(error.value) == (
        "batch: slot_mapping must be -1 for the last 2 tokens (padding), got 77."
    )
    assert torch.equal(cache.latent.data, kept)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("padding", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_no_requests_whose_lengths_are_on_the_device(
    kind: str | int, padding: int, compiled: bool
) -> None:
    batch, config, cache = make_step(kind, [], [], padding)
    for lens in (None, torch.zeros(0, dtype=torch.int32)):
        batch = replace(batch, device_seq_lens=lens)
        plan = make_plan(batch, config, cache, compiled=compiled)
        assert plan.num_tokens == padding and plan.slot_mapping.tolist() == [-1] * padding
        assert plan.explain()
