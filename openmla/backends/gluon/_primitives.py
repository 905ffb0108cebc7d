"""Device code the kernels share: e4m3 decode, a token's request and run of rows, epilogue."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# Triton 3.6 calls it thread_barrier, later versions barrier
thread_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier
LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
INITIAL_MAX = gl.constexpr(-1e30)  # a running max of -inf would make exp2(-inf - -inf) NaN
C = gl.constexpr(512)  # columns of values, and so of a head's output
# Cached rows as 32-bit words: a warp loads 8 rows, 16 bytes per lane.
WORDS = gl.constexpr(gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0]))
ROWS = gl.constexpr(gl.SliceLayout(1, WORDS))
LINE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))  # a vector in shared memory


@gluon.jit
def decode_e4m3(words, scales):
    """Four e4m3 per word as four bf16: bits shifted into place, times a pair of equal bf16 scales
    that also rebias the exponent. fma, as SM80 has no bf16 mul. A NaN byte decodes to 480: writers
    mark NaN in the scale."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 t, u, v, z, none;
        mov.b32 z, 0;
        mov.b32 none, 0x80008000;
        prmt.b32 t, $4, z, 0x1404;
        shr.u32 u, t, 4;
        and.b32 v, t, 0x80008000;
        lop3.b32 u, u, 0x07f007f0, v, 0xea;
        fma.rn.bf16x2 u, u, $5, none;
        mov.b32 {$0, $1}, u;
        prmt.b32 t, $4, z, 0x3424;
        shr.u32 u, t, 4;
        and.b32 v, t, 0x80008000;
        lop3.b32 u, u, 0x07f007f0, v, 0xea;
        fma.rn.bf16x2 u, u, $5, none;
        mov.b32 {$2, $3}, u;
        }""",
        "=h,=h,=h,=h,r,r",
        [words, scales],
        dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def decode_e4m3_pairs(words, scales):
    """The same as two words of two bf16, with SM90's bf16 mul: prmt puts each byte at the top of
    its half below copies of its sign, so one arithmetic shift places all three fields."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 t;
        prmt.b32 t, $2, 0, 0x1804;
        shr.s32 t, t, 4;
        and.b32 t, t, 0x87f087f0;
        mul.rn.bf16x2 $0, t, $3;
        prmt.b32 t, $2, 0, 0x3a24;
        shr.s32 t, t, 4;
        and.b32 t, t, 0x87f087f0;
        mul.rn.bf16x2 $1, t, $3;
        }""",
        "=r,=r,r,r", [words, scales], dtype=(gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def split_words(words):
    """Two bf16 per word."""
    return gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;",
        "=h,=h,r",
        [words],
        dtype=(gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def program(first_token, BLOCK_H: gl.constexpr):
    """What a program owns: its first head, token, token as int64, and run."""
    first_head = gl.program_id(0) * BLOCK_H
    t = first_token + gl.program_id(1)
    x = gl.program_id(2)
    return first_head, t, t.to(gl.int64), x


@gluon.jit
def scale_at(heads, Q_SCALES: gl.constexpr):
    """Which of a token's scales of e4m3 queries its heads have: their own, or one for all."""
    return heads if Q_SCALES == 2 else heads * 0


@gluon.jit
def request_of(t, query_start_loc, B):
    """The request a token belongs to; B for a token past the last."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    lanes = gl.arange(0, 128, LAYOUT)
    request = 0
    for first in range(0, B, 128):
        at = query_start_loc + 1 + first + lanes
        stop = gl.load(at, mask=first + lanes < B, other=2147483647)
        request += gl.sum((stop <= t).to(gl.int32), 0)
    return request


@gluon.jit
def run_bounds(n, x, X, run_length, BLOCK_N: gl.constexpr):
    """Rows lo to hi of run x: X runs of whole tiles cover n rows, unless run_length is given."""
    run = ((n + BLOCK_N - 1) // BLOCK_N + X - 1) // X * BLOCK_N
    run = gl.where(run_length > 0, run_length, run)
    lo = x * run
    return lo, gl.minimum(lo + run, n)


@gluon.jit
def output_line(t64, x, X, SPLIT: gl.constexpr):
    """Which line of outputs a program writes: its token's, or its run's partial results."""
    line = t64
    if SPLIT:
        line = t64 * X + x
    return line


@gluon.jit
def normalize(
    running_max, running_sum, sink, first_head, NUMERATOR: gl.constexpr, H: gl.constexpr,
    SINK: gl.constexpr,
):  # fmt: skip
    """Heads, their lse and what their accumulators are multiplied with: NUMERATOR over the running
    sum, times what the sink leaves of probability 1."""
    seen = running_sum != 0  # NaN stays NaN
    lse = gl.where(seen, (running_max + gl.log2(running_sum)) * LN2, float("-inf"))
    normalizer = gl.where(seen, NUMERATOR / running_sum, 0.0)
    heads = first_head + gl.arange(0, running_sum.shape[0], running_sum.type.layout)
    if SINK:
        normalizer *= sink_factor(sink, heads, lse, seen, H)
    return heads, lse, normalizer


@gluon.jit
def sink_factor(sink, heads, lse, seen, H: gl.constexpr):
    """What the sink leaves of probability 1."""
    logit = gl.load(sink + heads, mask=heads < H, other=0.0)
    return gl.where(seen, 1.0 / (1.0 + gl.exp2((logit - lse) * LOG2E)), 0.0)
