"""How far a block pool grows at a time, trading idle memory against copies and recaptures.

A pool that grows is copied, and a decode step that was captured over it is recaptured. Therefore it
grows by more than requested: by a share of its current size, which keeps all copies together within
a few times the last size, but by no more than MOST_BYTES; and always by some blocks per growing
request, or many short requests would make it grow every few tokens.
"""

from __future__ import annotations

SHARE = 8  # with an eighth, up to MOST_BYTES, copies are at most 9 times the last size
MOST_BYTES = 1 << 30
BLOCKS_AHEAD = 8  # for each growing request: 512 tokens in blocks of 64


def spare_blocks(num_blocks: int, *, rows: int, block_bytes: int) -> int:
    """Blocks beyond those requested, for a pool of num_blocks in which `rows` requests grow.

    `block_bytes` is the size of a block over all layers, 0 if nothing is allocated yet.
    """
    share = num_blocks // SHARE
    if block_bytes:
        share = min(share, MOST_BYTES // block_bytes)
    return max(share, BLOCKS_AHEAD * rows)
