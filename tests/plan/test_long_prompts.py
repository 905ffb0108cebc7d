"""Slots of long prompts, which no loop looks at one by one: checked as short ones are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from openmla import PRESETS, Batch, allocate_cache, make_plan
from openmla.errors import ShapeError
from openmla.plan import checks

BS, LENS, NEW = 16, (900, 40, 700), (850, 1, 700)


def planned(change: Callable[[Tensor, Tensor], object] = lambda slots, table: None) -> Batch:
    """Three requests, the first with context; `change` may spoil the slots or the table."""
    config = PRESETS["deepseek-v2-lite"]
    columns = [-(-S // BS) for S in LENS]
    table = torch.full((3, max(columns)), -1, dtype=torch.int32)
    blocks = torch.randperm(sum(columns), generator=torch.Generator().manual_seed(0)).int()
    for row, mine in zip(table, blocks.split(columns), strict=True):
        row[: len(mine)] = mine
    slots = torch.cat(
        [
            row[places // BS].long() * BS + places % BS
            for row, n, S in zip(table, NEW, LENS, strict=True)
            for places in [torch.arange(S - n, S)]
        ]
    )
    change(slots, table)
    batch = Batch(list(NEW), list(LENS), table, slots)
    cache = allocate_cache(config, num_blocks=sum(columns), block_size=BS, format="bf16")
    make_plan(batch, config, cache[0] if isinstance(cache, list) else cache)
    return batch


def test_slots_that_follow_the_table_are_a_plain_prompt() -> None:
    batch = planned()
    assert batch.slot_mapping is not None
    assert checks._is_plain_prompt(batch, batch.slot_mapping, BS)


def test_rows_that_are_not_written() -> None:
    planned(lambda slots, table: slots[100:200].fill_(-1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda slots, table: slots[700:].sub_(1), "slot_mapping must agree|each slot once"),
        (lambda slots, table: slots[5:6].copy_(slots[9:10]), "slot_mapping must name each slot"),
        (lambda slots, table: slots[3:4].fill_(10**6), "slot_mapping must be below"),
        (lambda slots, table: table[2, :1].copy_(table[0, 8:9]), "slot_mapping must agree"),
        (lambda slots, table: table[2, :1].fill_(5000), "must be a block of the cache"),
    ],
)
def test_bad_slots_are_refused(change: Callable[[Tensor, Tensor], object], message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        planned(change)
