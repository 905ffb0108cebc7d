"""CompressedPool: the three kinds of blocks a V4 request holds, moved together."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from openmla.cache.blocks import BlockPool
from openmla.cache.geometry import Geometry


class Copies(NamedTuple):
    """(source, target) blocks to copy before a step: arguments of LayerCache.copy_blocks."""

    pairs: list[tuple[int, int]]
    window: list[tuple[int, int]]
    states: list[tuple[int, int]]


class Tables(NamedTuple):
    """What Batch takes of some requests, on the CPU."""

    block_table: Tensor  # [B, M] i32
    window_table: Tensor  # [B, MW] i32
    state_slots: Tensor  # [B] i32, -1 for a request without tokens


class CompressedPool:
    """BlockPools of entries, of raw rows in the window and of compressor states.

    Like a BlockPool: every method does all it says, in all three, or raises and changes nothing.
    """

    def __init__(self, geometry: Geometry) -> None:
        window, back = geometry.window, geometry.rollback
        self.entries = BlockPool(geometry.num_blocks, geometry.block_size)
        self.rows = BlockPool(
            geometry.window_blocks, geometry.window_block_size, window=window, rollback=back
        )
        # one block per request, whatever its length
        self.states = BlockPool(geometry.num_states, sys.maxsize)

    def __repr__(self) -> str:
        names = ("entries", "window", "states")
        held = [f"{n}: {pool._held()}" for n, pool in zip(names, self.pools, strict=True)]
        return f"CompressedPool({'; '.join(held)}; {len(self.requests)} requests)"

    @property
    def pools(self) -> tuple[BlockPool, BlockPool, BlockPool]:
        return self.entries, self.rows, self.states

    @property
    def num_blocks(self) -> int:
        return self.entries.num_blocks

    @property
    def block_size(self) -> int:
        return self.entries.block_size

    @property
    def num_free(self) -> int:
        return self.entries.num_free

    @property
    def requests(self) -> tuple[Hashable, ...]:
        return self.entries.requests

    def seq_len(self, request: Hashable) -> int:
        return self.entries.seq_len(request)

    def take(self, wanted: Mapping[Any, int]) -> Copies:
        """Append wanted[request] tokens to each request, for all of them or for none."""
        for pool in self.pools:
            pool.check(wanted)
        return Copies(*(pool.take(wanted) for pool in self.pools))

    def free(self, request: Hashable) -> None:
        for pool in self.pools:
            pool.free(request)

    def truncate(self, request: Hashable, num_tokens: int) -> None:
        """Keep the first num_tokens tokens: none, or at most `rollback` fewer than there were."""
        self.check_truncate(request, num_tokens)
        for pool in self.pools:
            pool.truncate(request, num_tokens)

    def check_truncate(self, request: Hashable, num_tokens: int) -> None:
        """Raise what truncate() would, and do nothing else."""
        for pool in self.pools:
            pool.check_truncate(request, num_tokens)

    def share(self, source: Hashable, target: Hashable, num_tokens: int | None = None) -> None:
        """Start request `target` with the first num_tokens tokens of `source`; no byte moves."""
        for pool in (self.rows, self.entries, self.states):  # the first one refuses
            pool.share(source, target, num_tokens)

    def tables(self, requests: Sequence[Hashable], *, window_columns: int = 0) -> Tables:
        """Tables of some requests; a captured graph asks for as many window columns as it has."""
        states = self.states.block_table(requests, num_columns=1)
        window = self.rows.block_table(requests, num_columns=window_columns)
        return Tables(self.entries.block_table(requests), window, states[:, 0].contiguous())
