"""Shard: every length and interleave of small sizes, against a walk over all positions."""

from __future__ import annotations

import pytest
import torch

from openmla.errors import ConfigError
from openmla.ops import map_slots
from openmla.parallel import Shard

SIZES = (1, 2, 3, 4, 8)
BS = 12
RUNS = [run for run in range(1, BS + 1) if BS % run == 0]


def held(size: int, run: int, length: int) -> list[list[int]]:
    """The positions of each rank, by dealing runs out one after another."""
    ranks: list[list[int]] = [[] for _ in range(size)]
    for position in range(length):
        ranks[(position // run) % size].append(position)
    return ranks


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("size", SIZES)
def test_every_position_has_one_place(size: int, run: int) -> None:
    longest = 3 * size * BS + 1
    shards = [Shard(size, rank, run) for rank in range(size)]
    dealt = held(size, run, longest)
    positions = torch.arange(longest)
    owners, indices = shards[0].owners(positions), shards[0].local_indices(positions)
    for rank, shard in enumerate(shards):
        mine = torch.tensor(dealt[rank], dtype=torch.int64)
        assert torch.equal((owners == rank).nonzero().flatten(), mine)
        assert indices[mine].tolist() == list(range(len(mine)))  # in order, without a gap
        assert torch.equal(shard.global_positions(torch.arange(len(mine))), mine)
        for position in dealt[rank][:5]:  # integers as tensors
            assert shard.owners(position) == rank
            assert shard.global_positions(shard.local_indices(position)) == position


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("size", SIZES)
def test_lengths(size: int, run: int) -> None:
    for length in range(2 * size * BS + 2):
        lens = [len(mine) for mine in held(size, run, length)]
        assert [Shard(size, rank, run).local_len(length) for rank in range(size)] == lens
        assert Shard(size, size - 1, run).most_local(length) == max(lens)
    lengths = list(range(40))
    shard = Shard(size, size - 1, run)
    assert shard.local_lens(lengths) == [shard.local_len(n) for n in lengths]


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("size", SIZES)
def test_slots_are_those_of_map_slots(size: int, run: int) -> None:
    """A rank's slot is where the table and the local index say, as the op that reads them says."""
    table = torch.tensor([[4, 0, 2]], dtype=torch.int32)
    positions = torch.arange(3 * size * BS)
    wide = BS * size
    slots = table[0, positions // wide].long() * wide + positions % wide
    slots = torch.cat([slots, torch.tensor([-1])])
    taken = []
    for rank in range(size):
        mine = Shard(size, rank, run).local_slots(slots, BS)
        expected, _ = map_slots(
            positions.int()[None],
            table,
            torch.tensor([0, 1], dtype=torch.int32),
            BS=BS,
            num_blocks=5,
            cp_size=size,
            cp_rank=rank,
            interleave=run,
        )
        assert mine.dtype == torch.int64 and mine[-1] == -1
        assert torch.equal(mine[:-1], expected[0].long())
        taken.append(mine >= 0)
    assert torch.equal(torch.stack(taken).sum(0), (slots >= 0).long())  # one rank each


def test_a_prefix_of_positions_is_a_prefix_of_local_keys() -> None:
    for length in range(60):
        for rank in range(3):
            shard = Shard(3, rank, 4)
            seen = shard.global_positions(torch.arange(shard.local_len(60))) < length
            assert seen.tolist() == [j < shard.local_len(length) for j in range(len(seen))]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((0, 0, 1), "size must be an integer of at least 1, got 0"),
        ((2, 2, 1), "rank must be in 0..1, got 2"),
        ((2, -1, 1), "rank must be an integer of at least 0, got -1"),
        ((2, 0, 0), "interleave must be an integer of at least 1, got 0"),
        ((2.0, 0, 1), "size must be an integer of at least 1, got 2.0"),
        ((2, True, 1), "rank must be an integer of at least 0, got True"),
    ],
)
def test_bad_shards_are_refused(arguments: tuple[int, int, int], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence.replace(".", r"\.")):
        Shard(*arguments)


def test_runs_do_not_cross_blocks() -> None:
    Shard(2, 0, 4).check_block_size(64)
    for run in (3, 128):
        with pytest.raises(ConfigError, match="divide the block size of 64, got"):
            Shard(2, 0, run).check_block_size(64)
