"""PoolGroup: several block pools that are changed together, for rows with different lifetimes."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from openmla.cache.blocks import BlockPool


class PoolGroup:
    """Block pools of the same requests. A method changes all of them, or raises and changes
    nothing. The first pool's rows live as long as their request."""

    def __init__(self, pools: Mapping[str, BlockPool]) -> None:
        self.names = tuple(pools)
        self.pools = tuple(pools.values())

    def __repr__(self) -> str:
        held = [f"{n}: {pool._held()}" for n, pool in zip(self.names, self.pools, strict=True)]
        return f"{type(self).__name__}({'; '.join(held)}; {len(self.requests)} requests)"

    @property
    def num_blocks(self) -> int:
        return self.pools[0].num_blocks

    @property
    def block_size(self) -> int:
        return self.pools[0].block_size

    @property
    def num_free(self) -> int:
        return self.pools[0].num_free

    @property
    def requests(self) -> tuple[Hashable, ...]:
        return self.pools[0].requests

    def seq_len(self, request: Hashable) -> int:
        """Return the number of tokens of a request; 0 for one that is not in the pools."""
        return self.pools[0].seq_len(request)

    def take(self, wanted: Mapping[Any, int]) -> Sequence[list[tuple[int, int]]]:
        """Append wanted[request] tokens to each request, for all of them or for none.

        Returns:
            Per pool, the block copies to do before the step writes.

        Raises:
            CacheFullError: one of the pools does not have enough free blocks.
        """
        for pool in self.pools:
            pool.check(wanted)
        return [pool.take(wanted) for pool in self.pools]

    def free(self, request: Hashable) -> None:
        """Remove a request from the pools; blocks that no other request shares become free."""
        for pool in self.pools:
            pool.free(request)

    def truncate(self, request: Hashable, num_tokens: int) -> None:
        """Keep the first num_tokens tokens: 0, or at most `rollback` fewer than there were."""
        self.check_truncate(request, num_tokens)
        for pool in self.pools:
            pool.truncate(request, num_tokens)

    def check_truncate(self, request: Hashable, num_tokens: int) -> None:
        """Raise the error that truncate() would raise, without changing anything."""
        for pool in self.pools:
            pool.check_truncate(request, num_tokens)

    def share(self, source: Hashable, target: Hashable, num_tokens: int | None = None) -> None:
        """Start request `target` with the first tokens of `source`; nothing is copied."""
        for pool in sorted(self.pools, key=lambda pool: pool.window is None):  # a window may raise
            pool.share(source, target, num_tokens)


def ring_blocks(window: int, rollback: int, requests: int, tokens: int, block_size: int) -> int:
    """Blocks of the rings of so many requests, in steps of so many tokens."""
    # n consecutive positions span up to n / block_size + 2 blocks
    return (requests * (window + rollback - 1) + tokens) // block_size + 2 * requests
