"""map_slots: every rank, interleave and order against a plain loop; what has no slot is -1."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from openmla.errors import ShapeError
from openmla.ops import map_slots
from openmla.ops.map_slots import cost
from openmla.testing import GARBAGE_BLOCK, Inputs, start_loc, strided
from tests.ops.contract import backends, broken, put, run_or_skip
from tests.ops.declared import check_declaration

BS, M, NUM_BLOCKS = 4, 6, 9


def make(
    query_lens: Sequence[int] = (2, 0, 3),
    *,
    K: int = 17,
    padding: int = 2,
    cp_size: int = 1,
    cp_rank: int = 0,
    interleave: int = 1,
    compact: bool = False,
    seed: int = 0,
    device: str = "cpu",
) -> Inputs:
    """Positions of every kind, tables with holes, rows that belong to nobody."""
    rng = random.Random(seed)
    end = M * BS * cp_size
    special = [-1, -7, -(2**31), 2**31 - 1, end, end - 1, 0]
    T = sum(query_lens) + padding
    picked = [
        [rng.choice([rng.randrange(end), rng.choice(special)]) for _ in range(K)] for _ in range(T)
    ]
    for row in picked:
        row[K // 2 :] = row[: K - K // 2]  # repeated
    blocks = [*range(NUM_BLOCKS)] * 2 + [-1, NUM_BLOCKS, GARBAGE_BLOCK, -GARBAGE_BLOCK]
    table = [[rng.choice(blocks) for _ in range(M)] for _ in query_lens]
    tensors = {
        "positions": strided(torch.tensor(picked, dtype=torch.int32).reshape(T, K).to(device)),
        "block_table": strided(
            torch.tensor(table, dtype=torch.int32).reshape(len(query_lens), M).to(device)
        ),
        "query_start_loc": start_loc(query_lens, device),
    }
    scalars = {
        "BS": BS,
        "num_blocks": NUM_BLOCKS,
        "cp_size": cp_size,
        "cp_rank": cp_rank,
        "interleave": interleave,
        "compact": compact,
    }
    return Inputs(tensors, scalars, ())


def looped(inputs: Inputs) -> tuple[list[list[int]], list[int]]:
    """The contract, one entry at a time."""
    rank, size = inputs.scalars["cp_rank"], inputs.scalars["cp_size"]
    interleave, num_blocks = inputs.scalars["interleave"], inputs.scalars["num_blocks"]
    page = inputs.scalars["BS"]
    table, bounds = inputs["block_table"].tolist(), inputs["query_start_loc"].tolist()
    slots = []
    for t, row in enumerate(inputs["positions"].tolist()):
        owners = [b for b in range(len(table)) if bounds[b] <= t < bounds[b + 1]]
        mapped = []
        for p in row:
            slot = -1
            if owners and p >= 0:
                # positions are dealt out in runs of `interleave`, rank after rank
                turn, within = divmod(p, interleave)
                local = turn // size * interleave + within
                column, offset = divmod(local, page)
                if turn % size == rank and column < len(table[owners[0]]):
                    block = table[owners[0]][column]
                    if 0 <= block < num_blocks:
                        slot = block * page + offset
            mapped.append(slot)
        slots.append(mapped)
    lens = [sum(slot >= 0 for slot in row) for row in slots]
    if inputs.scalars["compact"]:
        slots = [[s for s in row if s >= 0] + [-1] * row.count(-1) for row in slots]
    return slots, lens


def check(inputs: Inputs, backend: str) -> None:
    slots, lens = run_or_skip(map_slots, inputs, backend)
    assert slots.dtype == lens.dtype == torch.int32
    assert slots.shape == inputs["positions"].shape and lens.shape == slots.shape[:1]
    wanted, wanted_lens = looped(inputs)
    assert slots.tolist() == wanted and lens.tolist() == wanted_lens


@pytest.mark.contract
@pytest.mark.parametrize("backend", backends("map_slots"))
@pytest.mark.parametrize("compact", [False, True], ids=["columns", "compact"])
@pytest.mark.parametrize("interleave", [1, 2, 4])
@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_contract(cp_size: int, interleave: int, compact: bool, backend: str, device: str) -> None:
    for rank in range(cp_size):
        inputs = make(
            cp_size=cp_size, cp_rank=rank, interleave=interleave, compact=compact, device=device
        )
        check(inputs, backend)


@pytest.mark.parametrize("backend", backends("map_slots"))
@pytest.mark.parametrize("compact", [False, True], ids=["columns", "compact"])
@pytest.mark.parametrize(
    ("query_lens", "K", "padding"),
    [
        ((), 5, 0),
        ((), 5, 3),
        ((0, 0), 4, 0),
        ((1,), 1, 0),
        ((0, 0, 3, 0), 3, 1),
        ((1, 1, 1, 1), 17, 0),
        ((4, 2), 129, 5),
        ((2,), 0, 1),
        ((1, 1), 2500, 1),  # more than a tile
    ],
    ids=str,
)
def test_edges(
    query_lens: tuple[int, ...], K: int, padding: int, compact: bool, backend: str, device: str
) -> None:
    check(make(query_lens, K=K, padding=padding, compact=compact, device=device), backend)


@pytest.mark.parametrize("backend", backends("map_slots"))
@pytest.mark.parametrize("interleave", [1, 2, 4, 3])
@pytest.mark.parametrize("cp_size", [1, 2, 4, 3])
def test_ranks_cover_every_position_once(
    cp_size: int, interleave: int, backend: str, device: str
) -> None:
    """Each valid position has a slot on one rank, and no two of a rank share one."""
    num_keys = M * BS * cp_size // (cp_size * interleave) * (cp_size * interleave)
    tensors = {
        "positions": torch.arange(num_keys, dtype=torch.int32, device=device)[None],
        "block_table": torch.tensor([[4, 0, 8, 2, 7, 5]], dtype=torch.int32, device=device),
        "query_start_loc": start_loc((1,), device),
    }
    owned = []
    for rank in range(cp_size):
        scalars = {
            "BS": BS,
            "num_blocks": NUM_BLOCKS,
            "cp_size": cp_size,
            "cp_rank": rank,
            "interleave": interleave,
        }
        slots, lens = run_or_skip(map_slots, Inputs(tensors, scalars, ()), backend)
        mine = slots[0, slots[0] >= 0]
        assert len(mine.unique()) == len(mine) == int(lens[0]) == num_keys // cp_size
        owned.append(slots[0] >= 0)
    assert (torch.stack(owned).sum(0) == 1).all()


@pytest.mark.parametrize("backend", backends("map_slots"))
def test_slots_up_to_int32(backend: str, device: str) -> None:
    """The largest slot there may be; no cache is needed to name it."""
    inputs = make((1,), K=4, padding=0, device=device)
    page = 64
    num_blocks = (2**31 - 1) // page
    last = torch.tensor([[num_blocks - 1, num_blocks]], dtype=torch.int32, device=device)
    positions = torch.tensor([[63, 64, 0, 128]], dtype=torch.int32, device=device)
    changed = {"block_table": lambda _: last, "positions": lambda _: positions}
    far = broken(inputs, **changed, BS=page, num_blocks=num_blocks)
    slots, lens = run_or_skip(map_slots, far, backend)
    first = (num_blocks - 1) * page
    assert slots.tolist() == [[first + 63, -1, first, -1]] and lens.tolist() == [2]


@pytest.mark.parametrize("backend", backends("map_slots"))
@pytest.mark.parametrize(
    "change",
    [
        {"BS": 5},
        {"BS": 2**40, "num_blocks": 0},
        {"interleave": 2**31},
        {"cp_size": 2**33, "cp_rank": 3},
    ],
    ids=str,
)
def test_odd_and_huge_sizes(change: dict[str, int], backend: str, device: str) -> None:
    check(broken(make(device=device), **change), backend)


@pytest.mark.parametrize("backend", backends("map_slots"))
@pytest.mark.parametrize(
    "change",
    [{"num_blocks": 0}, {"block_table": lambda t: t[:, :0]}],
    ids=["no blocks", "no columns"],
)
def test_nothing_to_find(change: dict[str, Any], backend: str, device: str) -> None:
    inputs = broken(make(device=device), **change)
    slots, lens = run_or_skip(map_slots, inputs, backend)
    assert (slots == -1).all() and (lens == 0).all()


@pytest.mark.parametrize("backend", backends("map_slots"))
def test_inputs_stay(backend: str, device: str) -> None:
    inputs = make(compact=True, device=device)
    before = inputs.clone()
    run_or_skip(map_slots, inputs, backend)
    for name, tensor in before.tensors.items():
        assert torch.equal(tensor, inputs[name])


@pytest.mark.parametrize("backend", backends("map_slots"))
@given(
    lens=st.lists(st.integers(0, 3), max_size=3),
    K=st.integers(1, 9),
    cp=st.integers(1, 5).flatmap(lambda size: st.tuples(st.just(size), st.integers(0, size - 1))),
    interleave=st.integers(1, 7),
    compact=st.booleans(),
    seed=st.integers(0, 999),
)
def test_any_layout(
    backend: str,
    lens: list[int],
    K: int,
    cp: tuple[int, int],
    interleave: int,
    compact: bool,
    seed: int,
) -> None:
    inputs = make(
        lens,
        K=K,
        cp_size=cp[0],
        cp_rank=cp[1],
        interleave=interleave,
        compact=compact,
        seed=seed,
        device="cuda" if torch.cuda.is_available() else "cpu",
    )
    check(inputs, backend)


def test_declaration(device: str) -> None:
    check_declaration(map_slots, make(cp_size=2, compact=True, device=device), "")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query_start_loc": put((0,), 1)}, "query_start_loc must start with 0"),
        ({"query_start_loc": put((1,), 4)}, "query_start_loc must not fall"),
        ({"query_start_loc": put((3,), 8)}, "query_start_loc must end within the 7 rows of posit"),
        ({"BS": 0}, "BS must be positive, got 0"),
        ({"cp_size": 0}, "cp_size must be positive, got 0"),
        ({"interleave": 0}, "interleave must be positive, got 0"),
        ({"interleave": -2}, "interleave must be positive, got -2"),
        ({"cp_rank": 1}, "cp_rank must be within 0..0, got 1"),
        ({"cp_rank": -1}, "cp_rank must be within 0..0, got -1"),
        ({"num_blocks": 2**29}, f"slots must fit int32, got {2**29} blocks of 4"),
    ],
)
def test_bad_input(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ShapeError) as error:
        broken(make(), **changes).run(map_slots, backend="reference")
    assert f"map_slots: {message}" in str(error.value)


def test_defaults_are_one_rank() -> None:
    inputs = make()
    scalars = {name: inputs.scalars[name] for name in ("BS", "num_blocks")}
    plain = Inputs(inputs.tensors, scalars, ()).run(map_slots, backend="auto")
    for actual, expected in zip(plain, inputs.run(map_slots, backend="reference"), strict=True):
        assert torch.equal(actual, expected)


def test_cost() -> None:
    needed = cost(3, K=2048)
    assert needed.bytes == 3 * (12 * 2048 + 4) and needed.flops == 0
