"""Which cached rows a token attends to, where they lie, and their columns as tiles.

A segment names a token's rows by slot, by position within the request, as the request's last `span`
rows (a window) or as every row up to the token (a prefix, or a request's own paged rows). A row is
MAIN columns and ROPE more, loaded as separate tiles. Invalid rows are loaded as zeros, so that
nothing of unused memory, NaN or not, gets into a result.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from openmla.backends.triton._primitives import (
    FP8,
    PACKED,
    PLAIN,
    V4,
    decode_e4m3,
    load_bfloat16,
    load_group_scales,
    within,
)

SLOTS, POSITIONS, WINDOW, PREFIX, PAGED = (tl.constexpr(i) for i in range(5))
PACKED_GROUP = tl.constexpr(128)  # e4m3 columns that share a scale
V4_GROUP = tl.constexpr(64)
V4_ROPE = tl.constexpr(64)  # bf16 columns at the end of a V4 row


class Segment(NamedTuple):
    """Constants of a segment: what names its rows, how they are stored, rows of a block, and
    whether a tile of rows always lies in one block."""

    KIND: Any
    FORMAT: Any
    BS: Any
    ONE_BLOCK: Any


class Columns(NamedTuple):
    """Constants of a row: MAIN columns in one or two tiles, of BLOCK_A and BLOCK_B, and ROPE
    columns in one of BLOCK_R. The first C are values."""

    C: Any
    MAIN: Any
    ROPE: Any
    BLOCK_A: Any
    BLOCK_B: Any
    BLOCK_R: Any


class Options(NamedTuple):
    """Constants of a kernel: BLOCK_N rows of a tile and how they are loaded (OFFSET: the type of
    offsets into a cache), the loop over tiles, and products of `dtype`."""

    BLOCK_N: Any
    ALIGNED: Any
    ASM: Any
    OFFSET: Any
    STAGES: Any
    HOIST: Any
    dtype: Any
    PRECISION: Any
    UPCAST: Any
    UNCHAINED: Any


class Rows(NamedTuple):
    """A token's rows of a segment. The cache has N blocks, `page` numbers apart, of rows that are
    `stride` apart and W wide. Rows are found by the token's row ids or its position, and by its row
    of the block table, M blocks."""

    cache: Any
    page: Any
    stride: Any
    W: Any
    N: Any
    kv_scale: Any
    row_ids: Any
    position: Any
    table: Any
    M: Any


@triton.jit
def count_rows(t, b, position, B, row_lens, K, M, span, KIND: tl.constexpr, BS: tl.constexpr):
    """How many rows a segment may name for a token."""
    n = 0
    if b < B:
        if KIND == SLOTS or KIND == POSITIONS:
            n = tl.maximum(tl.minimum(tl.load(row_lens + t), K), 0)
        elif KIND == WINDOW:
            n = tl.minimum(tl.minimum(position + 1, span), M * BS).to(tl.int32)
        elif KIND == PREFIX:
            n = tl.minimum((position + 1) // span, M * BS).to(tl.int32)
    return n


@triton.jit
def load_row_ids(rows, j, hi, SEGMENT: tl.constexpr):
    """A segment's j-th rows, as slots or as positions within the request; -1 from hi on."""
    if SEGMENT.KIND == SLOTS or SEGMENT.KIND == POSITIONS:
        row_ids = tl.load(rows.row_ids + j, mask=j < hi, other=-1)
    elif SEGMENT.KIND == WINDOW:
        size = rows.M * SEGMENT.BS
        row_ids = (rows.position % size).to(tl.int32) - j
        row_ids = tl.where(j < hi, tl.where(row_ids < 0, row_ids + size, row_ids), -1)
    else:
        row_ids = tl.where(j < hi, j, -1)
    return row_ids


@triton.jit
def load_blocks(rows, row_ids, BS: tl.constexpr):
    """Physical blocks of rows named by position, -1 outside the block table."""
    return tl.load(rows.table + row_ids // BS, mask=within(row_ids, rows.M * BS), other=-1)


@triton.jit
def find_slots(rows, row_ids, BS: tl.constexpr):
    """Slots of rows named by position, -1 of invalid ones; a cache has fewer than 2**31 rows."""
    block = load_blocks(rows, row_ids, BS)
    return tl.where(within(block, rows.N), block * BS + row_ids % BS, -1)


@triton.jit
def find_rows(rows, start, j, lo, hi, SEGMENT: tl.constexpr, OFFSET: tl.constexpr):
    """Block and offset of a segment's j-th rows, and whether they are valid: if not, block and
    offset are arbitrary.

    With ONE_BLOCK a tile lies in one block, looked up once: otherwise every thread, which loads
    parts of many rows, would look each of them up.
    """
    BS: tl.constexpr = SEGMENT.BS
    if SEGMENT.ONE_BLOCK:
        block = tl.load(rows.table + start // BS)
        valid = (j >= lo) & (j < tl.where(within(block, rows.N), hi, 0))
        offset = start % BS + (j - start)
    else:
        row_ids = load_row_ids(rows, j, hi, SEGMENT)
        if SEGMENT.KIND == SLOTS:
            block = row_ids // BS
            valid = within(row_ids, rows.N * BS)
        else:
            block = load_blocks(rows, row_ids, BS)
            valid = within(block, rows.N)
        offset = row_ids % BS
    return block.to(OFFSET), offset, valid


@triton.jit
def load_stored(
    cache, row, valid, FIRST: tl.constexpr, USED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Columns FIRST .. FIRST + USED - 1 of some rows as they are stored, [BLOCK_N, BLOCK] bytes."""
    c = tl.arange(0, BLOCK)
    mask = valid[:, None]
    if USED < BLOCK:
        mask = mask & (c < USED)[None, :]
    return tl.load(cache + row[:, None] + (c + FIRST)[None, :], mask=mask, other=0)


@triton.jit
def load_main(
    cache, row, scales_at, valid, FIRST: tl.constexpr, USED: tl.constexpr, BLOCK: tl.constexpr,
    MAIN: tl.constexpr, FORMAT: tl.constexpr, OPTIONS: tl.constexpr,
):  # fmt: skip
    """Columns FIRST .. FIRST + USED - 1 of some rows as a tile [BLOCK_N, BLOCK] in the dtype of the
    products. FP8 is not yet multiplied by its kv_scale."""
    ASM: tl.constexpr = OPTIONS.ASM
    dtype: tl.constexpr = OPTIONS.dtype
    c = tl.arange(0, BLOCK)
    BYTES: tl.constexpr = MAIN - V4_ROPE - FIRST if FORMAT == V4 else USED  # V4: those in e4m3
    if BYTES >= BLOCK:
        mask = valid[:, None]
    else:
        mask = valid[:, None] & (c < BYTES)[None, :]
    tile = tl.load(cache + row[:, None] + (c + FIRST)[None, :], mask=mask, other=0)
    if FORMAT == FP8:
        tile = decode_e4m3(tile, dtype, ASM)
    if FORMAT == PACKED or FORMAT == V4:
        GROUP: tl.constexpr = PACKED_GROUP if FORMAT == PACKED else V4_GROUP
        GROUPS: tl.constexpr = BLOCK // GROUP
        g = FIRST // GROUP + tl.arange(0, GROUPS)
        mask_g = valid[:, None] & (g < (FIRST + BYTES) // GROUP)[None, :]
        scales = load_group_scales(cache, scales_at, g, mask_g, FORMAT, OPTIONS.ALIGNED)
        # e4m3 times a power of two is exact in bf16; the interpreter multiplies in float32 only
        EXACT: tl.constexpr = dtype if ASM else tl.float32
        values = tl.reshape(decode_e4m3(tile, EXACT, ASM), [valid.shape[0], GROUPS, GROUP])
        values = values * scales.to(EXACT)[:, :, None]
        if FORMAT == V4 and BYTES < BLOCK:  # the group behind the bytes is rope
            at = row + (MAIN - V4_ROPE)
            rope = load_rope(
                cache, at, valid, V4_ROPE, V4_ROPE, FORMAT, OPTIONS.ALIGNED, ASM, EXACT
            )
            is_rope = g == (MAIN - V4_ROPE) // GROUP
            values = tl.where(is_rope[None, :, None], rope[:, None, :], values)
        tile = tl.reshape(values, [valid.shape[0], BLOCK])
    return tile.to(dtype)


@triton.jit
def load_rope(
    cache, rope_at, valid,
    ROPE: tl.constexpr, BLOCK: tl.constexpr, FORMAT: tl.constexpr, ALIGNED: tl.constexpr,
    ASM: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """The last columns of some rows, [BLOCK_N, BLOCK]; bf16 inside bytes in the packed formats."""
    r = tl.arange(0, BLOCK)
    if ROPE == BLOCK:
        mask = valid[:, None]
    else:
        mask = valid[:, None] & (r < ROPE)[None, :]
    if FORMAT == PLAIN or FORMAT == FP8:
        rope = tl.load(cache + rope_at[:, None] + r[None, :], mask=mask, other=0)
        if FORMAT == FP8:
            rope = decode_e4m3(rope, dtype, ASM)
    else:
        rope = load_bfloat16((cache + rope_at)[:, None], r[None, :], mask, ALIGNED)
    return rope.to(dtype)
