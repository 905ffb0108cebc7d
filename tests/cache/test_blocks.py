"""BlockPool: examples, and a state machine that keeps every request's text in shared blocks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from openmla import BlockPool, CacheFullError, ConfigError, ShapeError


def test_take_fills_blocks_in_order() -> None:
    pool = BlockPool(num_blocks=8, block_size=4)
    assert pool.take({"a": 5, "b": 4}) == []
    assert pool.blocks("a") == (0, 1) and pool.blocks("b") == (2,)
    assert pool.num_free == 5 and pool.seq_len("a") == 5 and pool.requests == ("a", "b")
    pool.take({"a": 3})
    assert pool.blocks("a") == (0, 1)
    pool.take({"a": 1})
    assert pool.blocks("a") == (0, 1, 3)


def test_repr_counts_blocks() -> None:
    pool = BlockPool(num_blocks=8, block_size=4)
    pool.take({"a": 5, "b": 4})
    assert repr(pool) == "BlockPool(3 of 8 blocks of 4 tokens used, 5 free, 2 requests)"


def test_numpys_integers_are_counts() -> None:
    np = pytest.importorskip("numpy")
    pool = BlockPool(num_blocks=8, block_size=4)
    pool.take({"a": np.int64(5), "b": np.int32(4)})
    assert pool.blocks("a") == (0, 1) and type(pool.seq_len("a")) is int
    for odd in (np.float64(1), np.bool_(True), np.array([1])):
        with pytest.raises(ShapeError, match="tokens for request 'a' must be an integer of at"):
            pool.take({"b": 1, "a": odd})
    assert pool.seq_len("b") == 4


def test_tables_and_slots() -> None:
    pool = BlockPool(num_blocks=8, block_size=4)
    pool.take({"a": 5, "b": 4, "empty": 0})
    assert pool.block_table(["b", "a", "empty"]).tolist() == [[2, -1], [0, 1], [-1, -1]]
    assert pool.block_table(["b"], num_columns=3).tolist() == [[2, -1, -1]]
    assert pool.block_table([]).shape == (0, 0)
    slots = pool.slot_mapping([("a", 3, 5), ("b", 0, 2)], num_rows=6)
    assert slots.tolist() == [3, 4, 8, 9, -1, -1]
    assert pool.slot_mapping([]).shape == (0,)


def test_a_full_pool_changes_nothing() -> None:
    pool = BlockPool(num_blocks=3, block_size=4)
    pool.take({17: 9})
    before = pool.blocks(17), pool.num_free
    with pytest.raises(
        CacheFullError, match="cache: request 18 needs 2 more blocks, and 0 of 3 are free"
    ):
        pool.take({17: 3, 18: 8})
    assert (pool.blocks(17), pool.num_free) == before and pool.seq_len(18) == 0
    assert pool.seq_len(17) == 9 and pool.requests == (17,)


def test_copy_on_write_of_a_shared_last_block() -> None:
    pool = BlockPool(num_blocks=4, block_size=4)
    pool.take({"a": 6})
    pool.share("a", "b")
    assert pool.blocks("b") == (0, 1) and pool.num_free == 2
    # both grow at once: the first leaves the shared block, the second keeps it
    assert pool.take({"b": 1, "a": 1}) == [(1, 2)]
    assert pool.blocks("a") == (0, 1) and pool.blocks("b") == (0, 2)
    pool.free("a")
    assert pool.num_free == 2 and pool.blocks("b") == (0, 2)


def test_growth_of_two_sharers_needs_one_block_only() -> None:
    pool = BlockPool(num_blocks=2, block_size=4)
    pool.take({"a": 2})
    pool.share("a", "b")
    assert pool.take({"a": 1, "b": 1}) == [(0, 1)]


def test_a_full_last_block_is_shared_without_copies() -> None:
    pool = BlockPool(num_blocks=3, block_size=4)
    pool.take({"a": 4})
    pool.share("a", "b")
    assert pool.take({"b": 1}) == []
    assert pool.blocks("b") == (0, 1)


def test_sharing_a_prefix_and_cutting() -> None:
    pool = BlockPool(num_blocks=6, block_size=4)
    pool.take({"a": 10})
    pool.share("a", "b", 5)
    assert pool.blocks("b") == (0, 1) and pool.seq_len("b") == 5
    pool.truncate("a", 3)
    assert pool.blocks("a") == (0,) and pool.num_free == 4
    pool.truncate("b", 0)
    assert pool.blocks("b") == () and pool.num_free == 5


def test_what_is_missing_is_what_must_be_added() -> None:
    """With shared blocks and windows too: one block fewer is refused; asking changes nothing."""
    shared = BlockPool(4, 2)
    shared.take({"a": 3})
    shared.share("a", "b")
    window = BlockPool(3, 2, window=2, rollback=0)
    window.take({"a": 6})
    for pool, wanted in (
        (shared, {"a": 2, "b": 2, "c": 0}),
        (shared, {"a": 9}),
        (window, {"a": 5, "b": 4}),
    ):
        before, missing = repr(pool), pool.missing(wanted)
        assert missing > 0 and repr(pool) == before
        pool.grow(pool.num_blocks + missing - 1)
        with pytest.raises(CacheFullError):
            pool.take(wanted)
        pool.grow(pool.num_blocks + 1)
        assert pool.missing(wanted) == 0
        pool.take(wanted)


def test_growing() -> None:
    pool = BlockPool(num_blocks=2, block_size=4)
    pool.take({"a": 8})
    pool.grow(5)
    assert pool.num_blocks == 5 and pool.num_free == 3
    pool.take({"b": 9})
    assert pool.blocks("a") == (0, 1) and pool.blocks("b") == (2, 3, 4)
    with pytest.raises(
        ShapeError, match="cache: num_blocks must be at least the 5 blocks of the pool, got 4"
    ):
        pool.grow(4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda pool: pool.free("x"), "request 'x' is not in the pool"),
        (lambda pool: pool.truncate("x", 0), "request 'x' is not in the pool"),
        (lambda pool: pool.share("x", "y"), "request 'x' is not in the pool"),
        (lambda pool: pool.share("a", "a"), "request 'a' is already in the pool."),
        (lambda pool: pool.share("a", "b", 6), "request 'a' can share 0..5 tokens"),
        (lambda pool: pool.truncate("a", 6), "request 'a' can be cut to 0..5 tokens"),
        (lambda pool: pool.take({"b": 1, "a": -1}), "the number of tokens for request 'a' must be"),
        (lambda pool: pool.slot_mapping([("a", 3, 2)]), "positions of request 'a' must"),
        (lambda pool: pool.slot_mapping([("a", 0, 6)]), "request 'a' has 5 tokens"),
        (lambda pool: pool.slot_mapping([("x", 0, 5)]), "request 'x' has no blocks in the pool."),
        (lambda pool: pool.slot_mapping([("a", 0.0, 1)]), "start must be an integer, got 0.0"),
        (lambda pool: pool.slot_mapping([("a", 0, 2.5)]), "stop must be an integer, got 2.5"),
        (lambda pool: pool.slot_mapping([], num_rows=2.0), "num_rows must be an integer, got 2.0"),
        (lambda pool: pool.block_table(["a"], num_columns=3.5), "num_columns must be an integer"),
        (lambda pool: pool.truncate("a", 2.0), "num_tokens must be an integer, got 2.0"),
        (lambda pool: pool.check_truncate("a", True), "num_tokens must be an integer, got True"),
        (lambda pool: pool.share("a", "b", 4.0), "num_tokens must be an integer, got 4.0"),
        (lambda pool: pool.grow(5.0), "num_blocks must be an integer, got 5.0"),
    ],
)
def test_bad_calls_change_nothing(call, message: str) -> None:  # type: ignore[no-untyped-def]
    pool = BlockPool(num_blocks=4, block_size=4)
    pool.take({"a": 5})
    with pytest.raises(ShapeError) as error:
        call(pool)
    assert f"cache: {message}" in str(error.value)
    assert pool.requests == ("a",) and pool.blocks("a") == (0, 1) and pool.num_free == 2


def test_bad_sizes() -> None:
    with pytest.raises(ConfigError, match="cache: num_blocks must be a positive integer, got 0"):
        BlockPool(0, 4)
    with pytest.raises(ConfigError, match="cache: block_size must be a positive integer, got '4'"):
        BlockPool(1, "4")  # type: ignore[arg-type]


class PoolMachine(RuleBasedStateMachine):
    """Random histories on a small pool; a fake memory shows any token lost or overwritten."""

    NUM_BLOCKS, BLOCK_SIZE = 7, 3

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(self.NUM_BLOCKS, self.BLOCK_SIZE)
        self.memory = [[-1] * self.BLOCK_SIZE for _ in range(self.NUM_BLOCKS)]
        self.texts: dict[int, list[int]] = {}
        self.next_token = 0

    def read(self, request: int) -> list[int]:
        flat = [token for block in self.pool.blocks(request) for token in self.memory[block]]
        return flat[: self.pool.seq_len(request)]

    @rule(lens=st.dictionaries(st.integers(0, 9), st.integers(0, 5), min_size=1, max_size=3))
    def take(self, lens: dict[int, int]) -> None:
        state = {request: self.pool.blocks(request) for request in self.pool.requests}
        try:
            copies = self.pool.take(lens)
        except CacheFullError:
            assert {request: self.pool.blocks(request) for request in self.pool.requests} == state
            assert self.needed(lens) > self.pool.num_free  # a refusal is never premature
            return
        for source, target in copies:
            self.memory[target] = list(self.memory[source])
        for request, num_tokens in lens.items():
            text = self.texts.setdefault(request, [])
            start = len(text)
            slots = self.pool.slot_mapping([(request, start, start + num_tokens)])
            for slot in slots.tolist():
                self.memory[slot // self.BLOCK_SIZE][slot % self.BLOCK_SIZE] = self.next_token
                text.append(self.next_token)
                self.next_token += 1

    def needed(self, lens: dict[int, int]) -> int:
        """Blocks a request history needs, counted from the tables alone."""
        used = {r: list(self.pool.blocks(r)) for r in self.pool.requests}
        count = 0
        for request, num_tokens in lens.items():
            held = used.setdefault(request, [])
            length = self.pool.seq_len(request)
            if num_tokens and length % self.BLOCK_SIZE:
                users = sum(held[-1] in blocks for blocks in used.values())
                if users > 1:
                    held[-1] = -1 - count
                    count += 1
            count += -(-(length + num_tokens) // self.BLOCK_SIZE) - len(held)
        return count

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.texts)))
        self.pool.free(request)
        del self.texts[request]

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.texts)))
        length = data.draw(st.integers(0, len(self.texts[request])))
        self.pool.truncate(request, length)
        del self.texts[request][length:]

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), heir=st.integers(0, 9))
    def share(self, data: st.DataObject, heir: int) -> None:
        source = data.draw(st.sampled_from(sorted(self.texts)))
        length = data.draw(st.integers(0, len(self.texts[source])))
        if heir in self.texts:
            return
        self.pool.share(source, heir, length)
        self.texts[heir] = self.texts[source][:length]

    @invariant()
    def every_text_is_whole(self) -> None:
        assert set(self.pool.requests) == set(self.texts)
        for request, text in self.texts.items():
            assert self.read(request) == text

    @invariant()
    def blocks_are_counted(self) -> None:
        held = {block for request in self.texts for block in self.pool.blocks(request)}
        assert len(held) + self.pool.num_free == self.NUM_BLOCKS
        for request, text in self.texts.items():
            assert len(self.pool.blocks(request)) == -(-len(text) // self.BLOCK_SIZE)


TestPoolMachine = PoolMachine.TestCase


@pytest.mark.parametrize("start", [0, 5, 64])
def test_slots_of_long_prompts_are_those_of_their_tokens(
    start: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors make them, or Python does, or both in turn."""
    pool = BlockPool(200, 16)
    pool.take({"a": 700, "b": 40, "c": 1500})
    spans = [("b", 3, 40), ("a", start, 700), ("b", 0, 1), ("c", start, 1500), ("a", 1, 1)]
    made = pool.slot_mapping(spans, num_rows=2400)
    monkeypatch.setattr("openmla.cache.blocks.LONG", 10**9)
    assert torch.equal(made, pool.slot_mapping(spans, num_rows=2400))
    assert made.dtype == torch.int64 and made[-1] == -1
