"""Context gathered from ranks is kept in one buffer for all layers, plans and steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from openmla.errors import ConfigError
from openmla.integrations.transformers import attach, attachment_of
from openmla.parallel import RankPlan, Ranks, attend_over_ranks, plan_over_ranks
from openmla.plan.workspace import reserve
from tests.integrations.generation import prompts
from tests.integrations.models import make_model
from tests.layers.v4 import make_layer, tiny_config
from tests.parallel.counted import GATHERS
from tests.parallel.parts import context_of, gathered_chunks
from tests.parallel.processes import Processes
from tests.parallel.stories import TINY, Story
from tests.parallel.v4 import Both


@contextmanager
def gathered_tensors() -> Iterator[list[Tensor]]:
    """What this rank brings to all-gathers and receives, kept alive so that no address comes
    twice by chance."""
    seen: list[Tensor] = []
    name = next(name for name in GATHERS if hasattr(dist, name))
    original = getattr(dist, name)

    def called(received: Tensor, sent: Tensor, **options: Any) -> Any:
        seen.extend([received, sent])
        return original(received, sent, **options)

    with patch.object(dist, name, called):
        yield seen


def storages(tensors: list[Tensor]) -> dict[int, int]:
    """Bytes, by address."""
    kept = [tensor.untyped_storage() for tensor in tensors]
    return {storage.data_ptr(): storage.nbytes() for storage in kept}


def plan_of(story: Story, ranks: Ranks, **options: Any) -> RankPlan:
    asked = {"form": "expanded", "context": "gather", "dtype": story.dtype, **options}
    return plan_over_ranks(story.batch, story.config, story.mine, ranks, **asked)


def attend(story: Story, plan: RankPlan) -> Tensor:
    dtype = story.dtype
    return attend_over_ranks(story.projected(dtype), story.absorbed(dtype), story.mine, plan)


def dense_layers(rank: int) -> None:
    """Three layers and steps of several lengths, each in several chunks."""
    ranks = Ranks(dist.group.WORLD, check=False)
    with gathered_tensors() as seen:
        for lens in (([20, 9], [60, 40]), ([3, 30], [90, 31]), ([7, 1], [10, 2])):
            story = Story(*lens)
            plan = plan_of(story, ranks, workspace_tokens=24)
            for _ in range(3):
                attend(story, plan)
    found = storages(seen)
    assert len(found) == 1, f"{len(found)} buffers for {len(seen) // 2} gathers"
    assert sum(found.values()) == ranks.workspace.num_bytes


def test_dense_layers_and_steps_share_a_buffer(two_ranks: Processes) -> None:
    two_ranks.run(dense_layers)


def reserved(rank: int) -> None:
    """A workspace of warmup() has the rows in order, so that only what is exchanged is added."""
    story, outs, sizes = Story([20, 9], [60, 40]), [], []
    for n in (8, 4):
        space = reserve(
            TINY, story.mine, max_requests=2, max_tokens=29, workspace_tokens=n, dtype=torch.float32
        )
        if n == 4:
            with pytest.raises(ConfigError, match="workspace must have at least 8 rows"):
                plan_of(story, Ranks(dist.group.WORLD), workspace=space)
            plan = plan_of(story, Ranks(dist.group.WORLD), workspace=space, context="auto")
            assert context_of(plan) is not None and not gathered_chunks(plan)
            continue
        for options in ({"workspace": space}, {"workspace_tokens": n}):
            ranks = Ranks(dist.group.WORLD)
            outs.append(attend(story, plan_of(story, ranks, **options)))
            sizes.append(ranks.workspace.num_bytes)
    assert torch.equal(*outs)
    assert sizes[1] - sizes[0] == -(-8 * TINY.latent_dim * 4 // 256) * 256


def test_a_reserved_workspace_is_used(two_ranks: Processes) -> None:
    two_ranks.run(reserved)


def v4_layers(rank: int) -> None:
    """Steps over one context; the buffer grows where a context needs twice as many blocks."""
    both = Both(make_layer(tiny_config(), 4), context="gather", ranks={"check": False})
    with gathered_tensors() as seen:
        for length in (300, 1, 5, 3):
            both.check([("a", length)])
    found = storages(seen)
    assert len(found) == 1, f"{len(found)} buffers for {len(seen) // 2} gathers"
    assert sum(found.values()) == both.shared.ranks.workspace.num_bytes


def test_v4_entries_share_a_buffer(two_ranks: Processes) -> None:
    two_ranks.run(v4_layers)


def interleaved(rank: int) -> None:
    """Plans that live at the same time and use one buffer: layer by layer, in turns, the second
    larger than the first, after which the first goes on."""
    stories = [Story([20, 9], [30, 40]), Story([60, 3, 2], [90, 80, 7], format="bf16", BS=8)]
    sizes = [{"workspace_tokens": tokens} for tokens in (8, 64)]
    alone = [
        attend(story, plan_of(story, Ranks(dist.group.WORLD), **size))
        for story, size in zip(stories, sizes, strict=True)
    ]
    ranks = Ranks(dist.group.WORLD)
    first = plan_of(stories[0], ranks, **sizes[0])
    assert torch.equal(attend(stories[0], first), alone[0])
    small = ranks.workspace.num_bytes
    plans = [first, plan_of(stories[1], ranks, **sizes[1])]
    assert ranks.workspace.num_bytes > small > 0
    for turn in (0, 1, 1, 0, 1, 0):
        assert torch.equal(attend(stories[turn], plans[turn]), alone[turn])


def test_plans_that_live_together_do_not_disturb_each_other(two_ranks: Processes) -> None:
    two_ranks.run(interleaved)


def attached(rank: int) -> None:
    """A prompt in chunks: all layers and passes use one buffer, and memory() counts its bytes."""
    ranks = Ranks(dist.group.WORLD, check=False)
    model = attach(make_model("deepseek_v3"), block_size=4, group=ranks, workspace=16)
    attachment = attachment_of(model)
    assert attachment.memory().gathered_bytes == attachment.memory().held_bytes == 0
    ids, past, gathers = prompts((90,))[0], None, 0
    with gathered_tensors() as seen:
        for start, stop in ((0, 6), (6, 40), (40, 90)):
            past = model(ids[:, start:stop], past_key_values=past, use_cache=True).past_key_values
            gathers += bool(gathered_chunks(attachment.last_plan))
    assert gathers == 2
    found, report = storages(seen), attachment.memory()
    assert len(found) == 1, f"{len(found)} buffers for {len(seen) // 2} gathers"
    assert report.gathered_bytes == sum(found.values()) > 0
    assert report.held_bytes == report.block_bytes + report.gathered_bytes
    assert "gathered  " in str(report)


def test_memory_counts_the_buffer(two_ranks: Processes) -> None:
    two_ranks.run(attached)
