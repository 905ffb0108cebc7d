"""Key splits: rising bounds from 0 to the last key, shaped for a launch, never by neighbours."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from openmla.plan.splits import FIXED_SPLIT, SHORTEST_SPLIT, split_bounds, split_length


@given(
    seq_lens=st.lists(st.integers(0, 200_000), min_size=1, max_size=20),
    multiprocessors=st.integers(1, 200),
    block_size=st.sampled_from([1, 16, 64, 128]),
    num_splits=st.integers(0, 9),
    invariant=st.booleans(),
)
def test_bounds(
    seq_lens: list[int], multiprocessors: int, block_size: int, num_splits: int, invariant: bool
) -> None:
    length = split_length(
        seq_lens,
        multiprocessors=multiprocessors,
        block_size=block_size,
        batch_invariant=invariant,
    )
    bounds = split_bounds(torch.tensor(seq_lens, dtype=torch.int32), length, num_splits)
    X = bounds.shape[1] - 1
    assert bounds.dtype == torch.int32 and bounds.shape[0] == len(seq_lens)
    assert num_splits == X or (num_splits == 0 and X & (X - 1) == 0)
    assert (bounds[:, 0] == 0).all() and (bounds.diff(dim=1) >= 0).all()
    assert bounds[:, -1].tolist() == seq_lens
    if num_splits == 0:
        assert (bounds.diff(dim=1) <= length).all()
        assert X == 1 or max(seq_lens) > length * X // 2  # no more than a power of two needs
    if invariant:
        assert length == FIXED_SPLIT
    else:
        assert length >= SHORTEST_SPLIT and length % block_size == 0


def test_a_row_is_cut_alike_in_any_batch_when_invariant() -> None:
    rows = []
    for others in ([], [7], [200_000] * 50):
        lens = [5000, *others]
        length = split_length(lens, multiprocessors=132, block_size=64, batch_invariant=True)
        bounds = split_bounds(torch.tensor(lens, dtype=torch.int32), length)[0]
        rows.append(bounds.unique().tolist())
    assert rows[0] == rows[1] == rows[2] == [0, 1024, 2048, 3072, 4096, 5000]


def test_work_fills_the_machine() -> None:
    """One long request is cut for every multiprocessor; many requests are hardly cut. Programs of
    16 heads run two at a time, programs of 64 one, and a request's runs are of equal length."""

    def length(B: int, S: int, H: int) -> int:
        return split_length(
            [S] * B, multiprocessors=132, block_size=64, batch_invariant=False, num_heads=H
        )

    assert 131072 / 264 <= length(1, 131072, 16) <= 131072 / 264 + 64
    assert 131072 / 66 <= length(1, 131072, 128) <= 131072 / 66 + 64
    assert length(128, 131072, 16) == 131072 // 2
    assert length(64, 16384, 16) == 4096
    assert length(64, 4096, 128) == 4096
