"""Latent attention of few heads, 16 a program: all but how rows are stored; Gluon, SM80 and up.

16-byte loads of 8 rows by 4 lanes already are the second operand of q @ rows.T when that holds 16
values per lane, so keys go from memory through the decoder into the matrix units without shared
memory; the same registers are stored once, as bf16, and read transposed as values. Scores pass
through a small tile so that the softmax of a head stays within one warp.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from openmla.backends.gluon._primitives import INITIAL_MAX, LINE, OUT, normalise, output_line

BLOCK_H = gl.constexpr(16)
MMA = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [1, 4], [16, 8]))
SHARED = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
SCORES = gl.constexpr(gl.SwizzledSharedLayout(4, 1, 8, [1, 0]))
SOFTMAX = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0]))
SCORED_ROWS = gl.constexpr(gl.SliceLayout(0, SOFTMAX))
HEADS = gl.constexpr(gl.SliceLayout(1, SOFTMAX))
ACC_HEADS = gl.constexpr(gl.SliceLayout(1, MMA))


@gluon.jit
def allocate_softmax(BLOCK_N: gl.constexpr):
    """Shared memory that changes layouts: of probs, of scores, of one number per head."""
    prob_tile = gl.allocate_shared_memory(gl.bfloat16, [BLOCK_H, BLOCK_N], SHARED)
    score_tile = gl.allocate_shared_memory(gl.float32, [BLOCK_H, BLOCK_N], SCORES)
    return prob_tile, score_tile, gl.allocate_shared_memory(gl.float32, [BLOCK_H], LINE)


@gluon.jit
def initial_state(BLOCK_N: gl.constexpr):
    """Running max, and running sum, which is reduced over rows only in the epilogue."""
    running_sum = gl.zeros([BLOCK_H, BLOCK_N], gl.float32, SOFTMAX)
    return gl.full([BLOCK_H], INITIAL_MAX, gl.float32, HEADS), running_sum


@gluon.jit
def score(scores, tile, q, WIDTH: gl.constexpr):
    """Adds the product of queries and some columns of the keys, WIDTH of them in each lane."""
    keys = gl.convert_layout(
        gl.permute(tile, (1, 0)), gl.DotOperandLayout(1, MMA, WIDTH), assert_trivial=True
    )
    return mma_v2(q.load(gl.DotOperandLayout(0, MMA, WIDTH)), keys, scores)


@gluon.jit
def softmax_step(scores, valid, qk_scale, running_max, running_sum, tiles, SCALE: gl.constexpr):
    """One tile of scores, of keys that are SCALE too small, into probs, left in shared memory. The
    running sum stays unreduced. Also returns what accumulators are to be rescaled with."""
    prob_tile, score_tile, head_line = tiles
    score_tile.store(scores)
    logits = score_tile.load(SOFTMAX) * (qk_scale * SCALE)
    logits = gl.where(valid[None, :], logits, float("-inf"))
    new_max = gl.maximum(running_max, gl.max(logits, 1))
    rescale = gl.exp2(running_max - new_max)
    probs = gl.exp2(logits - new_max[:, None])
    prob_tile.store(probs.to(gl.bfloat16))
    head_line.store(rescale)
    running_sum = running_sum * rescale[:, None] + probs
    return new_max, running_sum, head_line.load(ACC_HEADS)[:, None]


@gluon.jit
def accumulate(acc, rescale, prob_tile, values, TILES: gl.constexpr, BLOCK_N: gl.constexpr):
    """Rescales accumulators and adds probs @ values, 16 rows at a time, as mma takes them."""
    rescaled = ()
    for g in gl.static_range(TILES):
        rescaled += (acc[g] * rescale,)
    acc = rescaled
    for k in gl.static_range(BLOCK_N // 16):
        probs = prob_tile.slice(k * 16, 16, 1).load(gl.DotOperandLayout(0, MMA, 2))
        added = ()
        for g in gl.static_range(TILES):
            tile = values[g].slice(k * 16, 16, 0).load(gl.DotOperandLayout(1, MMA, 2))
            added += (mma_v2(probs, tile, acc[g]),)
        acc = added
    return acc


@gluon.jit
def store_lse(
    running_max, running_sum, head_line, lse, sink, first_head, t64, x, X, NUMERATOR: gl.constexpr,
    H: gl.constexpr, SPLIT: gl.constexpr, SINK: gl.constexpr,
):  # fmt: skip
    """First half of the epilogue. Returns what accumulators are normalised with, and the line of
    outputs."""
    heads, natural_lse, normaliser = normalise(
        running_max, gl.sum(running_sum, 1), sink, first_head, NUMERATOR, H, SINK
    )
    head_line.store(normaliser)
    normaliser = head_line.load(ACC_HEADS)[:, None]
    line = output_line(t64, x, X, SPLIT)
    gl.store(lse + line * H + heads, natural_lse, mask=heads < H)
    return normaliser, line


@gluon.jit
def output_at(out, line, first_head, WIDTH: gl.constexpr, H: gl.constexpr):
    """Heads, and where the first WIDTH columns of their outputs go."""
    heads = first_head + gl.arange(0, BLOCK_H, ACC_HEADS)
    at = out + ((line * H + heads) * OUT)[:, None]
    return heads, at + gl.arange(0, WIDTH, gl.SliceLayout(0, MMA))[None, :]
