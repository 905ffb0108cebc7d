"""V4's caches: pools with a window and a way back, three pools as one, sizes and bytes."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from openmla import (
    PRESETS,
    BlockPool,
    CacheFullError,
    CompressedPool,
    ConfigError,
    LayerCache,
    MLAConfig,
    OpenMLAError,
    ShapeError,
    allocate_cache,
)
from openmla.cache import Geometry, cache_bytes
from openmla.cache.geometry import layer_parts

FLASH, PRO, TINY = (PRESETS[name] for name in ("deepseek-v4-flash", "deepseek-v4-pro", "tiny-v4"))
RATIOS = (0, 4, 128)
GIB = 2**30


def test_blocks_out_of_the_window_are_recycled() -> None:
    pool = BlockPool(num_blocks=4, block_size=4, window=5)
    pool.take({"a": 10})
    assert pool.blocks("a") == (0, 1, 2) and pool.num_free == 1
    pool.take({"a": 2})  # the first of them sees 6..10: block 0 is behind it
    assert pool.blocks("a") == (1, 2) and pool.num_free == 2
    pool.take({"a": 0})  # the next one will see 8..12
    assert pool.blocks("a") == (2,) and pool.num_free == 3
    assert pool.seq_len("a") == 12
    assert pool.slot_mapping([("a", 8, 12)]).tolist() == [8, 9, 10, 11]
    with pytest.raises(ShapeError, match=r"positions of request 'a' must lie in 8\.\.12, got 7"):
        pool.slot_mapping([("a", 7, 12)])


def test_a_waiting_request_gives_up_blocks_before_its_window() -> None:
    pool = BlockPool(num_blocks=4, block_size=4, window=4)
    pool.take({"a": 12})
    assert pool.take({"b": 8}) == []
    assert len(pool.blocks("a")) == 1 and len(pool.blocks("b")) == 2


def test_rows_are_rings() -> None:
    pool = BlockPool(num_blocks=9, block_size=4, window=5)
    pool.take({"a": 10, "b": 3})
    assert pool.block_table(["a", "b"]).tolist() == [[0, 1, 2], [3, -1, -1]]
    pool.take({"a": 7})  # 10..16, and 6..9 before them
    assert pool.blocks("a") == (1, 2, 0, 4)
    # blocks 1, 2, 3 and 4 of the request, in columns 1, 2, 0 and 1 of three would collide
    assert pool.block_table(["a", "b"]).tolist() == [[4, 1, 2, 0], [3, -1, -1, -1]]
    assert pool.block_table(["a"], num_columns=6).tolist() == [[-1, 1, 2, 0, 4, -1]]
    pool.take({"a": 0})
    assert pool.block_table(["a"]).tolist() == [[4, 0]]


def test_a_way_back_keeps_blocks_longer() -> None:
    pool = BlockPool(num_blocks=8, block_size=4, window=5, rollback=4)
    pool.take({"a": 16})
    pool.take({"a": 1})
    assert len(pool.blocks("a")) == 3  # 13 may be the next: it would see 9
    pool.truncate("a", 13)
    assert pool.seq_len("a") == 13 and len(pool.blocks("a")) == 2
    pool.take({"a": 2})
    with pytest.raises(ShapeError) as error:
        pool.truncate("a", 12)
    assert "request 'a' can be cut to 0 or 13..15 tokens (rollback=4), got num_tokens=12" in str(
        error.value
    )
    assert pool.seq_len("a") == 15
    pool.truncate("a", 0)
    assert pool.blocks("a") == () and pool.num_free == 8
    pool.take({"a": 7})  # counted anew
    assert pool.block_table(["a"], num_columns=3)[0, 2] == -1
    pool.truncate("a", 3)
    pool.share("a", "b", 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, "window must be a positive integer, got 0"),
        ({"window": True}, "window must be a positive integer, got True"),
        ({"window": 4, "rollback": -1}, "rollback must be an integer of at least 0, got -1"),
        ({"window": 4, "rollback": 0.5}, "rollback must be an integer of at least 0, got 0.5"),
    ],
)
def test_bad_windows(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"cache: {message}"):
        BlockPool(4, 4, **options)


class WindowMachine(RuleBasedStateMachine):
    """Random histories on a small pool; a fake memory shows any visible token lost or mixed up."""

    NUM_BLOCKS, BLOCK_SIZE, WINDOW, ROLLBACK = 9, 3, 5, 2

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(
            self.NUM_BLOCKS, self.BLOCK_SIZE, window=self.WINDOW, rollback=self.ROLLBACK
        )
        self.memory = [[-1] * self.BLOCK_SIZE for _ in range(self.NUM_BLOCKS)]
        self.texts: dict[int, list[int]] = {}
        self.longest: dict[int, int] = {}
        self.next_token = 0

    def oldest(self, request: int, more: int = 0) -> int:
        """The first position that a token to come, or one taken back and put again, will see."""
        length = len(self.texts.get(request, ()))
        longest = max(self.longest.get(request, 0), length + more)
        return max(min(length, longest - self.ROLLBACK) - self.WINDOW + 1, 0)

    @rule(lens=st.dictionaries(st.integers(0, 4), st.integers(0, 7), min_size=1, max_size=3))
    def take(self, lens: dict[int, int]) -> None:
        state = {request: self.pool.blocks(request) for request in self.pool.requests}
        needed = self.needed(lens)
        try:
            copies = self.pool.take(lens)
        except CacheFullError:
            assert {request: self.pool.blocks(request) for request in self.pool.requests} == state
            assert needed > self.NUM_BLOCKS  # a refusal is never premature
            return
        assert needed == self.NUM_BLOCKS - self.pool.num_free
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
            self.longest[request] = max(self.longest.get(request, 0), len(text))

    def needed(self, lens: dict[int, int]) -> int:
        """Blocks that will be in use, counted from the tables and the rule of the window."""
        BS = self.BLOCK_SIZE
        kept: dict[int, dict[int, Any]] = {}
        for request, text in self.texts.items():
            blocks, last = self.pool.blocks(request), -(-len(text) // BS)
            numbered = dict(zip(range(last - len(blocks), last), blocks, strict=True))
            first = self.oldest(request, lens.get(request, 0)) // BS
            kept[request] = {k: block for k, block in numbered.items() if k >= first}
        for request, num_tokens in lens.items():
            mine = kept.setdefault(request, {})
            length = len(self.texts.get(request, ()))
            if num_tokens and length % BS:
                last = length // BS
                if sum(mine[last] in other.values() for other in kept.values()) > 1:
                    mine[last] = ("copy", request)
            for k in range(-(-length // BS), -(-(length + num_tokens) // BS)):
                mine[k] = ("new", request, k)
        return len({block for mine in kept.values() for block in mine.values()})

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.texts)))
        self.pool.free(request)
        del self.texts[request], self.longest[request]

    def lengths(self, request: int) -> list[int]:
        """What a request may be cut to."""
        length = len(self.texts[request])
        least = max(self.longest[request] - self.ROLLBACK, 0)
        return sorted({0, *range(least, length + 1)})

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.texts)))
        length = data.draw(st.integers(0, len(self.texts[request])))
        if length not in self.lengths(request):
            with pytest.raises(ShapeError, match="can be cut to 0 or"):
                self.pool.truncate(request, length)
            return
        self.pool.truncate(request, length)
        del self.texts[request][length:]
        if length == 0:
            self.longest[request] = 0

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), heir=st.integers(0, 4))
    def share(self, data: st.DataObject, heir: int) -> None:
        source = data.draw(st.sampled_from(sorted(self.texts)))
        if heir in self.texts:
            return
        length = data.draw(st.sampled_from(self.lengths(source)))
        self.pool.share(source, heir, length)
        self.texts[heir] = self.texts[source][:length]
        self.longest[heir] = self.longest[source] if length else 0

    @invariant()
    def what_can_be_seen_is_there(self) -> None:
        assert set(self.pool.requests) == set(self.texts)
        for request, text in self.texts.items():
            assert self.pool.seq_len(request) == len(text)
            first = min(self.oldest(request), len(text))
            slots = self.pool.slot_mapping([(request, first, len(text))]).tolist()
            read = [self.memory[slot // self.BLOCK_SIZE][slot % self.BLOCK_SIZE] for slot in slots]
            assert read == text[first:]
            for columns in (0, 4, 7):
                ring = self.pool.block_table([request], num_columns=columns)[0].tolist()
                for position, slot in zip(range(first, len(text)), slots, strict=True):
                    block = ring[position // self.BLOCK_SIZE % len(ring)]
                    assert block == slot // self.BLOCK_SIZE

    @invariant()
    def blocks_are_counted(self) -> None:
        held = {block for request in self.texts for block in self.pool.blocks(request)}
        assert len(held) + self.pool.num_free == self.NUM_BLOCKS


TestWindowMachine = WindowMachine.TestCase


def test_everything_comes_back() -> None:
    rng = random.Random(2)
    pool = BlockPool(40, 4, window=9, rollback=3)
    alive: list[int] = []
    for number in range(300):
        if len(alive) < 4:
            if alive and rng.random() < 0.5:
                pool.share(rng.choice(alive), number)
            else:
                pool.take({number: rng.randint(0, 20)})
            alive.append(number)
        pool.take({name: rng.randint(0, 5) for name in alive})
        if rng.random() < 0.5:
            pool.free(alive.pop(rng.randrange(len(alive))))
    for name in alive:
        pool.free(name)
    assert pool.num_free == 40 and pool.requests == ()
    pool.take({"all": 160})
    assert sorted(pool.blocks("all")) == list(range(40))


def geometry_of(config: MLAConfig = TINY, **changes: Any) -> Geometry:
    given: dict[str, Any] = {
        "num_blocks": 4,
        "block_size": 128,
        "max_requests": 2,
        "max_tokens": 50,
        "window_block_size": 8,
        "rollback": 3,
        "format": "fp32",
        "index_format": "index_fp32",
    }
    return Geometry.for_model(config, **{**given, **changes})


Snapshot = list[tuple[dict[Hashable, tuple[int, ...]], dict[Hashable, int], int]]


def snapshot(pool: CompressedPool) -> Snapshot:
    return [
        (
            {name: part.blocks(name) for name in part.requests},
            {name: part.seq_len(name) for name in part.requests},
            part.num_free,
        )
        for part in pool.pools
    ]


def test_three_pools_move_together() -> None:
    pool = CompressedPool(geometry_of())
    copies = pool.take({"a": 130, "b": 5})
    assert copies == ([], [], [])
    tables = pool.tables(["b", "a", "nobody"])
    assert tables.block_table.tolist() == [[2, -1], [0, 1], [-1, -1]]
    assert tables.state_slots.tolist() == [1, 0, -1]
    assert tables.window_table.shape == (3, 17) and tables.window_table.dtype == torch.int32
    assert pool.tables(["b"], window_columns=6).window_table.shape == (1, 6)
    assert (pool.num_free, pool.num_blocks, pool.block_size) == (1, 4, 128)
    pool.free("b")
    pool.share("a", "c", 128)
    assert pool.tables(["c"]).block_table.tolist() == [[0]]
    assert [part.seq_len("c") for part in pool.pools] == [128] * 3
    assert pool.tables(["a", "c"]).state_slots.tolist() == [0, 0]
    last = pool.rows.blocks("c")[-1]
    pairs, window, states = pool.take({"c": 2})
    # 128 fills its last block of entries and of rows; only the state is written on
    assert pairs == [] and window == [] and states == [(0, 1)]
    assert pool.rows.blocks("c")[-2] == last
    pool.truncate("a", 129)
    assert pool.seq_len("a") == 129


def test_sharing_inside_blocks_copies_all_three() -> None:
    pool = CompressedPool(geometry_of())
    pool.take({"a": 61})
    pool.share("a", "b")
    before = pool.entries.blocks("b")[-1], pool.rows.blocks("b")[-1], pool.states.blocks("b")[-1]
    copies = pool.take({"b": 1, "a": 1})
    for part, source, made in zip(pool.pools, before, copies, strict=True):
        assert [pair[0] for pair in made] == [source]
        assert part.blocks("b")[-1] == made[0][1] and part.blocks("a")[-1] == source


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"a": 40, "b": 270}, "request 'b' needs 3 more blocks, and 2 of 3 are free"),
        ({"a": 20, "b": 200}, r"request 'b' needs 25 more blocks, and \d+ of 18 are free"),
        ({"a": 1, "b": 1, "c": 1}, "request 'c' needs 1 more block, and 0 of 2 are free"),
        ({"a": 1, "b": -1}, "the number of tokens for request 'b' must be"),
        ({"a": 1, "b": 1.5}, "the number of tokens for request 'b' must be"),
    ],
    ids=["entries", "rows", "states", "negative", "fraction"],
)
def test_taking_is_for_all_or_nothing(wanted: dict[str, int], message: str) -> None:
    pool = CompressedPool(geometry_of(num_blocks=3))
    pool.take({"a": 50})
    pool.take({"a": 10})
    before = snapshot(pool)
    with pytest.raises(OpenMLAError, match=f"cache: {message}"):
        pool.take(wanted)
    assert snapshot(pool) == before
    pool.take({"a": 1, "b": 1})


@pytest.mark.parametrize(
    "call",
    [
        lambda pool: pool.free("x"),
        lambda pool: pool.truncate("x", 0),
        lambda pool: pool.share("x", "y"),
        lambda pool: pool.share("a", "a"),
        lambda pool: pool.share("a", "y", 56),
        lambda pool: pool.share("a", "y", 61),
        lambda pool: pool.truncate("a", 56),
        lambda pool: pool.truncate("a", 61),
        lambda pool: pool.truncate("a", -1),
    ],
)
def test_bad_calls_change_no_pool(call: Callable[[CompressedPool], None]) -> None:
    pool = CompressedPool(geometry_of())
    pool.take({"a": 60})
    before = snapshot(pool)
    with pytest.raises(ShapeError, match="cache: request "):
        call(pool)
    assert snapshot(pool) == before


@given(st.randoms(use_true_random=False), st.data())
def test_there_are_window_blocks_enough(rng: random.Random, data: st.DataObject) -> None:
    """As promised: max_requests requests, max_tokens tokens a step, drafts taken back, beams."""
    size = data.draw(st.integers(1, 9), "window_block_size")
    window = data.draw(st.integers(1, 20), "window")
    back = data.draw(st.integers(0, 12), "rollback")
    most = data.draw(st.integers(1, 5), "max_requests")
    tokens = data.draw(st.integers(1, 40), "max_tokens")
    assert TINY.compressor is not None
    config = replace(TINY, compressor=replace(TINY.compressor, window=window))
    geometry = geometry_of(
        config,
        num_blocks=100,
        max_requests=most,
        max_tokens=tokens,
        window_block_size=size,
        rollback=back,
    )
    pool, born = CompressedPool(geometry), 0
    for _ in range(25):
        alive = list(pool.requests)
        if len(alive) < most:
            born += 1
            if alive and rng.random() < 0.4:
                pool.share(rng.choice(alive), born)
            else:
                pool.take({born: 0})
        elif rng.random() < 0.2:
            pool.free(rng.choice(alive))
        alive, left, wanted = list(pool.requests), tokens, {}
        for name in rng.sample(alive, len(alive)):
            wanted[name] = rng.choice([0, min(1, left), rng.randint(0, left), left])
            left -= wanted[name]
        pool.take(wanted)
        for name, count in wanted.items():
            if rng.random() < 0.4:
                pool.truncate(name, pool.seq_len(name) - min(rng.randint(0, back), count))


def test_window_blocks_are_not_many_more() -> None:
    """A request in the middle of nowhere: its window, the way back, and the edges of blocks."""
    geometry = geometry_of(FLASH, max_requests=1, max_tokens=1, window_block_size=64, rollback=0)
    assert geometry.window_blocks <= 2 + 128 // 64
    many = geometry_of(FLASH, max_requests=64, max_tokens=8192, window_block_size=64, rollback=8)
    rows = 64 * (128 + 8) + 8192
    assert rows / 64 <= many.window_blocks <= rows / 64 + 2 * 64
    assert many.num_states == 64


def allocate(config: MLAConfig, layer: int, **changes: Any) -> LayerCache:
    given: dict[str, Any] = {
        "num_blocks": 3,
        "block_size": 256,
        "format": "fp8_dsv4",
        "layer": layer,
        "max_requests": 2,
        "max_tokens": 100,
        "rollback": 5,
    }
    return allocate_cache(config, **{**given, **changes})


def test_shapes_and_strides() -> None:
    """Blocks of rows lie at multiples of 576 bytes, whatever they hold."""
    only, fours, many = (allocate(FLASH, layer) for layer in (0, 2, 3))
    assert [cache.ratio for cache in (only, fours, many)] == [0, 4, 128]
    assert only.geometry == fours.geometry == many.geometry
    N = (2 * (128 + 5 - 1) + 100) // 64 + 4
    for cache in (only, fours, many):
        assert cache.latent is None and cache.window is not None
        assert cache.window.data.shape == (N, 64, 584)
        assert cache.window.data.stride() == (37440, 584, 1)
        assert cache.window.format == "fp8_dsv4"
    assert (only.compressed, only.state, only.index) == (None, None, None)
    assert fours.compressed is not None and fours.index is not None and fours.state is not None
    assert fours.compressed.data.shape == (3, 64, 584)
    assert fours.compressed.data.stride() == (37440, 584, 1)
    assert fours.index.data.shape == (3, 64, 132) and fours.index.format == "index_fp8"
    # 7 tokens before the next, 5 to go back; kv and score, of entries and of keys, twice as wide
    assert fours.state.data.shape == (2, 12, 4 * 512 + 4 * 128)
    assert many.compressed is not None and many.state is not None and many.index is None
    assert many.compressed.data.shape == (3, 2, 584)
    assert many.compressed.data.stride() == (1728, 584, 1)
    # one running softmax, 5 to go back
    assert many.state.data.shape == (2, 6, 3 * 512)
    for cache in (fours, many):
        assert cache.state is not None and cache.state.data.dtype == torch.float32
    for part in (*only.parts, *fours.parts, *many.parts):
        assert not part.data.any()


@pytest.mark.parametrize("ratio", RATIOS)
def test_plain_formats(ratio: int) -> None:
    cache = allocate(TINY, RATIOS.index(ratio), format="bf16", index_format="index_bf16")
    for part in cache.parts:
        assert part.data.is_contiguous() and part.num_bytes == part.data.nbytes
        if part is not cache.state:
            assert part.data.dtype == torch.bfloat16
            assert part.data.shape[2] == (16 if part is cache.index else 32)
        if part is cache.compressed or part is cache.index:
            assert part.data.shape[:2] == (3, 256 // ratio)


def test_scaled_formats() -> None:
    cache = allocate(TINY, 1, format="fp8", kv_scale=0.5)
    for part, scale in ((cache.window, 0.5), (cache.compressed, 0.5), (cache.state, 1.0)):
        assert part is not None and part.kv_scale.item() == scale


def fill(cache: LayerCache) -> list[torch.Tensor]:
    """Random bytes in all that is not padding; returns them."""
    kept = []
    for number, part in enumerate(cache.parts):
        raw = part.data.view(torch.uint8)
        generator = torch.Generator().manual_seed(number)
        raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8, generator=generator))
        kept.append(raw.clone())
    return kept


@pytest.mark.parametrize("layer", [0, 2, 3])
def test_grown_keeps_bytes_and_strides(layer: int) -> None:
    cache = allocate(FLASH, layer)
    kept = fill(cache)
    grown = cache.grown(7, window_blocks=13, num_states=4)
    assert grown.geometry is not None and grown.ratio == cache.ratio
    sizes = (grown.geometry.num_blocks, grown.geometry.window_blocks, grown.geometry.num_states)
    assert sizes == (7, 13, 4)
    for name, count in (("window", 13), ("compressed", 7), ("state", 4), ("index", 7)):
        part, was = getattr(grown, name), getattr(cache, name)
        assert (part is None) == (was is None)
        if part is not None:
            assert part.num_blocks == count and part.data.stride() == was.data.stride()
            assert part.format == was.format and part.kv_scale is was.kv_scale
    for part, rows in zip(grown.parts, kept, strict=True):
        raw = part.data.view(torch.uint8)
        assert torch.equal(raw[: rows.shape[0]], rows) and not raw[rows.shape[0] :].any()
    same = grown.grown(5)  # nothing shrinks, nothing moves
    assert same.parts == grown.parts and same.geometry == grown.geometry
    made = allocate(FLASH, layer, num_blocks=7)
    if cache.compressed is not None and made.compressed is not None:
        assert grown.compressed is not None
        assert grown.compressed.num_bytes == made.compressed.num_bytes


def test_copies_go_to_their_own_parts() -> None:
    cache = allocate(FLASH, 2)
    kept = {id(part): rows for part, rows in zip(cache.parts, fill(cache), strict=True)}
    cache.copy_blocks([(0, 2)], [(1, 5), (3, 4)], [(1, 0)])
    for part, pairs in (
        (cache.compressed, [(0, 2)]),
        (cache.index, [(0, 2)]),
        (cache.window, [(1, 5), (3, 4)]),
        (cache.state, [(1, 0)]),
    ):
        assert part is not None
        wanted = kept[id(part)]
        for source, target in pairs:
            wanted[target] = wanted[source]
        assert torch.equal(part.data.view(torch.uint8), wanted)
    with pytest.raises(ShapeError, match="block copies must stay within 2 blocks"):
        cache.copy_blocks([], [], [(0, 2)])


def storage_bytes(cache: LayerCache) -> dict[str, int]:
    names = ("window", "compressed", "index", "state")
    parts = {name: getattr(cache, name) for name in names}
    return {
        name: part.data.untyped_storage().nbytes() if part is not None else 0
        for name, part in parts.items()
    }


@pytest.mark.parametrize("format", ["fp8_dsv4", "bf16"])
@pytest.mark.parametrize("block_size", [128, 256, 384, 1024])
@pytest.mark.parametrize("config", [FLASH, PRO], ids=["flash", "pro"])
def test_bytes_are_those_allocated(config: MLAConfig, block_size: int, format: str) -> None:
    """By kind of layer and in all, counted from the storages themselves."""
    caches = [
        allocate(
            config,
            layer,
            format=format,
            num_blocks=1000,
            block_size=block_size,
            max_requests=16,
            max_tokens=2048,
            device="meta",
        )
        for layer in range(config.num_layers)
    ]
    geometry = caches[0].geometry
    assert geometry is not None
    kinds = cache_bytes(config, geometry)
    assert sum(kind.num_layers for kind in kinds) == config.num_layers
    for kind in kinds:
        mine = [cache for cache in caches if cache.ratio == kind.ratio]
        assert len(mine) == kind.num_layers
        sums = {
            name: sum(storage_bytes(cache)[name] for cache in mine)
            for name in ("window", "compressed", "index", "state")
        }
        assert kind.window == sums["window"] and kind.state == sums["state"]
        assert kind.entries + kind.padding == sums["compressed"] + sums["index"]
        assert kind.entries == round(kind.token_bytes * 1000 * block_size) * kind.num_layers
        assert kind.total == sum(sums.values()) == sum(cache.num_bytes for cache in mine)
    total = sum(sum(storage_bytes(cache).values()) for cache in caches)
    assert sum(kind.total for kind in kinds) == total


def test_flash_at_a_million_tokens() -> None:
    """584 / 4 + 132 / 4 bytes in 21 layers, 584 / 128 in 20."""
    geometry = geometry_of(
        FLASH, num_blocks=4096, block_size=256, format="fp8_dsv4", index_format="index_fp8"
    )
    kinds = {kind.ratio: kind for kind in cache_bytes(FLASH, geometry)}
    assert {ratio: kind.num_layers for ratio, kind in kinds.items()} == {0: 2, 4: 21, 128: 20}
    assert {ratio: kind.token_bytes for ratio, kind in kinds.items()} == {
        0: 0,
        4: 179,
        128: 4.5625,
    }
    assert sum(kind.num_layers * kind.token_bytes for kind in kinds.values()) == 3850.25
    entries = sum(kind.entries for kind in kinds.values())
    assert entries == 3850.25 * 2**20 and f"{entries / GIB:.2f}" == "3.76"


def test_pro_at_a_million_tokens() -> None:
    geometry = geometry_of(
        PRO, num_blocks=4096, block_size=256, format="fp8_dsv4", index_format="index_fp8"
    )
    kinds = cache_bytes(PRO, geometry)
    assert [(kind.ratio, kind.num_layers) for kind in kinds] == [(4, 30), (128, 31)]
    assert f"{sum(kind.entries for kind in kinds) / GIB:.1f}" == "5.4"


@pytest.mark.parametrize("ratio", RATIOS)
def test_parts_know_their_bytes(ratio: int) -> None:
    geometry = geometry_of(FLASH, format="fp8_dsv4", index_format="index_fp8")
    parts = layer_parts(FLASH, geometry, ratio)
    names = {0: ["window"], 4: ["window", "compressed", "state", "index"]}
    assert [part.name for part in parts] == names.get(ratio, ["window", "compressed", "state"])
    for part in parts:
        assert part.num_bytes >= part.blocks * part.rows * part.row_bytes


def test_other_models_have_no_use_for_requests() -> None:
    cache = allocate_cache(PRESETS["tiny-v3"], num_blocks=2, block_size=4, max_requests=3)
    assert cache.geometry is None and cache.window is None and cache.ratio == 0
