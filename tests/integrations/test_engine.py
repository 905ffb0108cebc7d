"""examples/engine.py: requests that come, go and share blocks get attach()'s tokens."""

from __future__ import annotations

import importlib.util
import random
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import openmla
from tests.integrations.models import VOCAB, make_model

pytest.importorskip("transformers")
PATH = Path(__file__).parents[2] / "examples/engine.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("engine", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["engine"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    del sys.modules["engine"]
    return module


def attached(model: Any, requests: list[Any], device: str) -> list[list[int]]:
    """What attach() and generate() make of the prompts, twenty at a time."""
    model = openmla.attach(model)
    found = []
    for first in range(0, len(requests), 20):
        some = requests[first : first + 20]
        width = max(len(request.prompt) for request in some)
        rows = [[0] * (width - len(request.prompt)) + request.prompt for request in some]
        ids = torch.tensor(rows, device=device)
        mask = torch.tensor(
            [[0] * (width - len(r.prompt)) + [1] * len(r.prompt) for r in some], device=device
        )
        most = max(request.max_new_tokens for request in some)
        out = model.generate(ids, attention_mask=mask, max_new_tokens=most, do_sample=False)
        for request, row in zip(some, out[:, width:].tolist(), strict=True):
            new = row[: request.max_new_tokens]
            stop = model.config.eos_token_id
            found.append(new[: new.index(stop) + 1] if stop in new else new)
    openmla.detach(model)
    return found


def serve(engine: Any, prompts: list[list[int]], seed: int, most: int) -> list[Any]:
    """All of them, arriving at random; blocks are counted at every step."""
    dice, arriving, requests = random.Random(seed), list(prompts), []
    while arriving or engine.waiting or engine.running:
        while arriving and dice.random() < 0.5:
            requests.append(engine.add(arriving.pop(0), dice.randint(1, most)))
        engine.step()
        names = engine.pool.requests
        held = {block for name in names for block in engine.pool.blocks(name)}
        assert len(held) == engine.pool.num_blocks - engine.pool.num_free
        running = {request.number for request in engine.running}
        assert set(names) == running | set(engine.prefixes.kept)
    return requests


def check(engine: Any, model: Any, requests: list[Any], device: str) -> None:
    assert sorted(engine.finished, key=lambda request: request.number) == requests
    while engine.prefixes.forget_one():
        pass
    assert engine.pool.num_free == engine.pool.num_blocks and not engine.pool.requests
    ours = [request.tokens[len(request.prompt) :] for request in requests]
    assert ours == attached(model, requests, device)


def test_twenty_requests(example: ModuleType, device: str) -> None:
    """The demo, sparse from 256 keys on, in a pool for about four of them."""
    model = example.load_demo(device)
    engine = example.Engine(model, num_blocks=24)
    prompts = example.some_prompts(20, random.Random(1))
    check(engine, model, serve(engine, prompts, seed=1, most=20), device)
    counts = engine.counts
    assert counts["preempted"] and counts["read twice"] and counts["shared"]
    assert counts["graph of 4"] and counts["graph of 2"]
    assert set(engine.graphs) <= {1, 2, 4, 8} and bool(engine.graphs) == (device != "cpu")


def test_a_dense_model(example: ModuleType, device: str) -> None:
    """Odd sizes: blocks of 5, steps of 7 tokens, graphs of up to 3 requests."""
    model = make_model("deepseek_v3").to(device)
    if device != "cpu":
        model.set_experts_implementation("batched_mm")
    engine = example.Engine(model, num_blocks=13, block_size=5, max_requests=3, max_tokens=7)
    dice = random.Random(2)
    start = [dice.randrange(2, VOCAB) for _ in range(12)]
    prompts = [[*start[: 3 * i], 2 + i, 3, 5 + i] for i in range(5)] * 4
    check(engine, model, serve(engine, prompts, seed=2, most=20), device)
    assert engine.counts["graph of 3"] and engine.counts["preempted"] and engine.counts["shared"]


@pytest.mark.slow
def test_two_hundred_requests(example: ModuleType, device: str) -> None:
    model = example.load_demo(device)
    engine = example.Engine(model, num_blocks=50, max_requests=16)
    prompts = example.some_prompts(200, random.Random(3))
    check(engine, model, serve(engine, prompts, seed=3, most=40), device)
    counts = engine.counts
    assert counts["preempted"] > 5 and counts["shared"] > 1000 and counts["graph of 8"]


def test_requests_that_can_never_run_are_refused(example: ModuleType) -> None:
    engine = example.Engine(make_model("deepseek_v3"), num_blocks=4, block_size=4)
    for prompt, most in (([], 4), ([3], 0), ([3] * 10, 7)):
        with pytest.raises(ValueError, match="a request must have 2 to 16 tokens, got"):
            engine.add(prompt, most)
    engine.step()  # nothing to do
    assert not engine.waiting and not engine.counts["requests"] and not engine.counts["steps"]


def test_the_example_prints_steps_and_free_blocks(
    example: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    example.main(["--requests", "3", "--device", "cpu"])
    text = capsys.readouterr().out
    assert (
        "step    1  █" in text
        and "goes on with '" in text
        and "of size 1" in text
        and "graphs need a GPU" in text
    )
    assert "3 requests, " in text and "64 of 64 free at the end" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--requests", "0"], "--requests must be at least 1, got 0"),
        (["--blocks", "20"], "--blocks must be at least 21, got 20"),
        (["--device", "nope"], "--device must be one torch has here, got nope"),
    ],
)
def test_bad_arguments_get_a_sentence(
    example: ModuleType,
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        example.main(arguments)
    assert message in capsys.readouterr().err


def test_the_fewest_blocks_are_enough(example: ModuleType) -> None:
    """The longest prompt there can be, with all it may generate."""
    longest = max(map(len, example.some_prompts(2000, random.Random(4))))
    assert longest > 260 and longest + example.MOST_NEW <= example.FEWEST_BLOCKS * 16


def test_several_tokens_may_end_a_request(example: ModuleType) -> None:
    model = make_model("deepseek_v3")
    engine = example.Engine(model, num_blocks=8)
    served = engine.add([3, 4, 5], 10)
    while engine.waiting or engine.running:
        engine.step()
    model.config.eos_token_id = [VOCAB, served.tokens[4]]
    engine = example.Engine(model, num_blocks=8)
    again = engine.add([3, 4, 5], 10)
    while engine.waiting or engine.running:
        engine.step()
    assert again.tokens == served.tokens[:5]
