"""Shard: which rank holds which position of a sequence, and where; pure arithmetic.

Of W ranks, runs of I positions go round: position g lives on rank (g // I) % W, there at index
(g // (W * I)) * I + g % I. A rank's keys so keep the order of positions: whoever sees the first n
positions of a sequence sees the first local_lens(n) keys of a rank.

A table entry names a block on every rank, BS tokens on each: it covers BS * W positions. The caller
keeps tables and slots as of one process whose blocks hold BS * W tokens; `local_slots` turns such
slots into a rank's own. That needs runs that do not cross blocks: BS is a multiple of I.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from openmla.errors import ConfigError

Integers = TypeVar("Integers", int, Tensor)


@dataclass(frozen=True)
class Shard:
    """Which positions of a sequence a rank stores, and where. Pure arithmetic.

    Attributes:
        size: W, the number of ranks.
        rank: this rank.
        interleave: I, the consecutive positions that are on one rank. It divides the block size.
    """

    size: int = 1
    rank: int = 0
    interleave: int = 1

    def __post_init__(self) -> None:
        for name, least in (("size", 1), ("rank", 0), ("interleave", 1)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ConfigError(
                    f"shard: {name} must be an integer of at least {least}, got {value!r}."
                )
        if self.rank >= self.size:
            raise ConfigError(f"shard: rank must be in 0..{self.size - 1}, got {self.rank}.")

    def check_block_size(self, BS: int) -> None:
        """Raise unless blocks hold whole runs."""
        if BS % self.interleave:
            raise ConfigError(
                f"shard: interleave must divide the block size of {BS}, got {self.interleave}."
            )

    def owners(self, positions: Integers) -> Integers:
        """The rank that holds each position."""
        return positions // self.interleave % self.size

    def local_indices(self, positions: Integers) -> Integers:
        """Where its owner has each position, counted from 0 in the request."""
        size, run = self.size, self.interleave
        return positions // (size * run) * run + positions % run

    def global_positions(self, indices: Integers) -> Integers:
        """The positions that this rank has at these indices."""
        size, run = self.size, self.interleave
        return indices // run * (size * run) + self.rank * run + indices % run

    def local_len(self, length: int) -> int:
        """How many of the first `length` positions are here."""
        run = self.interleave
        rounds, rest = divmod(length, self.size * run)
        return rounds * run + min(max(rest - self.rank * run, 0), run)

    def local_lens(self, lengths: Sequence[int]) -> list[int]:
        """The same of several requests, or tokens."""
        return [self.local_len(length) for length in lengths]

    def local_counts(self, lengths: Tensor) -> Tensor:
        """The same of many, in a tensor of integers."""
        run = self.interleave
        rounds, rest = lengths // (self.size * run), lengths % (self.size * run)
        return rounds * run + (rest - self.rank * run).clamp(0, run)

    def most_local(self, length: int) -> int:
        """The most of the first `length` positions that any rank holds: what collectives are sized
        by, for all ranks know it."""
        run = self.interleave
        rounds, rest = divmod(length, self.size * run)
        return rounds * run + min(rest, run)

    def local_slots(self, slots: Tensor, BS: int) -> Tensor:
        """Slots of blocks of BS * size tokens as this rank's slots; -1 where another rank holds the
        position, and of -1."""
        wide = BS * self.size
        blocks, offsets = slots // wide, slots % wide
        here = (slots >= 0) & (self.owners(offsets) == self.rank)
        return torch.where(here, blocks * BS + self.local_indices(offsets), -1)
