"""MLAAttentionV4 over requests that start over, go back or share, and through captured plans."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from openmla import CacheFullError, ConfigError, MLAAttentionV4, ShapeError, plan_buffers, warmup
from tests.layers.v4 import (
    CLOSE,
    HIDDEN,
    LENGTH,
    RATIOS,
    Server,
    attend_densely,
    known,
    make_layer,
    relative_error,
    sequence,
    serve,
    tiny_config,
)


def test_the_order_of_requests_changes_nothing() -> None:
    layer = make_layer(tiny_config(), 4)
    hidden = {name: sequence(90, seed) for seed, name in enumerate("abc")}
    one, two = Server(layer, hidden), Server(layer, hidden)
    for wanted in ([("a", 50), ("b", 0), ("c", 70)], [("a", 40), ("b", 1), ("c", 1)]):
        one.step(wanted)
        two.step(wanted[::-1])
    for name in "abc":
        assert relative_error(one.outputs[name], two.outputs[name]) < 1e-6


def test_a_request_that_starts_over() -> None:
    """Freed, or cut to nothing: whatever its blocks and states held before is not seen again."""
    layer, hidden, dense = known(32, 128)
    server = Server(layer, {"r": sequence(LENGTH, seed=8)}, max_requests=1, num_blocks=3)
    for again in (lambda: server.rewind("r", 0), lambda: server.pool.free("r")):
        server.sequences["r"] = sequence(LENGTH, seed=8)
        server.step([("r", 200)])
        again()
        server.outputs["r"] = server.outputs["r"][:0]
        server.sequences["r"] = hidden
        for n in (100, 30, 1, 69):
            server.step([("r", n)])
        assert relative_error(server.outputs["r"], dense.out[:200]) < CLOSE
        server.rewind("r", 0)


@pytest.mark.parametrize("ratio", RATIOS)
def test_caches_grow_under_a_request(ratio: int) -> None:
    layer, hidden, dense = known(32, ratio)
    server = Server(layer, {"r": hidden, "s": hidden}, num_blocks=1, max_requests=1)
    server.step([("r", 101)])
    with pytest.raises(CacheFullError):
        server.take([("r", 28)])
    with pytest.raises(CacheFullError):
        server.take([("s", 1)])
    server.cache = server.cache.grown(6, window_blocks=60, num_states=2)
    for pool, size in zip(server.pool.pools, (6, 60, 2), strict=True):
        pool.grow(size)
    for n in (28, 1, 80):
        server.step([("s", n), ("r", n)])
    assert relative_error(server.outputs["r"], dense.out[:210]) < CLOSE
    assert relative_error(server.outputs["s"], dense.out[:109]) < CLOSE


def drafted(layer: MLAAttentionV4, hidden: Tensor, starts: int, rollback: int) -> Tensor:
    """Some tokens of every step are wrong and taken back, now and then with right ones."""
    wrong = sequence(hidden.shape[0] + 20, seed=9)
    server = Server(layer, {"r": hidden}, rollback=rollback, window_block_size=4)
    rng = random.Random(rollback)
    server.step([("r", starts)])
    longest = length = starts
    while length < hidden.shape[0] - 10:
        right, drafts = rng.randint(0, 4), rng.randint(1, rollback)
        good = length + right
        server.sequences["r"] = torch.cat([hidden[:good], wrong[good:]])
        server.step([("r", right + drafts)])
        longest = max(longest, good + drafts)
        if rng.random() < 0.3:  # in two goes
            server.rewind("r", good + drafts // 2)
        length = rng.randint(max(longest - rollback, 1), good) if rng.random() < 0.3 else good
        server.rewind("r", length)
    server.sequences["r"] = hidden
    server.step([("r", hidden.shape[0] - length)])
    return server.outputs["r"]


@pytest.mark.parametrize("rollback", [1, 8])
@pytest.mark.parametrize("window", [32, 128])
@pytest.mark.parametrize("ratio", RATIOS)
def test_rejected_drafts_leave_no_trace(ratio: int, window: int, rollback: int) -> None:
    """They finish entries, fill blocks and push rows out of the window before they go."""
    layer, hidden, dense = known(window, ratio)
    out = drafted(layer, hidden[:280], 110, rollback)
    assert relative_error(out, dense.out[:280]) < CLOSE


@pytest.mark.parametrize("ratio", RATIOS)
def test_drafts_from_the_first_token_on(ratio: int) -> None:
    layer, hidden, dense = known(32, ratio)
    assert relative_error(drafted(layer, hidden[:60], 2, 8), dense.out[:60]) < CLOSE


@pytest.mark.parametrize("ratio", [4, 128])
@pytest.mark.parametrize("end", [127, 128, 129, 131, 136])
def test_a_prefill_is_taken_back_as_far_as_allowed(ratio: int, end: int) -> None:
    layer, hidden, dense = known(128, ratio)
    wrong = torch.cat([hidden[: end - 8], sequence(LENGTH, seed=9)])
    server = serve(layer, wrong, [end])
    server.rewind("r", end - 8)
    server.sequences["r"] = hidden
    for n in (1, 3, LENGTH - end + 4):
        server.step([("r", n)])
    assert relative_error(server.outputs["r"], dense.out) < CLOSE


def test_taking_back_too_much_is_told_and_changes_nothing() -> None:
    layer, hidden, dense = known(32, 4)
    server = serve(layer, hidden, [90, 10])
    server.rewind("r", 95)
    server.step([("r", 2)])  # 97 now, but 100 have been there
    before = [table.clone() for table in server.pool.tables(["r"])]
    for length in (91, 1, 98, -1):
        with pytest.raises(ShapeError, match=r"'r' can be cut to 0.*97 tokens.*, got") as error:
            server.pool.truncate("r", length)
        assert length in (98, -1) or "0 or 92..97 tokens (rollback=8)" in str(error.value)
        with pytest.raises(ShapeError, match=r"'r' can share 0.*97 tokens.*, got"):
            server.pool.share("r", "s", length)
    assert server.pool.requests == ("r",) and server.pool.seq_len("r") == 97
    for table, was in zip(server.pool.tables(["r"]), before, strict=True):
        assert torch.equal(table, was)
    server.rewind("r", 92)
    server.step([("r", 60)])
    assert relative_error(server.outputs["r"], dense.out[:152]) < CLOSE


@pytest.mark.parametrize("ratio", RATIOS)
def test_beams(ratio: int) -> None:
    """Requests share what they have in common, part ways inside blocks and windows, and die."""
    layer = make_layer(tiny_config(), ratio)
    server = Server(layer, {"beam": sequence(400)}, max_requests=4, num_blocks=24)
    server.step([("beam", 121)])
    alive: list[Any] = ["beam"]
    rng, born = random.Random(1), 0
    while server.pool.seq_len(alive[0]) < 165:
        for name in list(alive):
            if len(alive) < 4 and rng.random() < 0.7:
                born += 1
                back = rng.choice([0, 0, 1, 5]) if len(alive) == 1 else 0
                length = server.pool.seq_len(name) - back
                server.share(name, born, length)
                tail = sequence(400, seed=100 + born)
                server.sequences[born] = torch.cat([server.sequences[name][:length], tail])
                alive.append(born)
        steps = rng.choice([1, 1, 2, 4])
        server.step([(name, steps) for name in rng.sample(alive, len(alive))])
        while len(alive) > 1 and rng.random() < 0.6:
            gone = alive.pop(rng.randrange(len(alive)))
            server.pool.free(gone)
            assert_equations(layer, server, gone)
    assert born > 8
    for name in alive:
        assert_equations(layer, server, name)


def assert_equations(layer: MLAAttentionV4, server: Server, name: Any) -> None:
    out = server.outputs[name]
    dense = attend_densely(layer, server.sequences[name][: out.shape[0]])
    assert relative_error(out, dense.out) < CLOSE


@pytest.mark.parametrize("ratio", RATIOS)
def test_captured_steps_equal_plain_ones(ratio: int) -> None:
    """Steps of many sizes through the same buffers; what fills them up writes and sees nothing."""
    layer = make_layer(tiny_config(), ratio)
    hidden = {name: sequence(200, seed) for seed, name in enumerate("abc")}
    expected = {name: attend_densely(layer, hidden[name]).out for name in "abc"}
    plain, captured = Server(layer, hidden), Server(layer, hidden)
    for server in (plain, captured):
        server.step([("a", 126), ("b", 9)])
    buffers = plan_buffers(
        layer.config, captured.cache, max_requests=4, max_tokens=12, max_blocks=3
    )
    addresses = {name: tensor.data_ptr() for name, tensor in buffers.items()}
    columns = buffers["window_table"].shape[1]
    shapes = []
    for wanted in (
        [("a", 2), ("b", 1)],
        [("b", 3), ("c", 2), ("a", 3)],
        [("a", 1)],
        [("c", 0), ("b", 1)],
        [("c", 3), ("b", 3), ("a", 3)],
    ):
        plan = captured.plan(captured.batch(wanted, window_columns=columns), into=buffers)
        assert plan.num_tokens == 12 and plan.shared is not None
        chunks = None if plan.select is None else plan.select.chunks
        most = None if plan.pool is None else plan.pool.max_entries
        shapes.append((chunks, most, plan.backends))
        rows, positions = captured.tokens(wanted)
        T = rows.shape[0]
        filled = torch.cat([rows, torch.full((12 - T, HIDDEN), torch.nan)])
        before = [server.bytes() for server in (plain, captured)]
        out = layer(filled, torch.nn.functional.pad(positions, (0, 12 - T)), captured.cache, plan)
        assert not out[T:].any()
        plain.step(wanted)
        for (name, n), part in zip(wanted, out[:T].split([n for _, n in wanted]), strict=True):
            end = captured.pool.seq_len(name)
            assert n == 0 or relative_error(part, expected[name][end - n : end]) < CLOSE
        after = [server.bytes() for server in (plain, captured)]
        for theirs, ours, theirs_was, ours_was in zip(*after, *before, strict=True):
            touched, allowed = ((ours != ours_was).any(-1), (theirs != theirs_was).any(-1))
            assert torch.equal(touched, allowed)
            values = (tensor.view(torch.float32) for tensor in (ours, theirs))
            torch.testing.assert_close(*values, equal_nan=True)
    assert all(shape == shapes[0] for shape in shapes)
    assert {name: tensor.data_ptr() for name, tensor in buffers.items()} == addresses


def test_captured_steps_that_do_not_fit() -> None:
    layer, hidden, _ = known(32, 4)
    server = serve(layer, hidden, [100])
    buffers = plan_buffers(layer.config, server.cache, max_requests=2, max_tokens=6, max_blocks=1)
    before = {name: tensor.clone() for name, tensor in buffers.items()}
    columns = buffers["window_table"].shape[1]
    for wanted, more, message in (
        (
            [("r", 1)],
            1,
            rf"window_table must have {columns} columns like the buffers, got {columns + 1}",
        ),
        ([("r", 4)], 0, "the number of query tokens of one request must be at most 3"),
        ([("r", 0), ("s", 0), ("t", 0)], 0, "the number of requests must be at most 2"),
        ([("r", 3), ("s", 4)], 0, "the number of tokens must be at most 6"),
        ([("r", 3), ("s", 130)], 0, "window_table must have 4 columns like the buffers, got 9"),
        ([("s", 1)], 0, "the number of block table columns must be at most 1"),
    ):
        batch = server.batch(wanted, window_columns=columns + more)
        with pytest.raises(ConfigError, match=message):
            server.plan(batch, into=buffers)
    assert all(torch.equal(buffers[name], before[name]) for name in buffers)


def test_captured_steps_need_a_workspace_of_their_size() -> None:
    layer, hidden, _ = known(32, 4)
    server = serve(layer, hidden, [100])
    buffers = plan_buffers(layer.config, server.cache, max_requests=2, max_tokens=8, max_blocks=2)
    space = warmup(layer.config, server.cache, max_requests=2, max_tokens=4)
    batch = server.batch([("r", 2)], window_columns=buffers["window_table"].shape[1])
    with pytest.raises(ConfigError, match="at most 4 tokens in this workspace, got 8"):
        plan = server.plan(batch, into=buffers, workspace=space)
        layer(torch.zeros(8, HIDDEN), plan.shared.positions, server.cache, plan)  # type: ignore[union-attr]
