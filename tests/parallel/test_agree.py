"""Ranks that plan different steps, fail, or do not come: an error that says so, nothing written."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from openmla import Batch, ConfigError, ShapeError
from openmla.parallel import Ranks, plan_over_ranks, rank_buffers
from openmla.plan.workspace import reserve
from tests.parallel.counted import counted_bytes
from tests.parallel.processes import Processes
from tests.parallel.stories import TINY, Story


def planned(story: Story, batch: Batch, **options: Any) -> None:
    """Plans, and shows that nothing is written."""
    assert story.mine.latent is not None
    before = story.mine.latent.data.clone()
    given: dict[str, Any] = {"config": TINY, "cache": story.mine, "ranks": Ranks(dist.group.WORLD)}
    try:
        plan_over_ranks(batch, **given | options)
    finally:
        assert torch.equal(before.view(torch.uint8), story.mine.latent.data.view(torch.uint8))


def differing(rank: int) -> None:
    story, WORLD = Story([1, 2], [9, 11]), dist.group.WORLD
    plain = story.batch
    others: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("seq_lens", {"seq_lens": [9, 12], "slot_mapping": torch.full((3,), -1)}, {}),
        ("query_lens", {"query_lens": [2, 1], "slot_mapping": torch.full((3,), -1)}, {}),
        ("block_table", {"block_table": plain.block_table.flip(0), "slot_mapping": None}, {}),
        ("slot_mapping", {"slot_mapping": torch.full((3,), -1)}, {}),
        ("ranks", {}, {"ranks": Ranks(WORLD, interleave=2)}),
        ("ranks", {}, {"ranks": Ranks(WORLD, schedule="gather")}),
        ("options", {}, {"form": "absorbed"}),
        ("options", {}, {"dtype": torch.float64}),
        ("options", {}, {"backend": "reference"}),
        ("config", {}, {"config": replace(TINY, max_positions=99)}),
    ]
    for name, changed, options in others:
        batch, given = plain, {}
        if rank == 1:
            if "slot_mapping" in changed and changed["slot_mapping"] is None:
                changed["slot_mapping"] = torch.full((3,), -1)
            batch, given = replace(plain, **changed), options
        with pytest.raises(ConfigError, match=f"{name} must be the same .* ranks 0 and 1 differ"):
            planned(story, batch, **given)
    planned(story, plain)  # and all goes on


def test_plans_that_differ(two_ranks: Processes) -> None:
    two_ranks.run(differing)


def reserving(rank: int) -> None:
    """Memory that sets the number and the size of collectives, of another size on rank 1."""
    story, ranks = Story([8, 2], [60, 11]), Ranks(dist.group.WORLD)
    rooms = [
        reserve(
            TINY, story.mine, max_requests=2, max_tokens=10, workspace_tokens=n, dtype=torch.float32
        )
        for n in (8, 16)
    ]
    buffers = [rank_buffers(TINY, story.mine, ranks, max_tokens=n, max_blocks=8) for n in (10, 12)]
    for name, given, options in (
        ("workspace", rooms, {"form": "expanded", "context": "gather"}),
        ("into", buffers, {}),
    ):
        with pytest.raises(ConfigError, match=r"options must be the same .* ranks 0 and 1 differ"):
            planned(story, story.batch, **{name: given[rank]}, **options)
        planned(story, story.batch, **{name: given[0]}, **options)


def test_reserved_memory_that_differs(two_ranks: Processes) -> None:
    two_ranks.run(reserving)


def failing(rank: int) -> None:
    story, WORLD = Story([1, 2], [9, 11]), dist.group.WORLD
    for changed, options, kind, sentence in (
        ({"block_table": story.table + 90}, {}, ShapeError, "block_table"),
        ({}, {"ranks": Ranks(WORLD, 3)}, ConfigError, "divide the block size of 4, got 3"),
        ({}, {"form": "chosen"}, ConfigError, "form must be auto, absorbed or expanded over ranks"),
        ({}, {"backend": "none"}, ConfigError, "backend"),
        ({}, {"workspace": 8}, ConfigError, "workspace must be of type Workspace, got int"),
        ({}, {"into": [1]}, ConfigError, "into must be the buffers of plan_buffers"),
        ({"causal": False, "slot_mapping": None}, {}, ConfigError, "causal=False"),
    ):
        batch = replace(story.batch, **changed) if rank == 1 else story.batch
        if rank == 1:
            with pytest.raises(kind, match=sentence):
                planned(story, batch, **options)
        else:
            with pytest.raises(ConfigError, match="rank 1 could not plan this step"):
                planned(story, batch)
    batch = story.batch
    with pytest.raises(ConfigError, match="cache must be the LayerCache of one layer"):
        planned(story, batch, cache=None)


def test_a_rank_that_fails_does_not_leave_others_waiting(two_ranks: Processes) -> None:
    two_ranks.run(failing)


def refused_ranks(rank: int) -> None:
    for options, sentence in (
        ({"heads": "some"}, "heads must be one of all, own, got 'some'"),
        ({"schedule": 7}, "schedule must be one of auto, gather, exchange, got 7"),
        ({"check": 1}, "check must be True or False, got 1"),
        ({"interleave": 0}, "interleave must be an integer of at least 1, got 0"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            Ranks(dist.group.WORLD, **options)
    with pytest.raises(ConfigError, match="group must be a process group"):
        Ranks(2)
    with pytest.raises(ConfigError, match="ranks must be of type Ranks"):
        planned(Story([1], [1]), Story([1], [1]).batch, ranks=dist.group.WORLD)


def test_bad_ranks_are_refused(two_ranks: Processes) -> None:
    two_ranks.run(refused_ranks)


def unchecked(rank: int) -> None:
    story = Story([1, 2], [9, 11])
    for check, calls in ((True, 1), (False, 0)):
        with counted_bytes() as counted:
            planned(story, story.batch, ranks=Ranks(dist.group.WORLD, check=check))
        assert counted.calls == calls and counted.num_bytes < 128


def test_the_check_is_one_small_message(two_ranks: Processes) -> None:
    two_ranks.run(unchecked)


def late(rank: int) -> None:
    group = dist.new_group([0, 1], timeout=timedelta(seconds=2))
    story = Story([1, 2], [9, 11])
    dist.barrier()
    began = time.monotonic()
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"(?i)timed out|timeout"):
            planned(story, story.batch, ranks=Ranks(group))
        assert time.monotonic() - began < 30
    dist.barrier()


def test_a_rank_that_does_not_come_ends_at_the_timeout(two_ranks: Processes) -> None:
    two_ranks.run(late)
