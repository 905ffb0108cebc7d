"""Shard: which rank holds which position of a sequence, and where. Pure arithmetic.

Runs of I positions are distributed round-robin over W ranks: position g is on rank (g // I) % W, at
index (g // (W * I)) * I + g % I. The keys of a rank thus keep the order of positions: a token that
sees the first n positions of a sequence sees the first local_lens(n) keys of a rank.

A table entry is a block of BS tokens on every rank, so it covers BS * W positions. The caller keeps
tables and slots as for one process whose blocks hold BS * W tokens, and `local_slots` converts such
slots to a rank's own. Runs must not cross blocks, so BS is a multiple of I.
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
        """Return the rank that holds each position."""
        return positions // self.interleave % self.size

    def local_indices(self, positions: Integers) -> Integers:
        """Return the index of each position on its owner, counted from 0 in the request."""
        size, run = self.size, self.interleave
        return positions // (size * run) * run + positions % run

    def global_positions(self, indices: Integers) -> Integers:
        """Return the positions that this rank holds at these indices."""
        size, run = self.size, self.interleave
        return indices // run * (size * run) + self.rank * run + indices % run

    def local_len(self, length: int) -> int:
        """Return how many of the first `length` positions this rank holds."""
        run = self.interleave
        rounds, rest = divmod(length, self.size * run)
        return rounds * run + min(max(rest - self.rank * run, 0), run)

    def local_lens(self, lengths: Sequence[int]) -> list[int]:
        """Return local_len() of several requests or tokens."""
        return [self.local_len(length) for length in lengths]

    def local_counts(self, lengths: Tensor) -> Tensor:
        """Return local_len() of a tensor of integers."""
        run = self.interleave
        rounds, rest = lengths // (self.size * run), lengths % (self.size * run)
        return rounds * run + (rest - self.rank * run).clamp(0, run)

    def most_local(self, length: int) -> int:
        """Return the most of the first `length` positions that any rank holds. Collectives use this
        size, because all ranks can compute it."""
        run = self.interleave
        rounds, rest = divmod(length, self.size * run)
        return rounds * run + min(rest, run)

    def local_slots(self, slots: Tensor, BS: int) -> Tensor:
        """Convert slots of blocks of BS * size tokens to this rank's slots; -1 if another rank
        holds the position, and for -1."""
        wide = BS * self.size
        blocks, offsets = slots // wide, slots % wide
        here = (slots >= 0) & (self.owners(offsets) == self.rank)
        return torch.where(here, blocks * BS + self.local_indices(offsets), -1)
