"""CompressedPool: the three block pools of a DeepSeek V4 model, changed together."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from openmla.cache.blocks import BlockPool
from openmla.cache.geometry import Geometry
from openmla.cache.group import PoolGroup


class Copies(NamedTuple):
    """(source, target) blocks to copy before a step: arguments of LayerCache.copy_blocks."""

    pairs: list[tuple[int, int]]
    window: list[tuple[int, int]]
    states: list[tuple[int, int]]


class Tables(NamedTuple):
    """The tables of some requests, on the CPU, under the names that Batch uses."""

    block_table: Tensor  # [B, M] i32
    window_table: Tensor  # [B, MW] i32
    state_slots: Tensor  # [B] i32, -1 for a request without tokens


class CompressedPool(PoolGroup):
    """Assigns blocks of the three DeepSeek V4 caches: entries, recent rows, compressor states.

    It works like a BlockPool: a method changes all three pools, or raises and changes nothing.

    Args:
        geometry: the sizes of the caches, LayerCache.geometry of any layer of the model.

    ```python
    import openmla

    config = openmla.PRESETS["tiny-v4"]
    cache = openmla.allocate_cache(
        config, num_blocks=4, block_size=256, format="fp32", max_requests=2, max_tokens=64
    )
    pool = openmla.CompressedPool(cache.geometry)
    pool.take({"a": 20})
    batch = openmla.Batch([20], [20], **pool.tables(["a"])._asdict())
    ```
    """

    def __init__(self, geometry: Geometry) -> None:
        window, back = geometry.window, geometry.rollback
        self.entries = BlockPool(geometry.num_blocks, geometry.block_size)
        self.rows = BlockPool(
            geometry.window_blocks, geometry.window_block_size, window=window, rollback=back
        )
        # one block per request, whatever its length
        self.states = BlockPool(geometry.num_states, sys.maxsize)
        super().__init__({"entries": self.entries, "window": self.rows, "states": self.states})

    def take(self, wanted: Mapping[Any, int]) -> Copies:
        """Append wanted[request] tokens to each request, for all of them or for none.

        Returns:
            The block copies to do before the step writes: LayerCache.copy_blocks(*copies).

        Raises:
            CacheFullError: one of the three pools does not have enough free blocks.
        """
        return Copies(*super().take(wanted))

    def tables(self, requests: Sequence[Hashable], *, window_columns: int = 0) -> Tables:
        """Build the tables of some requests, for Batch.

        Args:
            requests: B names. A request that is not in the pool gets rows of -1.
            window_columns: the least number of columns of window_table. A captured graph needs as
                many as its buffers have.
        """
        states = self.states.block_table(requests, num_columns=1)
        window = self.rows.block_table(requests, num_columns=window_columns)
        return Tables(self.entries.block_table(requests), window, states[:, 0].contiguous())
