"""Softmax pooling per channel for compress_kv: online, compensated, resumable from a state.

A state row holds a token of an overlapping window as it came, values and biased scores; or, of
windows that do not overlap, the window's online softmax up to that token: running max, running sum
and accumulator. Sums carry their rounding error, so that a window pooled over many steps is as
precise as one pooled at once. With ALONE they are rounded after every token, as states are: then
steps may begin anywhere, and no bit changes.
"""

import triton
import triton.language as tl

from openmla.backends.triton._primitives import LOG2E, widen

LOWEST = tl.constexpr(-1.0e38)  # below every score; -inf - -inf would be NaN
ROUNDING_SHIFT = tl.constexpr(12582912.0)  # 1.5 * 2**23: adding it rounds to an integer
LN2_HIGH = tl.constexpr(0.693359375)  # n * LN2_HIGH is exact
LN2_LOW = tl.constexpr(2.12194440e-4)  # LN2_HIGH - ln 2
UNDERFLOW = tl.constexpr(-87.0)


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
def accumulate(running_max, running_sum, sum_error, acc, acc_error, values, z, valid):
    """Accumulate rows [n, BLOCK_D] into an online softmax per channel."""
    new_max = tl.maximum(running_max, tl.max(tl.where(valid, z, LOWEST), 0))
    rescale = accurate_exp(running_max - new_max)
    weights = tl.where(valid, accurate_exp(z - new_max[None, :]), 0.0)
    running_sum, sum_error = add_compensated(
        running_sum * rescale, sum_error * rescale, tl.sum(weights, 0)
    )
    acc, acc_error = add_compensated(
        acc * rescale, acc_error * rescale, tl.sum(weights * values, 0)
    )
    return new_max, running_sum, sum_error, acc, acc_error


@triton.jit
def load_partial(at, exists, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """An online softmax from the state, or an empty one."""
    d = tl.arange(0, BLOCK_D)
    mask = d < tl.where(exists, D, 0)  # 3.9's interpreter takes no mask made of a scalar condition
    running_max = tl.load(at + d, mask=mask, other=LOWEST)
    running_sum = tl.load(at + D + d, mask=mask, other=0.0)
    acc = tl.load(at + 2 * D + d, mask=mask, other=0.0)
    no_error = tl.zeros([BLOCK_D], tl.float32)
    return running_max, running_sum, no_error, acc, no_error


@triton.jit
def load_tokens(
    kv, score, bias, p, columns, valid, kv_stride, score_stride, bias_stride, RATIO: tl.constexpr
):  # fmt: skip
    """Values and biased scores of this step's tokens at positions p [n], some columns."""
    values = widen(tl.load(kv + (p * kv_stride)[:, None] + columns, mask=valid, other=0.0))
    z = widen(tl.load(score + (p * score_stride)[:, None] + columns, mask=valid, other=0.0))
    row = bias + (p % RATIO * bias_stride)[:, None]
    return values, z + widen(tl.load(row + columns, mask=valid, other=0.0))


@triton.jit
def accumulate_tokens(
    running_max, running_sum, sum_error, acc, acc_error, kv, score, bias, first, count, kv_stride,
    score_stride, bias_stride, D: tl.constexpr, RATIO: tl.constexpr, ALONE: tl.constexpr,
    BLOCK_J: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Accumulate `count` of this step's tokens from position `first` on."""
    d = tl.arange(0, BLOCK_D)[None, :]
    STEP: tl.constexpr = 1 if ALONE else BLOCK_J
    for low in range(0, count, STEP):
        j = low + tl.arange(0, STEP)
        valid = (j < count)[:, None] & (d < D)
        values, z = load_tokens(
            kv, score, bias, first + j, d, valid, kv_stride, score_stride, bias_stride, RATIO
        )
        running_max, running_sum, sum_error, acc, acc_error = accumulate(
            running_max, running_sum, sum_error, acc, acc_error, values, z, (j < count)[:, None]
        )
        if ALONE:
            running_sum, sum_error = running_sum + sum_error, tl.zeros([BLOCK_D], tl.float32)
            acc, acc_error = acc + acc_error, tl.zeros([BLOCK_D], tl.float32)
    return running_max, running_sum, sum_error, acc, acc_error


@triton.jit
def pool_overlapping(
    kv, score, bias, state, window, start, kv_stride, score_stride, bias_stride, state_row,
    D: tl.constexpr, V: tl.constexpr, RATIO: tl.constexpr, BLOCK_J: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Pool a window's tokens and those of the one before; earlier steps' are in the state."""
    d = tl.arange(0, BLOCK_D)[None, :]
    running_max = tl.full([BLOCK_D], LOWEST, tl.float32)
    running_sum = tl.zeros([BLOCK_D], tl.float32)
    sum_error, acc, acc_error = running_sum, running_sum, running_sum
    for low in range(0, 2 * RATIO, BLOCK_J):
        j = low + tl.arange(0, BLOCK_J)
        p = (window - 1) * RATIO + j
        exists = ((j < 2 * RATIO) & (p >= 0))[:, None]
        columns = (j // RATIO * D)[:, None] + d
        valid = exists & (d < D)
        new = (p >= start)[:, None]
        state_at = state + (p % V * state_row)[:, None]
        if kv.dtype == state.dtype:  # one load, from the step or the state
            at = tl.where(new, kv + (p * kv_stride)[:, None], state_at)
            values = tl.load(at + columns, mask=valid, other=0.0)
            at = tl.where(new, score + (p * score_stride)[:, None], state_at + 2 * D)
            z = tl.load(at + columns, mask=valid, other=0.0)
            at = bias + (p % RATIO * bias_stride)[:, None]
            biases = widen(tl.load(at + columns, mask=valid & new, other=0.0))
            z = tl.where(new, z + biases, z)
        else:
            values, z = load_tokens(
                kv,
                score,
                bias,
                p,
                columns,
                valid & new,
                kv_stride,
                score_stride,
                bias_stride,
                RATIO,
            )
            values = tl.where(
                new, values, tl.load(state_at + columns, mask=valid & ~new, other=0.0)
            )
            z = tl.where(new, z, tl.load(state_at + 2 * D + columns, mask=valid & ~new, other=0.0))
        running_max, running_sum, sum_error, acc, acc_error = accumulate(
            running_max, running_sum, sum_error, acc, acc_error, values, z, exists
        )
    return tl.div_rn(acc + acc_error, running_sum + sum_error)


@triton.jit
def keep_tokens(
    state, kv, score, bias, first, end, kv_stride, score_stride, bias_stride, state_row,
    D: tl.constexpr, V: tl.constexpr, RATIO: tl.constexpr, BLOCK_J: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Write the tokens first .. end-1 to their state rows."""
    d = tl.arange(0, BLOCK_D)[None, :]
    tl.debug_barrier()  # entries have been pooled from what is overwritten now
    for low in range(0, (end - first).to(tl.int32), BLOCK_J):
        p = first + low + tl.arange(0, BLOCK_J)
        valid = (p < end)[:, None] & (d < D)
        at = state + (p % V * state_row)[:, None]
        for half in tl.static_range(2):
            columns = half * D + d
            values, z = load_tokens(
                kv, score, bias, p, columns, valid, kv_stride, score_stride, bias_stride, RATIO
            )
            tl.store(at + columns, values, mask=valid)
            tl.store(at + 2 * D + columns, z, mask=valid)


@triton.jit
def keep_partials(
    state, kv, score, bias, start, first, end, kv_stride, score_stride, bias_stride, state_row,
    D: tl.constexpr, V: tl.constexpr, RATIO: tl.constexpr, ALONE: tl.constexpr,
    BLOCK_J: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Write the online softmax of a window up to each of the tokens first .. end-1."""
    window = first // RATIO * RATIO
    begin = tl.maximum(window, start)
    before = state + (start + V - 1) % V * state_row
    partial = load_partial(before, window < start, D, BLOCK_D)
    running_max, running_sum, sum_error, acc, acc_error = accumulate_tokens(
        partial[0], partial[1], partial[2], partial[3], partial[4], kv, score, bias, begin,
        (first - begin).to(tl.int32), kv_stride, score_stride, bias_stride, D, RATIO, ALONE,
        BLOCK_J, BLOCK_D,
    )  # fmt: skip
    tl.debug_barrier()  # what is overwritten now has been read
    d = tl.arange(0, BLOCK_D)
    for k in range(0, (end - first).to(tl.int32)):
        p = first + k
        opens_window = p % RATIO == 0
        running_max, running_sum, sum_error, acc, acc_error = accumulate_tokens(
            tl.where(opens_window, LOWEST, running_max), tl.where(opens_window, 0.0, running_sum),
            tl.where(opens_window, 0.0, sum_error), tl.where(opens_window, 0.0, acc),
            tl.where(opens_window, 0.0, acc_error), kv, score, bias, p, 1, kv_stride, score_stride,
            bias_stride, D, RATIO, ALONE, 1, BLOCK_D,
        )  # fmt: skip
        at = state + p % V * state_row
        tl.store(at + d, running_max, mask=d < D)
        tl.store(at + D + d, running_sum + sum_error, mask=d < D)
        tl.store(at + 2 * D + d, acc + acc_error, mask=d < D)
