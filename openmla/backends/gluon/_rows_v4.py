"""V4's rows of 448 + 64 (fp8_dsv4): how pages hold them, and which rows a token attends to."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from openmla.backends.gluon._primitives import request_of

# A page holds the rows of a block, then their scales. A row in 32-bit words: 448 e4m3, 64 bf16 of
# rope. Scales are 8 bytes a row, a power of two for each 64 columns, the last unused.
ROW = gl.constexpr(144)
ROW_8B = gl.constexpr(144 // 2)  # the same in units of 8 bytes, and of 16
ROW_16B = gl.constexpr(144 // 4)
GROUP = gl.constexpr(64)  # columns that share a scale
GROUPS = gl.constexpr(7)
GROUP_WORDS = gl.constexpr(16)
ROPE = gl.constexpr(7 * 16)
SCALE_WORDS = gl.constexpr(2)
# LISTED: 0 a prefix and 1 positions after a window, 2 one or two lists of slots
SLOTS = gl.constexpr(2)
# Change from step to step: their values must not recompile a kernel.
DO_NOT_SPECIALIZE = (
    "B", "first_token", "page_1", "N_1", "M_1", "span_1", "table_stride_1",
    "page_2", "N_2", "M_2", "span_2", "table_stride_2", "ids_stride", "K", "X",
)  # fmt: skip
# e4m3 bits in bf16's place are 2**120 too small. Decoded columns stay scaled by 2**-48, so that
# scale times rebias, and the product too, fit bf16 for scales of 2**-76 to 2**55. Rope queries are
# scaled alike, logits and outputs of decoded columns back.
DECODE_SCALE = gl.constexpr(2.0**-48)
INV_DECODE_SCALE = gl.constexpr(2.0**48)
REBIAS = gl.constexpr(120 - 48)  # of an exponent


class Rows(NamedTuple):
    """A token's rows: n_1 of its window, newest first, then those that row_ids lists or, without a
    list, a prefix; each segment's row of the block table and its M blocks. Of slots table_1 is the
    first list."""

    row_ids: Any
    n_1: Any
    newest: Any
    table_1: Any
    M_1: Any
    table_2: Any
    M_2: Any


@gluon.jit
def token_rows(
    t, positions, row_lens, query_start_loc, B, K, row_ids, ids_stride, table_1, table_stride_1,
    M_1, span_1, table_2, table_stride_2, M_2, span_2, LISTED: gl.constexpr, BS_1: gl.constexpr,
    BS_2: gl.constexpr,
):  # fmt: skip
    """Where a token's rows are listed, and how many they are; none past the last request."""
    request = gl.minimum(request_of(t, query_start_loc, B), B - 1).to(gl.int64)
    table_1 += request * table_stride_1
    table_2 += request * table_stride_2
    row_ids += t.to(gl.int64) * ids_stride
    position = gl.load(positions + t)
    if LISTED == SLOTS:  # position is how many slots the first list has
        table_1 += (t.to(gl.int64) - request) * table_stride_1
        n_1 = gl.minimum(position, M_1).to(gl.int32)
        newest = n_1
    else:
        n_1 = gl.minimum(gl.minimum(position + 1, span_1), M_1 * BS_1).to(gl.int32)
        newest = (position % gl.maximum(M_1 * BS_1, 1)).to(gl.int32)
    if LISTED:
        n_2 = gl.minimum(gl.load(row_lens + t), K)
    else:
        n_2 = gl.minimum((position + 1) // span_2, M_2 * BS_2).to(gl.int32)
    owned = t < gl.load(query_start_loc + B)
    n_1 = gl.where(owned, gl.maximum(n_1, 0), 0)
    n = n_1 + gl.where(owned, gl.maximum(n_2, 0), 0)
    return Rows(row_ids, n_1, newest, table_1, M_1, table_2, M_2), n


@gluon.jit
def load_row_ids(rows, j, hi, LISTED: gl.constexpr):
    """What the second segment, or with slots either, lists as a token's j-th rows; -1 where it
    lists none."""
    if LISTED == SLOTS:
        at = gl.where(j < rows.n_1, rows.table_1 + j, rows.row_ids + (j - rows.n_1))
        return gl.load(at, mask=j < hi, other=-1)
    if LISTED:
        return gl.load(rows.row_ids + (j - rows.n_1), mask=(j >= rows.n_1) & (j < hi), other=-1)
    return j - rows.n_1


@gluon.jit
def look_up(
    rows, j, row_id, hi, LISTED: gl.constexpr, BS_1: gl.constexpr, BS_2: gl.constexpr
):  # fmt: skip
    """Block and offset of a token's j-th rows, unchecked so that nothing waits for the load yet;
    block -1 where there is none. The window goes backwards from the newest row of its ring."""
    if LISTED == SLOTS:
        block = gl.where(j < rows.n_1, row_id // BS_1, row_id // BS_2)
        offset = gl.where(j < rows.n_1, row_id % BS_1, row_id % BS_2)
        return gl.where(row_id >= 0, block, -1), offset
    near = rows.newest - j
    near = gl.where(near < 0, near + rows.M_1 * BS_1, near)
    listed = (j < rows.n_1) | ((row_id >= 0) & (row_id < rows.M_2 * BS_2))
    at = gl.where(j < rows.n_1, rows.table_1 + near // BS_1, rows.table_2 + row_id // BS_2)
    block = gl.load(at, mask=listed & (j < hi), other=-1)
    return block, gl.where(j < rows.n_1, near % BS_1, row_id % BS_2)


@gluon.jit
def scale_pairs(scales, g: gl.constexpr):
    """The scale of a group times rebias, as the two equal bf16 that the decoders take. An exponent
    of 255, or one too large to hold, is NaN, as writers mark it."""
    exponent = ((scales >> (8 * g)) & 0xFF).to(gl.int32) + REBIAS
    return gl.where(exponent > 254, 0x7FC07FC0, exponent * 0x00800080)
