"""Ranks that die or come late in the middle of a step: an error by the timeout, no wrong number."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from openmla.parallel import Ranks, attend_over_ranks, plan_over_ranks
from tests.parallel.processes import Processes
from tests.parallel.stories import Story

pytestmark = pytest.mark.slow
TIMEOUT = 3  # seconds


def begun(group: Any, **options: Any) -> tuple[Story, Any]:
    """A step that all ranks planned."""
    story = Story([1, 2], [9, 11], format="bf16")
    ranks = Ranks(group, **options)
    plan = plan_over_ranks(story.batch, story.config, story.mine, ranks, dtype=story.dtype)
    return story, plan


def attend(story: Story, plan: Any) -> None:
    given = story.projected(story.dtype), story.absorbed(story.dtype)
    attend_over_ranks(*given, story.mine, plan)


def late(rank: int, schedule: str) -> None:
    group = dist.new_group([0, 1], timeout=timedelta(seconds=TIMEOUT))
    story, plan = begun(group, schedule=schedule)
    began = time.monotonic()
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"(?i)timed out|timeout"):
            attend(story, plan)
        assert TIMEOUT - 1 < time.monotonic() - began < 10 * TIMEOUT
    dist.barrier()


@pytest.mark.parametrize("schedule", ["gather", "exchange"])
def test_a_late_rank_ends_at_the_timeout(two_ranks: Processes, schedule: str) -> None:
    two_ranks.run(late, schedule)


def dying(rank: int) -> str:
    story, plan = begun(dist.group.WORLD)
    if rank == 1:
        os._exit(1)
    try:
        attend(story, plan)
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_dead_rank_is_an_error() -> None:
    ranks = Processes(2, timeout=5 * TIMEOUT)
    began = time.monotonic()
    for end in ranks._ends:
        end.send((dying, ()))
    fine, said = ranks._ends[0].recv()
    assert fine and said, "the rank that is left must not go on"
    assert time.monotonic() - began < 60
    ranks._processes[0].kill()  # its group is broken: it would wait for the other at its end
    ranks.close()
