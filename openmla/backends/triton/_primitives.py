"""Device functions that several ops share, each written once.

Numbers (e4m3, bf16, rounding), numbers stored inside bytes, which request a token belongs to,
matrix products, the online softmax and its epilogue, rotary pairs.
"""

import triton
import triton.language as tl

# How a cached row is stored: numbers of one type; e4m3 with one scale for the whole cache; groups
# of e4m3 with a scale each, their bf16 rope columns behind them; V4's; indexer keys.
PLAIN, FP8, PACKED, V4, INDEX = (tl.constexpr(i) for i in range(5))
LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(1.4426950408889634)
INT32_MAX = tl.constexpr(2147483647)
# Requests compared at once: fixed, so that a larger batch never recompiles a kernel.
BOUNDS = tl.constexpr(128)
E4M3_TO_FP16 = tl.constexpr(256.0)  # exponent biases differ by 8
E4M3_TO_FP32 = tl.constexpr(1.329227995784916e36)  # by 120


@triton.jit
def decode_e4m3(stored, dtype: tl.constexpr, ASM: tl.constexpr):
    """e4m3 bytes in a wider type, exactly: shift the bits into place, then multiply by the power of
    two between the exponent biases. Needs no hardware e4m3; a NaN byte becomes NaN."""
    if ASM and dtype == tl.bfloat16:
        # four bytes at a time: spread to half-words, shifted, scaled by 2**120; 0x7f flags NaN
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 t, u, v, n, z, up, none;
            mov.b32 z, 0;
            mov.b32 up, 0x7b807b80;
            mov.b32 none, 0x80008000;
            and.b32 n, $2, 0x7f7f7f7f;
            add.u32 n, n, 0x01010101;
            prmt.b32 t, $2, z, 0x1404;
            shr.u32 u, t, 4;
            and.b32 v, t, 0x80008000;
            lop3.b32 u, u, 0x07f007f0, v, 0xea;
            fma.rn.bf16x2 u, u, up, none;
            prmt.b32 t, n, z, 0x9988;
            or.b32 $0, u, t;
            prmt.b32 t, $2, z, 0x3424;
            shr.u32 u, t, 4;
            and.b32 v, t, 0x80008000;
            lop3.b32 u, u, 0x07f007f0, v, 0xea;
            fma.rn.bf16x2 u, u, up, none;
            prmt.b32 t, n, z, 0xbbaa;
            or.b32 $1, u, t;
            }""",
            "=r,=r,r",
            [stored],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=4,
        )
    bits = stored.to(tl.uint16)
    if dtype == tl.float16:
        moved = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        value = moved.to(tl.float16, bitcast=True).to(tl.float32) * E4M3_TO_FP16
    else:
        wide = stored.to(tl.uint32)
        moved = ((wide & 0x80) << 24) | ((wide & 0x7F) << 20)
        value = moved.to(tl.float32, bitcast=True) * E4M3_TO_FP32
    return tl.where((bits & 0x7F) == 0x7F, float("nan"), value).to(dtype)


@triton.jit
def encode_e4m3(values):
    """float32 to e4m3 bytes: round to nearest even, saturate at 448, keep NaN and the sign. On the
    bits, as SM80 has no e4m3 and the interpreter truncates float32 where it should round."""
    bits = values.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    capped = tl.minimum(magnitude, 0x43E00000)  # 448
    # 20 mantissa bits rounded off, the exponent's bias lowered by 120
    normal = (capped + 0x7FFFF + ((capped >> 20) & 1) - 0x3C000000) >> 20
    # subnormals are multiples of 2**-9, the last place of 2**14
    shifted = capped.to(tl.float32, bitcast=True) + 16384.0
    subnormal = shifted.to(tl.uint32, bitcast=True) - 0x46800000
    code = tl.where(capped < 0x3C800000, subnormal, normal)  # 2**-6
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)
    return (((bits >> 24) & 0x80) | code).to(tl.uint8)


@triton.jit
def widen(values):
    """To float32; bf16 through its bits, as the interpreter flushes subnormals."""
    if values.dtype == tl.bfloat16:
        bits = values.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
        wide = bits.to(tl.float32, bitcast=True)
    else:
        wide = values.to(tl.float32)
    return wide


@triton.jit
def widen_to(values, dtype: tl.constexpr):
    """To float32 or float64."""
    if values.dtype == dtype:
        wide = values
    else:
        wide = widen(values).to(dtype)
    return wide


@triton.jit
def round_to(values, dtype: tl.constexpr, ASM: tl.constexpr):
    """Round to nearest even through float32, as torch does; values of that dtype are copied."""
    if values.dtype == dtype:
        rounded = values
    else:
        wide = widen(values)
        if dtype == tl.bfloat16 and not ASM:
            bits = wide.to(tl.uint32, bitcast=True)
            upper = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
            upper = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FFF, upper)  # NaN
            rounded = upper.to(tl.uint16).to(tl.bfloat16, bitcast=True)
        else:
            rounded = wide.to(dtype)
    return rounded


@triton.jit
def load_float32(base, index, mask, ALIGNED: tl.constexpr):
    """The index-th float32 behind pointers to bytes, byte by byte where they are not aligned; mask
    is None if all may be read."""
    if ALIGNED:
        at = base.to(tl.pointer_type(tl.uint32)) + index
        bits = tl.load(at) if mask is None else tl.load(at, mask=mask, other=0)
    else:
        at = base.to(tl.pointer_type(tl.uint8)) + 4 * index
        bits = tl.zeros(at.shape, tl.uint32)
        for i in tl.static_range(4):
            byte = tl.load(at + i) if mask is None else tl.load(at + i, mask=mask, other=0)
            bits |= byte.to(tl.uint32) << (8 * i)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def load_bfloat16(base, index, mask, ALIGNED: tl.constexpr):
    """The index-th bf16 behind pointers to bytes, byte by byte where they are not aligned."""
    if ALIGNED:
        at = base.to(tl.pointer_type(tl.bfloat16)) + index
        values = tl.load(at, mask=mask, other=0.0)
    else:
        at = base + 2 * index
        low = tl.load(at, mask=mask, other=0).to(tl.uint16)
        high = tl.load(at + 1, mask=mask, other=0).to(tl.uint16)
        values = (low | (high << 8)).to(tl.bfloat16, bitcast=True)
    return values


@triton.jit
def load_group_scales(
    cache, scales_at, g, mask, FORMAT: tl.constexpr, ALIGNED: tl.constexpr
):  # fmt: skip
    """Scales of groups g [GROUPS] of some rows, [BLOCK_N, GROUPS]; V4's as words where ALIGNED,
    since async copies take no single bytes."""
    if FORMAT == V4 and ALIGNED:
        words_at = (cache + scales_at).to(tl.pointer_type(tl.uint32))
        words = tl.load(words_at[:, None] + (g // 4)[None, :], mask=mask, other=0)
        exponents = (words >> (8 * (g % 4))[None, :].to(tl.uint32)) & 0xFF
        scales = (exponents << 23).to(tl.float32, bitcast=True)
    elif FORMAT == V4:
        exponents = tl.load(cache + scales_at[:, None] + g[None, :], mask=mask, other=0)
        scales = (exponents.to(tl.uint32) << 23).to(tl.float32, bitcast=True)
    else:
        scales = load_float32((cache + scales_at)[:, None], g[None, :], mask, ALIGNED)
    return scales


@triton.jit
def store_bits(at, bits, mask, BYTES: tl.constexpr, ALIGNED: tl.constexpr):
    """Numbers of BYTES bytes into a cache of bytes, byte by byte where they are not aligned."""
    if ALIGNED:
        n = tl.arange(0, bits.shape[0])
        tl.store(at.to(tl.pointer_type(bits.dtype)) + n, bits, mask=mask)
    else:
        n = tl.arange(0, bits.shape[0])[:, None] * BYTES
        i = tl.arange(0, BYTES)[None, :]
        each = (bits.to(tl.uint32)[:, None] >> (8 * i).to(tl.uint32)) & 0xFF
        tl.store(at + (n + i), each.to(tl.uint8), mask=mask[:, None])


@triton.jit
def within(i, n):
    """0 <= i < n in one comparison."""
    return i.to(tl.uint32, bitcast=True) < n.to(tl.uint32)


@triton.jit
def request_of(t, query_start_loc, B):
    """The request that owns token t, B for a token past all of them."""
    bounds = tl.arange(0, BOUNDS)
    owner = 0
    for first in range(0, B, BOUNDS):
        ends = tl.load(
            query_start_loc + 1 + first + bounds, mask=first + bounds < B, other=INT32_MAX
        )
        owner += tl.sum((ends <= t).to(tl.int32), 0)
    return owner


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    """acc + a @ b on the tensor cores. Triton 3.6's interpreter gets bf16 products wrong and
    truncates float32 instead of rounding it: there everything is float32."""
    if UPCAST:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def finite_max(running_max):
    """What to subtract from scores: 0 while no key was valid, as -inf - -inf would be NaN."""
    return tl.where(running_max == float("-inf"), 0.0, running_max)


@triton.jit
def softmax_probs(scores, running_max, new_max):
    """Online softmax update in base 2: probs of a tile of scores and the factor that rescales what
    was accumulated under the old running max."""
    safe_max = finite_max(new_max)
    probs = tl.exp2(scores - safe_max[:, None])
    return probs, tl.exp2(running_max - safe_max)


@triton.jit
def finish_softmax(running_max, running_sum):
    """Epilogue of an online softmax in base 2: whether any key was valid, the factor that
    normalizes the accumulator, and the natural lse; 0 and -inf without keys."""
    any_valid = running_sum != 0  # NaN stays NaN
    normalizer = tl.where(any_valid, 1.0 / running_sum, 0.0)
    lse = tl.where(any_valid, (running_max + tl.log2(running_sum)) * LN2, float("-inf"))
    return any_valid, normalizer, lse


@triton.jit
def sink_factor(sink, lse, any_valid):
    """What a sink leaves of the output: exp(lse) / (exp(lse) + exp(sink))."""
    return tl.where(any_valid, 1.0 / (1.0 + tl.exp2((sink - lse) * LOG2E)), 0.0)


@triton.jit
def merge_weights(own, other):
    """Of two partial softmaxes by lse: which saw a key, their shares of the whole, its lse. NaN or
    +inf on a side makes the shares and the lse NaN."""
    valid = own != float("-inf")
    other_valid = other != float("-inf")
    larger = tl.maximum(own, other)
    larger = tl.where(valid | other_valid, larger, 0.0)
    weight = tl.exp(own - larger)
    other_weight = tl.exp(other - larger)
    total_weight = tl.where(valid | other_valid, weight + other_weight, 1.0)
    merged = tl.where(valid | other_valid, larger + tl.log(total_weight), float("-inf"))
    return valid, other_valid, weight / total_weight, other_weight / total_weight, merged


@triton.jit
def store_columns(at, mask, values, FIRST: tl.constexpr, USED: tl.constexpr, BLOCK: tl.constexpr):
    """Epilogue store: columns FIRST .. FIRST + USED - 1 of the rows at `at`."""
    c = tl.arange(0, BLOCK)
    mask = mask[:, None] & (c < USED)[None, :]
    tl.store(at[:, None] + (c + FIRST)[None, :], values.to(at.dtype.element_ty), mask=mask)


@triton.jit
def rotate_first(first, second, cos, sin):
    """The first column of rotary pairs."""
    return first * cos - second * sin


@triton.jit
def rotate_second(first, second, cos, sin):
    """The second."""
    return second * cos + first * sin


@triton.jit
def rotate_in_row(values, partner, cos, sin, is_second, rotated):
    """Rotary pairs inside rows: each value has its partner's beside it. Where not `rotated`, values
    stay. In the precision of the table if that is higher, then float32."""
    along = values.to(cos.dtype) * cos
    across = partner.to(cos.dtype) * sin
    turned = tl.where(is_second, along + across, along - across)
    return tl.where(rotated, turned, values).to(tl.float32)


@triton.jit
def hadamard_transform(values, LOG2: tl.constexpr):
    """values [2**LOG2] times the orthonormal Hadamard matrix. Each butterfly step also rotates the
    index bits by one; after LOG2 of them they are back in place."""
    N: tl.constexpr = 2**LOG2
    for _ in tl.static_range(LOG2):
        a, b = tl.split(tl.reshape(values, [N // 2, 2]))
        values = tl.reshape(tl.trans(tl.join(a + b, a - b)), [N])
    return values * (N**-0.5)
