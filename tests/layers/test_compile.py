"""torch.compile: how many graphs steps of many lengths take, and that these compute the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from openmla import PRESETS, MLAAttention, Plan
from openmla.plan import reserve
from openmla.plan.upload import send_parts
from tests.layers import v4
from tests.layers.compiling import Compiled
from tests.layers.serving import Server, relative_error, sequence
from tests.plan.groups import expanded_of, masked_chunks

pytestmark = pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
CLOSE = 1e-5
Steps = Sequence[Sequence[tuple[str, int]]]
SPARSE = "tiny-v3.2"  # whose K is 32


def make_layer(preset: str) -> MLAAttention:
    torch.manual_seed(0)
    return MLAAttention(PRESETS[preset])


def serve(
    layer: MLAAttention, before: Steps, steps: Steps, *, marked: bool = True, **options: Any
) -> tuple[int, list[Plan]]:
    """Graphs that the steps took, after others that ran eagerly, and their plans; all of them gave
    what eager steps give."""
    names = {name for step in (*before, *steps) for name, _ in step}
    hidden = {name: sequence(150, seed) for seed, name in enumerate(sorted(names))}
    eager, server = (Server(layer, hidden, num_blocks=600, **options) for _ in range(2))
    for step in before:
        server.step(step)
    compiled: Any = Compiled(layer, marked=marked)
    server.layer = compiled
    for step in (*before, *steps):
        eager.step(step)
    for step in steps:
        server.step(step, compiled=marked)
    for name in names:
        assert relative_error(server.output(name), eager.output(name)) < CLOSE
    return compiled.graphs, server.plans[len(before) :]


@pytest.mark.parametrize("preset", ["tiny-v3", SPARSE])
def test_decode_takes_one_graph(preset: str, device: str) -> None:
    """Lengths pass K, tables grow, requests leave and join, some bring drafts."""
    before = [[("a", 9), ("b", 30), ("c", 21), ("d", 60), ("e", 31)]]
    steps = [[("a", 1), ("b", 1), ("c", 1)]] * 20
    steps += [[("b", 1), ("d", 1), ("a", 1), ("e", 1), ("c", 1)]] * 20
    steps += [[("c", 1), ("e", 1)]] * 5 + [[("c", 2), ("e", 1), ("b", 3)]] * 5
    graphs, _ = serve(make_layer(preset), before, steps, device=device)
    assert graphs == 1


def test_integers_that_were_sent_in_one_piece_take_one_graph(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As to a GPU: where in the piece a tensor begins follows the lengths, and must not count."""
    monkeypatch.setattr("openmla.plan.plan.upload_parts", send_parts)
    before = [[("a", 9), ("b", 30), ("c", 21)]]
    steps = [[("a", 1), ("b", 1), ("c", 1)]] * 3 + [[("c", 2), ("a", 1), ("b", 3)]] * 3
    graphs, plans = serve(make_layer(SPARSE), before, steps)
    assert all(plan.select is not None for plan in plans)
    assert graphs == 1


@pytest.mark.parametrize(("context", "workspace", "route", "cuts"), [
    (0, 400, "new", {0}),
    (20, 400, "one-shot", {1}),
    (20, 52, "chunked", {1, 2}),
])  # fmt: skip
def test_prefill_takes_a_graph_per_number_of_chunks(
    context: int, workspace: int, route: str, cuts: set[int], device: str
) -> None:
    """Two requests of twelve lengths, with contexts of as many."""
    contexts = range(12) if context else ()
    before = [[(f"a{n}", context + n), (f"b{n}", context + 7)] for n in contexts]
    steps = [[(f"a{n}", 30 - n), (f"b{n}", 15 + n // 2)] for n in range(12)]
    graphs, plans = serve(
        make_layer("tiny-v3"), before, steps, form="expanded", workspace_tokens=workspace,
        device=device,
    )  # fmt: skip
    prefills = [expanded_of(plan) for plan in plans if plan.group("expanded") is not None]
    assert {prefill.route for prefill in prefills} == {route}
    assert {len(prefill.chunks) for prefill in prefills} == cuts
    assert graphs == len(cuts)


def test_chunks_may_fill_the_workspace_and_serve_some_of_the_requests(device: str) -> None:
    """One chunk in each of these steps: 40 or all 48 rows, of three requests or of two of them."""
    layer = make_layer("tiny-v3").to(device)
    cache = Server(layer, {}, device=device).cache
    workspace = reserve(
        layer.config, cache, max_requests=3, max_tokens=100, workspace_tokens=48,
        dtype=torch.float32,
    )  # fmt: skip
    before, steps = [], []
    for n, contexts in enumerate([(20, 20), (20, 28), (16, 16, 16), (12, 16, 12)]):
        before.append(
            [(f"{name}{n}", length) for name, length in zip("abc", contexts, strict=False)]
        )
        steps.append([(f"{name}{n}", 5 + n) for name in "abc"])
    options: dict[str, Any] = {"form": "expanded", "workspace": workspace, "device": device}
    graphs, plans = serve(layer, before, steps, **options)
    prefills = [expanded_of(plan) for plan in plans if plan.group("expanded") is not None]
    assert {prefill.route for prefill in prefills} == {"chunked"}
    chunks = [prefill.chunks for prefill in prefills]
    assert [[chunk.num_keys for chunk in each] for each in chunks] == [[40], [48], [48], [40]]
    assert graphs == 1


def test_rope_offsets_are_there_before_they_count() -> None:
    """longrope's long factors begin at some length; the graph must not."""
    config = PRESETS["tiny-minicpm3"]
    assert config.rope.kind == "longrope"
    rope = replace(config.rope, original_positions=30)
    layer = MLAAttention(replace(config, rope=rope))
    graphs, _ = serve(layer, [[("a", 20), ("b", 25)]], [[("a", 1), ("b", 1)]] * 12)
    assert graphs == 1


@pytest.mark.parametrize("preset", [pytest.param("tiny-v3", marks=pytest.mark.slow), SPARSE])
def test_mixed_steps_share_a_graph(preset: str, device: str) -> None:
    """Decode and a prompt in one step: rows are slices that move."""
    before = [[("a", 40), ("b", 50), ("c", 60)]]
    steps = [[("a", 1), ("b", 1), (f"n{n}", n)] for n in (20, 25, 30)]
    steps += [[("a", 1), ("b", 1), ("c", 1), (f"n{n}", n)] for n in (28, 21)]
    graphs, plans = serve(make_layer(preset), before, steps, device=device)
    assert all(plan.group("expanded") is not None for plan in plans)
    assert graphs == 1


@pytest.mark.parametrize("chosen", [pytest.param(True, marks=pytest.mark.slow), False])
def test_sparse_prefill_takes_one_graph(chosen: bool) -> None:
    """Of prompts longer than K, by either route."""
    steps = [[(f"a{n}", 40 + n), (f"b{n}", 60 - n)] for n in range(12)]
    form = "absorbed" if chosen else "expanded"
    graphs, plans = serve(make_layer(SPARSE), [], steps, form=form, workspace_tokens=200)
    assert all(plan.select is not None for plan in plans)
    assert all(bool(masked_chunks(plan)) != chosen for plan in plans)
    assert graphs == 1


@pytest.mark.parametrize("preset", ["tiny-v3", pytest.param(SPARSE, marks=pytest.mark.slow)])
def test_plain_plans_recompile_until_all_has_changed(preset: str) -> None:
    """Without compiled=True the compiler learns from a change that a size may change: of the block
    table's columns, and of the keys that are scored."""
    before = [[("a", 70), ("b", 60)]]
    graphs, _ = serve(make_layer(preset), before, [[("a", 1), ("b", 1)]] * 20, marked=False)
    assert graphs == (3 if preset == SPARSE else 2)


@pytest.mark.parametrize("ratio", v4.RATIOS)
def test_v4_takes_one_graph(ratio: int, device: str) -> None:
    """Fifty steps of decode, requests that see no more than K entries and such that see more; then
    twelve prompts in the same graph."""
    layer, _, _ = v4.known(32, ratio)
    hidden = {name: v4.sequence(150, seed) for seed, name in enumerate("abcdefgh")}
    eager, server = (
        v4.Server(layer, hidden, max_requests=8, num_blocks=20, device=device) for _ in range(2)
    )
    compiled: Any = Compiled(layer)
    steps = [[("a", 20), ("b", 27), ("c", 60)]]
    steps += [[("a", 1), ("b", 1)]] * 25 + [[("c", 1), ("a", 1), ("b", 1)]] * 25
    steps += [[("d", n), ("e", 20 - n)] for n in range(4, 10)]
    steps += [[("f", n), ("g", 2 * n), ("h", 1)] for n in range(2, 8)]
    for number, step in enumerate(steps):
        eager.step(step)
        server.layer = compiled if number else layer
        server.step(step, compiled=bool(number))
    for name in hidden:
        assert relative_error(server.outputs[name], eager.outputs[name]) < CLOSE
    assert compiled.graphs == 1
