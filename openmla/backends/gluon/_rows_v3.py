"""Rows of 512 + 64 columns: how fp8_ds_mla packs them, and which rows a token lists."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from openmla.backends.gluon._primitives import request_of

# A packed row in 32-bit words: 512 e4m3, a float32 scale for each 128 of them, 64 bf16 of rope.
GROUP = gl.constexpr(128)  # columns that share a scale
GROUPS = gl.constexpr(4)
GROUP_WORDS = gl.constexpr(32)
SCALES = gl.constexpr(128)
ROPE = gl.constexpr(132)
# Change from step to step: their values must not recompile a kernel.
DO_NOT_SPECIALIZE = (
    "B", "first_token", "T", "slot_rows", "units", "first_part", "num_blocks", "table_stride",
    "K", "M", "X",
)  # fmt: skip
# e4m3 bits in bf16's place are 2**120 too small. Decoded tiles stay scaled by 2**-16, so that scale
# times rebias fits bf16 for scales up to 2**23. Rope queries are scaled alike, logits and outputs
# back.
DECODE_SCALE = gl.constexpr(2.0**-16)
INV_DECODE_SCALE = gl.constexpr(2.0**16)
REBIAS = gl.constexpr(2.0 ** (120 - 16))


@gluon.jit
def scale_pairs(scale):
    """Scale times rebias, as the two equal bf16 that the decoders take."""
    half = (scale * REBIAS).to(gl.bfloat16).to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF
    return half | (half << 16)


@gluon.jit
def token_rows(t, row_lens, query_start_loc, table, table_stride, B, K, BS: gl.constexpr):
    """A token's row of the block table and how many rows it lists; none past the last request."""
    if BS > 0:
        request = request_of(t, query_start_loc, B)
        table += gl.minimum(request, B - 1).to(gl.int64) * table_stride
    n = gl.where(t < gl.load(query_start_loc + B), gl.minimum(gl.load(row_lens + t), K), 0)
    return table, n


@gluon.jit
def look_up(row_id, table, M, BS: gl.constexpr):
    """Block and offset of listed rows, unchecked so that nothing waits for the load yet. Slots are
    blocks of one row; offset -1 marks positions outside the table."""
    if BS == 0:
        return row_id, gl.zeros_like(row_id)
    in_table = (row_id >= 0) & (row_id < M * BS)
    block = gl.load(table + gl.where(in_table, row_id // BS, 0), mask=in_table, other=-1)
    return block, gl.where(in_table, row_id % BS, -1)


@gluon.jit
def find_row(block, offset, num_blocks, BS: gl.constexpr):
    """Slot and valid mask of looked-up rows; slot 0 where not valid."""
    valid = (block >= 0) & (block < num_blocks)
    if BS > 0:
        valid = valid & (offset >= 0)
        block = block * BS + offset
    return gl.where(valid, block, 0).to(gl.int64), valid
