"""How far a block pool grows at a time: memory left idle against copies and recordings.

A pool that grows is copied, and a decode step that was recorded over it is recorded anew. So it
grows by more than is asked: by a share of what is there, which keeps all copies together within a
few times the last size, but no more bytes than one would miss; and always by some blocks for each
request that asks, or many short ones would make it grow every few tokens.
"""

from __future__ import annotations

SHARE = 8  # an eighth of what is there: up to MOST_BYTES, copies are 9 times the last size at most
MOST_BYTES = 1 << 30
BLOCKS_AHEAD = 8  # for each request that asks: 512 tokens in blocks of 64


def spare_blocks(num_blocks: int, *, rows: int, block_bytes: int) -> int:
    """Blocks beyond those asked for, of a pool of num_blocks that `rows` requests ask.

    `block_bytes` is a block over all layers, 0 where nothing is allocated yet.
    """
    share = num_blocks // SHARE
    if block_bytes:
        share = min(share, MOST_BYTES // block_bytes)
    return max(share, BLOCKS_AHEAD * rows)
