"""Latent attention of few heads, 16 a program: all but how rows are stored; Gluon, SM80 and up.

16-byte loads of 8 rows by 4 lanes already are the second operand of q @ rows.T when that holds 16
values per lane, so keys go from memory through the decoder into the matrix units without shared
memory; the same registers are stored once, as bf16, and read transposed as values. Scores pass
through a small tile so that the softmax of a head stays within one warp.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from openmla.backends.gluon._primitives import (
    INITIAL_MAX,
    LINE,
    C,
    normalize,
    output_line,
    scale_at,
)

BLOCK_H = gl.constexpr(16)
MMA = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [1, 4], [16, 8]))
SHARED = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
SCORES = gl.constexpr(gl.SwizzledSharedLayout(4, 1, 8, [1, 0]))
SOFTMAX = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0]))
SCORED_ROWS = gl.constexpr(gl.SliceLayout(0, SOFTMAX))
HEADS = gl.constexpr(gl.SliceLayout(1, SOFTMAX))
ACC_HEADS = gl.constexpr(gl.SliceLayout(1, MMA))


class Exchange(NamedTuple):
    """Shared memory through which probs, scores and one number per head change layouts."""

    probs: Any
    scores: Any
    heads: Any


@gluon.jit
def allocate_exchange(BLOCK_N: gl.constexpr):
    probs = gl.allocate_shared_memory(gl.bfloat16, [BLOCK_H, BLOCK_N], SHARED)
    scores = gl.allocate_shared_memory(gl.float32, [BLOCK_H, BLOCK_N], SCORES)
    return Exchange(probs, scores, gl.allocate_shared_memory(gl.float32, [BLOCK_H], LINE))


@gluon.jit
def initial_state(BLOCK_N: gl.constexpr):
    """Running sum, which is reduced over rows only in the epilogue, and running max."""
    running_sum = gl.zeros([BLOCK_H, BLOCK_N], gl.float32, SOFTMAX)
    return running_sum, gl.full([BLOCK_H], INITIAL_MAX, gl.float32, HEADS)


@gluon.jit
def scale_heads(qk_scale, q_scale, first_head, H: gl.constexpr, Q_SCALES: gl.constexpr):
    """What scores of e4m3 queries are multiplied with, a column."""
    heads = first_head + gl.arange(0, BLOCK_H, HEADS)
    own = gl.load(q_scale + scale_at(heads, Q_SCALES), mask=heads < H, other=0.0)
    return (qk_scale * own)[:, None]


@gluon.jit
def score(scores, tile, q, WIDTH: gl.constexpr):
    """Adds the product of queries and some columns of the keys, WIDTH of them in each lane."""
    keys = gl.convert_layout(
        gl.permute(tile, (1, 0)), gl.DotOperandLayout(1, MMA, WIDTH), assert_trivial=True
    )
    return mma_v2(q.load(gl.DotOperandLayout(0, MMA, WIDTH)), keys, scores)


@gluon.jit
def softmax_step(scores, valid, qk_scale, running_max, running_sum, exchange, SCALE: gl.constexpr):
    """One tile of scores, of keys that are SCALE too small, into probs, left in shared memory. The
    running sum stays unreduced. Also returns what accumulators are to be rescaled with."""
    exchange.scores.store(scores)
    logits = exchange.scores.load(SOFTMAX) * (qk_scale * SCALE)
    logits = gl.where(valid[None, :], logits, float("-inf"))
    new_max = gl.maximum(running_max, gl.max(logits, 1))
    rescale = gl.exp2(running_max - new_max)
    probs = gl.exp2(logits - new_max[:, None])
    exchange.probs.store(probs.to(gl.bfloat16))
    exchange.heads.store(rescale)
    running_sum = running_sum * rescale[:, None] + probs
    return new_max, running_sum, exchange.heads.load(ACC_HEADS)[:, None]


@gluon.jit
def accumulate(acc, rescale, exchange, values, TILES: gl.constexpr, BLOCK_N: gl.constexpr):
    """Rescales accumulators and adds probs @ values, 16 rows at a time, as mma takes them."""
    rescaled = ()
    for g in gl.static_range(TILES):
        rescaled += (acc[g] * rescale,)
    acc = rescaled
    for k in gl.static_range(BLOCK_N // 16):
        probs = exchange.probs.slice(k * 16, 16, 1).load(gl.DotOperandLayout(0, MMA, 2))
        added = ()
        for g in gl.static_range(TILES):
            tile = values[g].slice(k * 16, 16, 0).load(gl.DotOperandLayout(1, MMA, 2))
            added += (mma_v2(probs, tile, acc[g]),)
        acc = added
    return acc


@gluon.jit
def store_lse(
    running_max, running_sum, exchange, lse, sink, first_head, t64, x, X, NUMERATOR: gl.constexpr,
    H: gl.constexpr, SPLIT: gl.constexpr, SINK: gl.constexpr,
):  # fmt: skip
    """First half of the epilogue. Returns what accumulators are normalized with, and the line of
    outputs."""
    heads, head_lse, normalizer = normalize(
        running_max, gl.sum(running_sum, 1), sink, first_head, NUMERATOR, H, SINK
    )
    exchange.heads.store(normalizer)
    normalizer = exchange.heads.load(ACC_HEADS)[:, None]
    line = output_line(t64, x, X, SPLIT)
    gl.store(lse + line * H + heads, head_lse, mask=heads < H)
    return normalizer, line


@gluon.jit
def output_at(out, line, first_head, WIDTH: gl.constexpr, H: gl.constexpr):
    """Heads, and where the first WIDTH columns of their outputs go."""
    heads = first_head + gl.arange(0, BLOCK_H, ACC_HEADS)
    at = out + ((line * H + heads) * C)[:, None]
    return heads, at + gl.arange(0, WIDTH, gl.SliceLayout(0, MMA))[None, :]
