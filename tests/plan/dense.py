"""Steps of dense layers to plan."""

from __future__ import annotations

from openmla import Batch, BlockPool

BS = 4


def make_batch(query_lens: list[int], seq_lens: list[int], BS: int = BS) -> Batch:
    """Requests that have all their tokens, in a pool of their own."""
    pool = BlockPool(num_blocks=sum(-(-S // BS) for S in seq_lens) + 1, block_size=BS)
    pool.take(dict(enumerate(seq_lens)))
    spans = [(b, S - n, S) for b, (n, S) in enumerate(zip(query_lens, seq_lens, strict=True))]
    return Batch(
        query_lens, seq_lens, pool.block_table(range(len(seq_lens))), pool.slot_mapping(spans)
    )
