"""The block pool grows by what is asked and a bounded step, a layer at a time."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from openmla.cache import PagedCache
from openmla.errors import CacheFullError
from openmla.integrations.transformers import attach, attachment_of
from openmla.integrations.transformers.growth import BLOCKS_AHEAD, MOST_BYTES, spare_blocks
from tests.integrations.generation import new_tokens, prompts
from tests.integrations.models import make_model, make_v4

V2_LITE = 27 * 64 * 1152  # bytes of a block of 64 tokens


def decoded(rows: int, start: int, stop: int, block_bytes: int) -> tuple[int, float, int]:
    """Growths, bytes copied over the last size, and the most bytes idle, of `rows` requests."""
    blocks, growths, copied, idle = 64, 0, 0, 0
    for length in range(start, stop):
        needed = rows * -(-length // 64)
        if needed > blocks:
            growths, copied = growths + 1, copied + blocks
            blocks = needed + spare_blocks(blocks, rows=rows, block_bytes=block_bytes)
            idle = max(idle, (blocks - needed) * block_bytes)
    return growths, copied / blocks, idle


@pytest.mark.parametrize(
    ("rows", "start", "stop", "growths", "idle"),
    [
        (1, 1, 131073, 29, 450 << 20),
        (8, 8192, 9217, 2, 260 << 20),  # doubling left 1.9 GiB idle here
        (64, 1024, 4097, 6, 1 << 30),
        (64, 16384, 20001, 7, 1 << 30),
    ],
)
def test_pools_grow_seldom_and_stay_near_what_is_used(
    rows: int, start: int, stop: int, growths: int, idle: int
) -> None:
    """DeepSeek-V2-Lite: a growth is a copy and a recording, and what is idle is memory."""
    seen, copied, most = decoded(rows, start, stop, V2_LITE)
    assert seen <= growths and copied < 9 and most <= idle


def test_a_step_is_bounded_whatever_is_there() -> None:
    assert spare_blocks(1 << 30, rows=0, block_bytes=1 << 20) == MOST_BYTES >> 20
    assert spare_blocks(800, rows=0, block_bytes=0) == 100
    assert spare_blocks(8, rows=5, block_bytes=1 << 40) == 5 * BLOCKS_AHEAD


def test_the_first_decoded_token_needs_no_growth() -> None:
    model = make_model("deepseek_v3")
    attach(model, block_size=4)
    ids, mask = prompts((200, 200))
    past = model(ids, attention_mask=mask, use_cache=True).past_key_values
    pool = attachment_of(model).pool
    size = pool.num_blocks
    assert size == 64 + (100 - 64) + 2 * BLOCKS_AHEAD  # not 128 blocks
    more = torch.cat([mask, mask.new_ones(2, 32)], 1)
    model(ids[:, :32], attention_mask=more, past_key_values=past)
    assert pool.num_blocks == size and pool.num_free == 0
    assert {cache.num_bytes for cache in attachment_of(model).caches.values()} == {
        size * 4 * attachment_of(model).config.latent_dim * 4
    }


def test_one_layer_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a layer is copied, those before it have let go of their old blocks."""
    model = make_model("deepseek_v3")
    ids, mask = prompts((300, 200))
    expected = new_tokens(model, ids, mask, n=40)
    attach(model, block_size=4)
    grown, alive = PagedCache.grown, list[int]()
    old: list[weakref.ref[torch.Tensor]] = []  # of one layer after another

    def watched(self: PagedCache, num_blocks: int) -> PagedCache:
        alive.append(sum(data() is not None for data in old))
        old.append(weakref.ref(self.data))
        return grown(self, num_blocks)

    monkeypatch.setattr(PagedCache, "grown", watched)
    # the first pass allocates as much as it takes, so only later ones copy
    assert torch.equal(new_tokens(model, ids, mask, n=40), expected)
    assert len(alive) >= 3 and not any(alive)


def test_a_pool_of_a_fixed_size_does_not_grow() -> None:
    """Nor do the others of a V4 model then: all of it or nothing."""
    for model, size, lens in ((make_model("deepseek_v3"), 4, (40,)), (make_v4(), 256, (600,))):
        attach(model, num_blocks=1, block_size=size)
        attachment: Any = attachment_of(model)
        before = [pool.num_blocks for pool in attachment.pools]
        ids, mask = prompts(lens)
        with pytest.raises(CacheFullError):
            model(ids, attention_mask=mask, use_cache=True)
        assert [pool.num_blocks for pool in attachment.pools] == before
        assert all(pool.num_free == pool.num_blocks for pool in attachment.pools)
