"""BlockPool: tracks which request holds which blocks. Host integers only, no cache tensors."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Hashable, Mapping, Sequence
from itertools import chain
from operator import index
from typing import Any

import torch
from torch import Tensor

from openmla.errors import CacheFullError, ConfigError, ShapeError

LONG = 512  # tokens from which tensors build slots faster than Python


def as_integer(value: object) -> int | None:
    """Convert an integer, including numpy integers, to int; return None for anything else.

    bool is not accepted, nor is a tensor: reading it would wait for its device.
    """
    if type(value) is int:
        return value
    if isinstance(value, bool | Tensor) or not hasattr(value, "__index__"):
        return None
    try:
        return index(value)
    except TypeError:  # an array that is not a scalar
        return None


def _integer(name: str, value: object) -> int:
    found = as_integer(value)
    if found is None:
        raise ShapeError(f"cache: {name} must be an integer, got {value!r}.")
    return found


class BlockPool:
    """Assigns cache blocks to requests; requests can share blocks, with copy-on-write.

    A request is any hashable name. Its tokens fill its blocks in order. A method that raises has
    changed nothing. The pool holds integers only: it touches no tensor of a cache.

    Args:
        num_blocks: blocks in the cache.
        block_size: tokens per block.
        window: for sliding-window rows, how many of its last positions a token sees. take() then
            releases blocks that no later token can see, except those of requests in `busy`, whose
            tokens are still being computed.
        rollback: with a window, how many tokens truncate() can remove, counted from the longest a
            request has been.

    Raises:
        ConfigError: a size is not a positive integer.

    ```python
    import openmla

    pool = openmla.BlockPool(num_blocks=8, block_size=16)
    pool.take({"a": 20, "b": 5})  # a prompt of 20 tokens and one of 5
    assert pool.block_table(["a", "b"]).tolist() == [[0, 1], [2, -1]]
    assert pool.slot_mapping([("b", 0, 5)]).tolist() == [32, 33, 34, 35, 36]
    pool.free("a")
    ```
    """

    def __init__(
        self, num_blocks: int, block_size: int, *, window: int | None = None, rollback: int = 0
    ) -> None:
        sizes = {"num_blocks": num_blocks, "block_size": block_size}
        for name, value in (sizes if window is None else {**sizes, "window": window}).items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"cache: {name} must be a positive integer, got {value!r}.")
        if not isinstance(rollback, int) or isinstance(rollback, bool) or rollback < 0:
            raise ConfigError(
                f"cache: rollback must be an integer of at least 0, got {rollback!r}."
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.window = window
        self.rollback = rollback
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: the lowest block comes first
        self._users = [0] * num_blocks
        self._blocks: dict[Hashable, list[int]] = {}
        self._first: dict[Hashable, int] = {}  # number of earlier blocks already released
        self._lens: dict[Hashable, int] = {}
        self._longest: dict[Hashable, int] = {}
        self.busy: set[Hashable] = set()

    def __repr__(self) -> str:
        return f"BlockPool({self._held()}, {len(self._lens)} requests)"

    def _held(self) -> str:
        each = f" of {self.block_size} tokens" if self.block_size < sys.maxsize else ""
        used = self.num_blocks - self.num_free
        return f"{used} of {self.num_blocks} blocks{each} used, {self.num_free} free"

    @property
    def num_free(self) -> int:
        """Blocks that no request holds."""
        return len(self._free)

    @property
    def requests(self) -> tuple[Hashable, ...]:
        """The names of all requests, in the order of their first take() or share()."""
        return tuple(self._lens)

    def seq_len(self, request: Hashable) -> int:
        """Return the number of tokens of a request; 0 for one that is not in the pool."""
        return self._lens.get(request, 0)

    def blocks(self, request: Hashable) -> tuple[int, ...]:
        """Return the physical blocks of a request in order, without those it has released."""
        return tuple(self._blocks.get(request, ()))

    def take(self, wanted: Mapping[Any, int]) -> list[tuple[int, int]]:
        """Append wanted[request] tokens to each request, for all of them or for none.

        Args:
            wanted: new tokens by request. A request that is not in the pool is added.

        Returns:
            (source, target) block pairs to copy before the step writes, for
            LayerCache.copy_blocks(). A request that grows inside a shared block gets its own.

        Raises:
            CacheFullError: there are not enough free blocks.
        """
        wanted = self._counts(wanted)
        self._check_room(wanted)
        for request, passed in self._passed(wanted).items():
            self._release(self._blocks[request][:passed])
            del self._blocks[request][:passed]
            self._first[request] += passed
        copies = []
        for request, num_tokens in wanted.items():
            copies += self._append(request, num_tokens)
        return copies

    def check(self, wanted: Mapping[Any, int]) -> None:
        """Raise the error that take() would raise, without taking anything."""
        self._check_room(self._counts(wanted))

    def _counts(self, wanted: Mapping[Any, int]) -> dict[Any, int]:
        counts = {}
        for request, given in wanted.items():
            num_tokens = as_integer(given)
            if num_tokens is None or num_tokens < 0:
                raise ShapeError(
                    f"cache: the number of tokens for request {request!r} must be an integer of "
                    f"at least 0, got {given!r}."
                )
            counts[request] = num_tokens
        return counts

    def missing(self, wanted: Mapping[Any, int]) -> int:
        """Return how many free blocks take() lacks; 0 if it would succeed."""
        needed, free = self._needed(self._counts(wanted))
        return max(sum(needed.values()) - free, 0)

    def _check_room(self, wanted: Mapping[Any, int]) -> None:
        needed, free = self._needed(wanted)
        if sum(needed.values()) <= free:
            return
        for request, count in needed.items():
            if count > free:
                raise CacheFullError(
                    f"cache: request {request!r} needs {count} more block{'s' * (count != 1)}, and "
                    f"{free} of {self.num_blocks} are free. Free a request, or use a larger pool."
                )
            free -= count

    def _needed(self, wanted: Mapping[Any, int]) -> tuple[dict[Any, int], int]:
        """Return the blocks that each request needs, and the free blocks after out-of-window ones
        are released."""
        counts: dict[Any, int] = {}
        left: dict[int, int] = {}  # users that leave a shared block during this call
        free = len(self._free)
        for request, passed in self._passed(wanted).items():
            for block in self._blocks[request][:passed]:
                left[block] = left.get(block, 0) + 1
                free += left[block] == self._users[block]
        BS, lens, first = self.block_size, self._lens, self._first
        for request, num_tokens in wanted.items():  # runs in every step, so avoid calls
            length, held = lens.get(request, 0), self._blocks.get(request, [])
            needed = -(-(length + num_tokens) // BS) - first.get(request, 0) - len(held)
            needed = needed if needed > 0 else 0
            if num_tokens and length % BS and self._users[held[-1]] > 1:  # writes to a shared block
                last = held[-1]
                if self._users[last] - left.get(last, 0) > 1:
                    left[last] = left.get(last, 0) + 1
                    needed += 1
            counts[request] = needed
        return counts, free

    def _passed(self, wanted: Mapping[Any, int]) -> dict[Hashable, int]:
        """Return how many of the first blocks of each request have left the window permanently."""
        if self.window is None:
            return {}
        passed = {}
        for request, length in self._lens.items():
            if request in self.busy and request not in wanted:
                continue
            longest = max(self._longest[request], length + wanted.get(request, 0))
            oldest = min(length, longest - self.rollback) - (self.window - 1)
            blocks = oldest // self.block_size - self._first[request]
            if blocks > 0:
                passed[request] = min(blocks, len(self._blocks[request]))
        return passed

    def _append(self, request: Hashable, num_tokens: int) -> list[tuple[int, int]]:
        blocks = self._blocks.setdefault(request, [])
        first = self._first.setdefault(request, 0)
        copies, BS, had = [], self.block_size, self._lens.get(request, 0)
        if num_tokens and had % BS and self._users[blocks[-1]] > 1:
            source, target = blocks[-1], self._pop()
            self._users[source] -= 1
            blocks[-1] = target
            copies.append((source, target))
        length = had + num_tokens
        needed = -(-length // BS) - first - len(blocks)
        if needed > 0:
            blocks += reversed(self._free[-needed:])
            del self._free[-needed:]
            for block in blocks[-needed:]:
                self._users[block] = 1
        self._lens[request] = length
        self._longest[request] = max(self._longest.get(request, 0), length)
        return copies

    def _pop(self) -> int:
        block = self._free.pop()
        self._users[block] = 1
        return block

    def grow(self, num_blocks: int) -> None:
        """Add free blocks after the last one; enlarge the caches to match with LayerCache.grown().

        Args:
            num_blocks: the new size of the pool, not the number of blocks to add.
        """
        num_blocks = _integer("num_blocks", num_blocks)
        if num_blocks < self.num_blocks:
            raise ShapeError(
                f"cache: num_blocks must be at least the {self.num_blocks} blocks of the pool, "
                f"got {num_blocks}."
            )
        self._free = [*range(num_blocks - 1, self.num_blocks - 1, -1), *self._free]
        self._users += [0] * (num_blocks - self.num_blocks)
        self.num_blocks = num_blocks

    def free(self, request: Hashable) -> None:
        """Remove a request from the pool; blocks that no other request shares become free."""
        self._known(request)
        self._release(self._blocks.pop(request))
        for known in (self._first, self._lens, self._longest):
            del known[request]

    def truncate(self, request: Hashable, num_tokens: int) -> None:
        """Keep the first num_tokens tokens of a request and release the blocks after them."""
        num_tokens = self.check_truncate(request, num_tokens)
        if num_tokens == 0:
            self._first[request] = self._longest[request] = 0
            keep = 0
        else:
            keep = max(-(-num_tokens // self.block_size) - self._first[request], 0)
        self._release(self._blocks[request][keep:])
        del self._blocks[request][keep:]
        self._lens[request] = num_tokens

    def check_truncate(self, request: Hashable, num_tokens: int) -> int:
        """Raise the error that truncate() would raise, or return num_tokens as an int."""
        self._known(request)
        return self._check_length(request, num_tokens, "be cut to")

    def _check_length(self, request: Hashable, num_tokens: int, verb: str) -> int:
        """Raise unless a request had this length, and with a window had it recently enough."""
        num_tokens = _integer("num_tokens", num_tokens)
        length, least = self._lens[request], 0
        if self.window is not None:
            least = min(max(self._longest[request] - self.rollback, 0), length)
        if not (least <= num_tokens <= length or num_tokens == 0):
            reason = f" (rollback={self.rollback})" if least else ""
            start = f"0 or {least}" if least else "0"
            raise ShapeError(
                f"cache: request {request!r} can {verb} {start}..{length} tokens{reason}, "
                f"got num_tokens={num_tokens}."
            )
        return num_tokens

    def share(self, source: Hashable, target: Hashable, num_tokens: int | None = None) -> None:
        """Start request `target` with the first num_tokens tokens of `source`; nothing is copied.

        Args:
            source: a request in the pool.
            target: the name of the new request.
            num_tokens: defaults to all tokens of `source`.
        """
        self._known(source)
        if target in self._lens:
            raise ShapeError(
                f"cache: request {target!r} is already in the pool. Call pool.free({target!r}) "
                "first."
            )
        length = self._lens[source] if num_tokens is None else num_tokens
        length = self._check_length(source, length, "share")
        first = self._first[source] if length else 0
        blocks = self._blocks[source][: max(-(-length // self.block_size) - first, 0)]
        for block in blocks:
            self._users[block] += 1
        self._blocks[target] = blocks
        self._first[target] = first
        self._lens[target] = length
        self._longest[target] = self._longest[source] if length else 0

    def _release(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):
            self._users[block] -= 1
            if self._users[block] == 0:
                self._free.append(block)

    def _known(self, request: Hashable) -> None:
        if request not in self._lens:
            raise ShapeError(
                f"cache: request {request!r} is not in the pool. Call pool.take() for it first."
            )

    def block_table(self, requests: Sequence[Hashable], *, num_columns: int = 0) -> Tensor:
        """Build the block table of some requests: [B, M] int32 on the CPU, unused columns -1.

        With a window, rows are ring buffers: the k-th block of a request is in column k % M.

        Args:
            requests: B names. The row of a request that is not in the pool is all -1.
            num_columns: the least M. M is at least the number of blocks of the longest row.
        """
        rows = [self._blocks.get(request, []) for request in requests]
        M = max(_integer("num_columns", num_columns), max(map(len, rows), default=0))
        padded = [row + [-1] * (M - len(row)) for row in rows]
        if self.window is not None and M:
            shifts = [self._first.get(request, 0) % M for request in requests]
            padded = [row[M - n :] + row[: M - n] for row, n in zip(padded, shifts, strict=True)]
        table = array("i", chain.from_iterable(padded))  # torch.tensor() is slow over long lists
        if not table:
            return torch.empty((len(rows), M), dtype=torch.int32, device="cpu")
        return torch.frombuffer(table, dtype=torch.int32).view(len(rows), M)

    def slot_mapping(
        self, spans: Sequence[tuple[Hashable, int, int]], *, num_rows: int = 0
    ) -> Tensor:
        """Build the slots of positions start..stop-1 of each span: [T] int64 on the CPU.

        Args:
            spans: (request, start, stop), one after another.
            num_rows: the least T. Rows after the last position are -1, which is not written.

        Raises:
            ShapeError: a position has no slot, because take() was not called for it.
        """
        slots = array("q")  # converts to a tensor without a Python loop
        lens, firsts = self._lens, self._first
        parts: list[Tensor] = []
        through: list[int] = []  # blocks of long spans, one after another
        long: list[tuple[int, int]] = []
        BS, given = self.block_size, 0
        for request, start, stop in spans:
            first = firsts.get(request, 0)
            if type(start) is not int or type(stop) is not int:
                start, stop = _integer("start", start), _integer("stop", stop)
            if not first * BS <= start <= stop <= lens.get(request, 0):
                raise self._no_slots(request, start, stop)
            blocks = self._blocks.get(request, [])
            given += stop - start
            if stop - start > LONG:
                if slots:
                    parts.append(_tensor_of(slots))
                    slots = array("q")
                through += blocks[start // BS - first : (stop - 1) // BS - first + 1]
                long.append((start % BS, stop - start))
                continue
            if long:
                parts.append(slots_of_blocks(through, long, BS))
                through, long = [], []
            if stop - start == 1:  # decode
                slots.append(blocks[start // BS - first] * BS + start % BS)
                continue
            while start < stop:  # one block at a time
                block, offset = divmod(start, BS)
                end = min(stop, start - offset + BS)
                slot = blocks[block - first] * BS + offset
                slots.extend(range(slot, slot + end - start))
                start = end
        if long:
            parts.append(slots_of_blocks(through, long, BS))
        slots.extend([-1] * (_integer("num_rows", num_rows) - given))
        if slots or not parts:
            parts.append(_tensor_of(slots))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _no_slots(self, request: Hashable, start: int, stop: int) -> ShapeError:
        """Make the error for positions without slots: usually take() was not called for them."""
        length, oldest = self.seq_len(request), self._first.get(request, 0) * self.block_size
        call = f"Call pool.take({{{request!r}: {stop - length}}}) before slot_mapping()."
        if not oldest <= start <= stop:
            return ShapeError(
                f"cache: positions of request {request!r} must lie in {oldest}..{length}, got "
                f"{start}..{stop}."
            )
        if request not in self._lens:
            return ShapeError(f"cache: request {request!r} has no blocks in the pool. {call}")
        return ShapeError(
            f"cache: request {request!r} has {length} tokens in the pool, got positions "
            f"{start}..{stop}. {call}"
        )


def _tensor_of(slots: array[int]) -> Tensor:
    return torch.frombuffer(slots, dtype=torch.int64) if slots else torch.empty(0).long()


def slots_of_blocks(blocks: Sequence[int], spans: Sequence[tuple[int, int]], BS: int) -> Tensor:
    """Return [T] i64 consecutive slots through blocks. A span is an offset into its first block and
    a number of slots. The blocks of the next span follow."""
    starts = _tensor_of(array("q", blocks)) * BS
    slots = (starts[:, None] + torch.arange(BS, device="cpu")).view(-1)
    if slots.shape[0] == sum(num for _, num in spans):  # whole blocks
        return slots
    parts, first = [], 0
    for offset, num in spans:
        parts.append(slots[first + offset : first + offset + num])
        first += -(-(offset + num) // BS) * BS
    return torch.cat(parts)
