"""Softmax pooling per channel for compress_kv: online, compensated, resumable from a state.

A state row holds a token of an overlapping window as it came, values and biased scores; or, of
windows that do not overlap, the window's online softmax up to that token: running max, running sum
and accumulator. Sums carry their rounding error, so that a window pooled over many steps is as
precise as one pooled at once. With ALONE they are rounded after every token, as states are: then
steps may begin anywhere, and no bit changes.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from openmla.backends.triton._primitives import LOG2E, widen

LOWEST = tl.constexpr(-1.0e38)  # below every score; -inf - -inf would be NaN
ROUNDING_SHIFT = tl.constexpr(12582912.0)  # 1.5 * 2**23: adding it rounds to an integer
LN2_HIGH = tl.constexpr(0.693359375)  # n * LN2_HIGH is exact
LN2_LOW = tl.constexpr(2.12194440e-4)  # LN2_HIGH - ln 2
UNDERFLOW = tl.constexpr(-87.0)


class Tokens(NamedTuple):
    """This step's tokens, addressed by position: values, scores and, by place in a window, what is
    added to scores."""

    kv: Any
    score: Any
    bias: Any
    kv_stride: Any
    score_stride: Any
    bias_stride: Any


class Partial(NamedTuple):
    """An online softmax per channel, and the rounding errors of its sums."""

    running_max: Any
    running_sum: Any
    sum_error: Any
    acc: Any
    acc_error: Any


class Window(NamedTuple):
    """Constants: windows of RATIO tokens of D channels, V rows of a request's state, and tiles."""

    D: Any
    V: Any
    RATIO: Any
    ALONE: Any
    BLOCK_J: Any
    BLOCK_D: Any


@triton.jit
def accurate_exp(x):
    """exp of x <= 0 with an error near half an ulp: the hardware's is two, and states accumulate
    over many tokens. Cody-Waite reduction, then Cephes' polynomial for expf."""
    shifted = x * LOG2E + ROUNDING_SHIFT  # rounds to an integer, held in the last bits
    n = shifted - ROUNDING_SHIFT
    f = (x - n * LN2_HIGH) + n * LN2_LOW
    p = 1.9875691500e-4
    p = p * f + 1.3981999507e-3
    p = p * f + 8.3334519073e-3
    p = p * f + 4.1665795894e-2
    p = p * f + 1.6666665459e-1
    p = p * f + 5.0000001201e-1
    power = (shifted.to(tl.uint32, bitcast=True) << 23) + 0x3F800000  # the bits of 2**n
    scaled = ((p * f * f + f) + 1.0) * power.to(tl.float32, bitcast=True)
    return tl.where(x < UNDERFLOW, 0.0, scaled)


@triton.jit
def add_compensated(total, error, more):
    """Knuth's two-sum: total + more, and the rounding error so far."""
    summed = total + more
    taken = summed - total
    return summed, error + ((total - (summed - taken)) + (more - taken))


@triton.jit
def accumulate(partial, values, z, valid):
    """Accumulate rows [n, BLOCK_D] into an online softmax per channel."""
    new_max = tl.maximum(partial.running_max, tl.max(tl.where(valid, z, LOWEST), 0))
    rescale = accurate_exp(partial.running_max - new_max)
    probs = tl.where(valid, accurate_exp(z - new_max[None, :]), 0.0)
    running_sum, sum_error = add_compensated(
        partial.running_sum * rescale, partial.sum_error * rescale, tl.sum(probs, 0)
    )
    acc, acc_error = add_compensated(
        partial.acc * rescale, partial.acc_error * rescale, tl.sum(probs * values, 0)
    )
    return Partial(new_max, running_sum, sum_error, acc, acc_error)


@triton.jit
def load_partial(at, exists, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """An online softmax from the state, or an empty one."""
    d = tl.arange(0, BLOCK_D)
    mask = d < tl.where(exists, D, 0)  # 3.9's interpreter takes no mask made of a scalar condition
    running_max = tl.load(at + d, mask=mask, other=LOWEST)
    running_sum = tl.load(at + D + d, mask=mask, other=0.0)
    acc = tl.load(at + 2 * D + d, mask=mask, other=0.0)
    no_error = tl.zeros([BLOCK_D], tl.float32)
    return Partial(running_max, running_sum, no_error, acc, no_error)


@triton.jit
def load_tokens(tokens, p, columns, valid, RATIO: tl.constexpr):
    """Values and biased scores of this step's tokens at positions p [n], some columns."""
    at = tokens.kv + (p * tokens.kv_stride)[:, None] + columns
    values = widen(tl.load(at, mask=valid, other=0.0))
    at = tokens.score + (p * tokens.score_stride)[:, None] + columns
    z = widen(tl.load(at, mask=valid, other=0.0))
    row = tokens.bias + (p % RATIO * tokens.bias_stride)[:, None]
    return values, z + widen(tl.load(row + columns, mask=valid, other=0.0))


@triton.jit
def accumulate_tokens(partial, tokens, first, count, BLOCK_J: tl.constexpr, WINDOW: tl.constexpr):
    """Accumulate `count` of this step's tokens from position `first` on."""
    BLOCK_D: tl.constexpr = WINDOW.BLOCK_D
    d = tl.arange(0, BLOCK_D)[None, :]
    STEP: tl.constexpr = 1 if WINDOW.ALONE else BLOCK_J
    for low in range(0, count, STEP):
        j = low + tl.arange(0, STEP)
        valid = (j < count)[:, None] & (d < WINDOW.D)
        values, z = load_tokens(tokens, first + j, d, valid, WINDOW.RATIO)
        partial = accumulate(partial, values, z, (j < count)[:, None])
        if WINDOW.ALONE:
            rounded_sum = partial.running_sum + partial.sum_error
            no_sum_error = tl.zeros([BLOCK_D], tl.float32)
            rounded_acc = partial.acc + partial.acc_error
            no_acc_error = tl.zeros([BLOCK_D], tl.float32)
            partial = Partial(
                partial.running_max, rounded_sum, no_sum_error, rounded_acc, no_acc_error
            )
    return partial


@triton.jit
def pool(partial):
    return tl.div_rn(partial.acc + partial.acc_error, partial.running_sum + partial.sum_error)


@triton.jit
def pool_overlapping(tokens, state, state_row, window, start, WINDOW: tl.constexpr):
    """Pool a window's tokens and those of the one before; earlier steps' are in the state."""
    D: tl.constexpr = WINDOW.D
    RATIO: tl.constexpr = WINDOW.RATIO
    BLOCK_J: tl.constexpr = WINDOW.BLOCK_J
    BLOCK_D: tl.constexpr = WINDOW.BLOCK_D
    d = tl.arange(0, BLOCK_D)[None, :]
    lowest = tl.full([BLOCK_D], LOWEST, tl.float32)
    zeros = tl.zeros([BLOCK_D], tl.float32)
    partial = Partial(lowest, zeros, zeros, zeros, zeros)
    for low in range(0, 2 * RATIO, BLOCK_J):
        j = low + tl.arange(0, BLOCK_J)
        p = (window - 1) * RATIO + j
        exists = ((j < 2 * RATIO) & (p >= 0))[:, None]
        columns = (j // RATIO * D)[:, None] + d
        valid = exists & (d < D)
        new = (p >= start)[:, None]
        state_at = state + (p % WINDOW.V * state_row)[:, None]
        if tokens.kv.dtype == state.dtype:  # one load, from the step or the state
            at = tl.where(new, tokens.kv + (p * tokens.kv_stride)[:, None], state_at)
            values = tl.load(at + columns, mask=valid, other=0.0)
            score_at = tokens.score + (p * tokens.score_stride)[:, None]
            at = tl.where(new, score_at, state_at + 2 * D)
            z = tl.load(at + columns, mask=valid, other=0.0)
            at = tokens.bias + (p % RATIO * tokens.bias_stride)[:, None]
            biases = widen(tl.load(at + columns, mask=valid & new, other=0.0))
            z = tl.where(new, z + biases, z)
        else:
            values, z = load_tokens(tokens, p, columns, valid & new, RATIO)
            values = tl.where(
                new, values, tl.load(state_at + columns, mask=valid & ~new, other=0.0)
            )
            z = tl.where(new, z, tl.load(state_at + 2 * D + columns, mask=valid & ~new, other=0.0))
        partial = accumulate(partial, values, z, exists)
    return pool(partial)


@triton.jit
def keep_tokens(tokens, state, state_row, first, end, WINDOW: tl.constexpr):
    """Write the tokens first .. end-1 to their state rows."""
    D: tl.constexpr = WINDOW.D
    BLOCK_J: tl.constexpr = WINDOW.BLOCK_J
    d = tl.arange(0, WINDOW.BLOCK_D)[None, :]
    tl.debug_barrier()  # entries have been pooled from what is overwritten now
    for low in range(0, (end - first).to(tl.int32), BLOCK_J):
        p = first + low + tl.arange(0, BLOCK_J)
        valid = (p < end)[:, None] & (d < D)
        at = state + (p % WINDOW.V * state_row)[:, None]
        for half in tl.static_range(2):
            columns = half * D + d
            values, z = load_tokens(tokens, p, columns, valid, WINDOW.RATIO)
            tl.store(at + columns, values, mask=valid)
            tl.store(at + 2 * D + columns, z, mask=valid)


@triton.jit
def keep_partials(tokens, state, state_row, start, first, end, WINDOW: tl.constexpr):
    """Write the online softmax of a window up to each of the tokens first .. end-1."""
    D: tl.constexpr = WINDOW.D
    RATIO: tl.constexpr = WINDOW.RATIO
    window = first // RATIO * RATIO
    begin = tl.maximum(window, start)
    before = state + (start + WINDOW.V - 1) % WINDOW.V * state_row
    partial = load_partial(before, window < start, D, WINDOW.BLOCK_D)
    partial = accumulate_tokens(
        partial, tokens, begin, (first - begin).to(tl.int32), WINDOW.BLOCK_J, WINDOW
    )
    tl.debug_barrier()  # what is overwritten now has been read
    d = tl.arange(0, WINDOW.BLOCK_D)
    for k in range(0, (end - first).to(tl.int32)):
        p = first + k
        opens_window = p % RATIO == 0
        partial = Partial(
            tl.where(opens_window, LOWEST, partial.running_max),
            tl.where(opens_window, 0.0, partial.running_sum),
            tl.where(opens_window, 0.0, partial.sum_error),
            tl.where(opens_window, 0.0, partial.acc),
            tl.where(opens_window, 0.0, partial.acc_error),
        )
        partial = accumulate_tokens(partial, tokens, p, 1, 1, WINDOW)
        at = state + p % WINDOW.V * state_row
        tl.store(at + d, partial.running_max, mask=d < D)
        tl.store(at + D + d, partial.running_sum + partial.sum_error, mask=d < D)
        tl.store(at + 2 * D + d, partial.acc + partial.acc_error, mask=d < D)
