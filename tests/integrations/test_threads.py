"""Several threads on one attached model: each gets the tokens it gets alone."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from openmla.integrations.transformers import attach, attachment_of
from openmla.testing import poisoned_memory
from tests.integrations.models import make_model, make_v4, model_of, padded_prompts

ROUNDS = 3


@pytest.fixture(autouse=True)
def often_switched() -> Iterator[None]:
    """Threads take turns every few bytecodes, so that what can interleave does."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def in_threads(works: list[Callable[[], Any]]) -> list[Any]:
    """Run functions at the same time; their results, or the first error."""
    results: list[Any] = [None] * len(works)
    barrier = threading.Barrier(len(works))

    def run(place: int) -> None:
        with torch.inference_mode(), poisoned_memory():
            barrier.wait()
            try:
                results[place] = works[place]()
            except Exception as error:
                results[place] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def prompts(device: str) -> list[tuple[Tensor, Tensor]]:
    """Batches of different shapes, so that nothing of one fits another."""
    return [
        tuple(part.to(device) for part in padded_prompts(B, S, seed=B))  # type: ignore[misc]
        for B, S in ((1, 9), (3, 20), (2, 33))
    ]


@pytest.mark.parametrize("capture", [False, True])
@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v32"])
def test_same_tokens_as_alone(family: str, capture: bool, device: str) -> None:
    model = model_of(family).to(device)
    batches = prompts(device)

    def work(ids: Tensor, mask: Tensor) -> Callable[[], list[Tensor]]:
        def generate() -> list[Tensor]:
            return [
                model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False)
                for _ in range(ROUNDS)
            ]

        return generate

    alone = [work(*batch)()[0] for batch in batches]
    attach(model, block_size=4, capture=capture)
    for expected, rounds in zip(alone, in_threads([work(*b) for b in batches]), strict=True):
        assert all(torch.equal(ours, expected) for ours in rounds)
    attachment = attachment_of(model)
    assert attachment.pool.num_free == attachment.pool.num_blocks


def test_v4(device: str) -> None:
    """Its windows are recycled, of requests that are idle, not of those under way elsewhere."""
    model = make_v4().to(device)
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(2, 90, (1, S), generator=generator).to(device) for S in (150, 40, 300)]

    def work(ids: Tensor) -> Callable[[], Tensor]:
        return lambda: model.generate(ids, max_new_tokens=6, do_sample=False)

    attach(model, capture=False)
    alone = [work(ids)() for ids in texts]
    for expected, ours in zip(alone, in_threads([work(ids) for ids in texts] * 2), strict=False):
        assert torch.equal(ours, expected)


def test_one_prefix_for_all(device: str) -> None:
    """Copies of one cache, continued at the same time: blocks are shared until one writes."""
    from copy import deepcopy

    model = make_model("deepseek_v3").to(device)
    attach(model, block_size=8, capture=False)
    prefix = padded_prompts(B=1, S=13)[0].to(device)
    past = model(prefix).past_key_values
    tails = [torch.tensor([[t, t + 1, t + 2]], device=device) for t in (5, 17, 40, 60)]

    def work(tail: Tensor) -> Callable[[], Tensor]:
        ids = torch.cat([prefix, tail], dim=1)
        return lambda: model.generate(
            ids, past_key_values=deepcopy(past), max_new_tokens=6, do_sample=False
        )

    alone = [work(tail)() for tail in tails]
    for expected, ours in zip(alone, in_threads([work(tail) for tail in tails]), strict=True):
        assert torch.equal(ours, expected)
