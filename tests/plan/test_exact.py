"""Batch(exact=): lengths the host knows beside ones only the device does, in one plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from openmla import PRESETS, Batch, ConfigError, ShapeError, allocate_cache, make_plan
from tests.plan import dense, v4
from tests.plan.groups import absorbed_of, expanded_of, forms_of, routes_of

CONFIG, SPARSE = PRESETS["tiny-v3"], PRESETS["tiny-v3.2"]
CACHE, SPARSE_CACHE = (
    allocate_cache(config, num_blocks=256, block_size=4, format="fp32")
    for config in (CONFIG, SPARSE)
)


def mixed(query_lens: list[int], true: list[int], exact: list[bool], slack: int = 3) -> Batch:
    """Requests in blocks for the bounds, `slack` above lengths that are not exact."""
    bounds = [S if known else S + slack for S, known in zip(true, exact, strict=True)]
    batch = dense.make_batch(query_lens, bounds)
    return replace(batch, device_seq_lens=torch.tensor(true, dtype=torch.int32), exact=exact)


def test_exact_requests_keep_their_form() -> None:
    """A prompt is expanded beside drafted rows, as it would be alone; these are absorbed."""
    batch = mixed([2, 200, 1], [90, 300, 50], [False, True, False])
    plan = make_plan(batch, CONFIG, CACHE)
    assert routes_of(plan) == {"absorbed": [0, 2], "expanded": [1]}
    alone = make_plan(dense.make_batch([200], [300]), CONFIG, CACHE)
    lens, expanded = absorbed_of(plan).reads[0].lens, expanded_of(plan)
    assert lens is not None and lens.tolist() == [90, 50]
    assert expanded.route == expanded_of(alone).route == "one-shot"
    assert [chunk.num_keys for chunk in expanded.chunks] == [300]
    text = plan.explain()
    assert "  why     the lengths are known only to the device" in text
    assert "  why     cheaper: 200 new tokens over 300 keys" in text
    assert "of cache per layer: absorbed" in text


def test_absorbed_requests_of_both_kinds_are_explained() -> None:
    text = make_plan(mixed([2, 1], [90, 40], [False, True]), CONFIG, CACHE).explain()
    assert "cheaper: 1 new token over 40 keys" in text
    assert "the lengths of 1 request are known only to the device" in text


def test_exact_prompts_of_sparse_models_may_be_masked() -> None:
    """K = 32: two requests choose, the prompt in the form its cost says."""
    batch = mixed([2, 60, 1, 1], [90, 60, 28, 20], [False, True, False, True])
    plan = make_plan(batch, SPARSE, SPARSE_CACHE)
    alone = make_plan(dense.make_batch([60], [60]), SPARSE, SPARSE_CACHE)
    # 28 of at most 31 keys: no choice
    assert routes_of(plan) == {"absorbed": [2, 3], "chosen": [0], "masked": [1]}
    assert routes_of(alone) == {"masked": [0]}
    assert plan.select is not None
    assert plan.select.row_lens.tolist() == [89, 90, *range(1, 61)]
    assert plan.select.topk_lens.tolist() == [32, 32]
    forced = make_plan(batch, SPARSE, SPARSE_CACHE, form="absorbed")
    assert routes_of(forced)["chosen"] == [0, 1]


def test_exact_slots_are_checked_and_others_are_not() -> None:
    batch = mixed([1, 1], [20, 30], [False, True])
    assert batch.slot_mapping is not None
    for row, refused in ((0, False), (1, True)):
        slots = batch.slot_mapping.clone()
        slots[row] = 200
        changed = replace(batch, slot_mapping=slots)
        if refused:
            with pytest.raises(ShapeError, match="slot_mapping must agree with block_table"):
                make_plan(changed, CONFIG, CACHE)
        else:
            make_plan(changed, CONFIG, CACHE)


@pytest.mark.parametrize("ratio", [0, 4, 128])
def test_v4_checks_exact_requests(ratio: int) -> None:
    """One route serves all, so exact lengths change no number, but rings are looked at."""
    cache = v4.make_cache(ratio)
    lens: Any = {"device_seq_lens": torch.tensor([117, 144], dtype=torch.int32)}
    batch = v4.make_batch(cache, [1, 3], [120, 144], exact=[False, True], **lens)
    plan = make_plan(batch, v4.CONFIG, cache)
    plain = make_plan(replace(batch, exact=None), v4.CONFIG, cache)
    assert plan.shared is not None and plain.shared is not None
    assert plan.shared.positions.tolist() == [116, 141, 142, 143]
    assert torch.equal(plan.slot_mapping, plain.slot_mapping)
    assert batch.window_table is not None
    for row, refused in ((0, False), (1, True)):
        ring = batch.window_table.clone()
        ring[row, 128 // v4.BS % ring.shape[1]] = (
            99999  # of positions 128.., which request 1 writes
        )
        changed = replace(batch, window_table=ring)
        if refused:
            with pytest.raises(ShapeError, match=r"window_table\[1, 2\] must be a block"):
                make_plan(changed, v4.CONFIG, cache)
        else:
            make_plan(changed, v4.CONFIG, cache)


GOOD = mixed([1, 2], [12, 8], [False, True])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"exact": [True]}, "exact must have B=2 booleans, got 1."),
        ({"exact": [True, 1]}, "exact must be a list of booleans, got [True, 1]."),
        ({"exact": True}, "exact must be a list of booleans, got True."),
        ({"exact": torch.ones(2)}, "exact must be a list of booleans, got tensor([1., 1.])."),
        ({"device_seq_lens": None}, "exact must be None"),
    ],
)
def test_bad_flags(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ShapeError) as error:
        replace(GOOD, **changes)
    assert str(error.value).startswith(f"batch: {message}")


def test_flags_may_be_a_host_tensor() -> None:
    flags: Any = torch.tensor([False, True])
    assert replace(GOOD, exact=flags).exact == (False, True)
    assert replace(GOOD, exact=(False, False)).bounded == {0, 1}
    assert "lengths of 1 requests on the device" in repr(GOOD)


@pytest.mark.parametrize(
    ("lens", "message"),
    [
        ([12, 7], "device_seq_lens[1] must be 8, as in seq_lens, got 7."),
        ([16, 8], "device_seq_lens[0] must be within 0..15, got 16."),
        ([-1, 8], "device_seq_lens[0] must be within 0..15, got -1."),
    ],
)
def test_lengths_that_can_be_looked_at_are(lens: list[int], message: str) -> None:
    batch = replace(GOOD, device_seq_lens=torch.tensor(lens, dtype=torch.int32))
    with pytest.raises(ShapeError) as error:
        make_plan(batch, CONFIG, CACHE)
    assert str(error.value).startswith(f"batch: {message}")
    cache = v4.make_cache(0)
    bounds = [15, 8]
    given: Any = {"device_seq_lens": torch.tensor(lens, dtype=torch.int32), "exact": [False, True]}
    with pytest.raises(ShapeError) as error:
        make_plan(v4.make_batch(cache, [1, 2], bounds, **given), v4.CONFIG, cache)
    assert str(error.value).startswith(f"batch: {message}")


def test_expanded_needs_exact_lengths() -> None:
    with pytest.raises(ConfigError) as error:
        make_plan(mixed([1, 2], [8, 12], [True, False]), CONFIG, CACHE, form="expanded")
    assert str(error.value) == (
        "plan: form must not be 'expanded' for requests whose length only the device knows, got "
        "request 1. Set exact=True for it in the batch, or use form='auto'."
    )
    plan = make_plan(mixed([2, 2], [8, 12], [True, True]), CONFIG, CACHE, form="expanded")
    assert forms_of(plan) == {"expanded"}
