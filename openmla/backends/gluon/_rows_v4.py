"""V4's rows of 448 + 64 (fp8_dsv4): how pages hold them, and which rows a token attends to."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from openmla.backends.gluon._primitives import request_of
from openmla.backends.triton import _pieces as pieces

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
# What follows a window, or with slots a list: LISTED is one of _pieces.py's kinds.
SLOTS = pieces.SLOTS
# Change from step to step: their values must not recompile a kernel.
DO_NOT_SPECIALIZE = (
    "B", "first_token", "T", "slot_rows", "units", "first_part", "page_1", "N_1", "M_1", "span_1",
    "table_stride_1", "page_2", "N_2", "M_2", "span_2", "table_stride_2", "ids_stride", "K", "X",
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


class Lists(NamedTuple):
    """Where all tokens' rows are listed: strides from token to token, or from request to request of
    tables."""

    row_ids: Any
    ids_stride: Any
    table_1: Any
    table_stride_1: Any
    M_1: Any
    table_2: Any
    table_stride_2: Any
    M_2: Any


@gluon.jit
def tokens_of(
    positions, row_lens, query_start_loc, B, K, M_1, span_1, M_2, span_2, LISTED: gl.constexpr,
    BS_1: gl.constexpr, BS_2: gl.constexpr,
):  # fmt: skip
    room_1 = M_1 * BS_1
    if LISTED == SLOTS:
        room_1 = M_1
    return pieces.Tokens(
        query_start_loc, B, row_lens, K, positions, span_1, room_1, span_2, M_2 * BS_2
    )


@gluon.jit
def rows_of(lists, tokens, t, LISTED: gl.constexpr):
    """A token's rows, and how many they are."""
    n_1, n = pieces.count_rows(tokens, t, LISTED)
    request = request_of(t, tokens.query_start_loc, tokens.B)
    request = gl.minimum(request, tokens.B - 1).to(gl.int64)
    table_1 = lists.table_1 + request * lists.table_stride_1
    table_2 = lists.table_2 + request * lists.table_stride_2
    row_ids = lists.row_ids + t.to(gl.int64) * lists.ids_stride
    if LISTED == SLOTS:
        table_1 += (t.to(gl.int64) - request) * lists.table_stride_1
        newest = n_1
    else:
        position = gl.load(tokens.positions + t)
        newest = (position % gl.maximum(tokens.room_1, 1)).to(gl.int32)
    return Rows(row_ids, n_1, newest, table_1, lists.M_1, table_2, lists.M_2), n


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
