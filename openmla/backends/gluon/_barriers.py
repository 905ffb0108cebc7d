"""Named barriers between warp groups: one instruction per thread.

Each of the many-heads kernels' pairs a group of 128 threads that arrives with one that waits.
FILLED: the producer has written half a tile, READ: its last product is done; MAX and PROBS go
between the consumers. _many_heads.py draws them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# Hardware has 16; Triton takes the first four itself.
EVEN_LEFT_FILLED = gl.constexpr("4")
EVEN_RIGHT_FILLED = gl.constexpr("5")
ODD_LEFT_FILLED = gl.constexpr("6")
ODD_RIGHT_FILLED = gl.constexpr("7")
EVEN_MAX = gl.constexpr("8")
ODD_MAX = gl.constexpr("9")
EVEN_PROBS = gl.constexpr("10")
ODD_PROBS = gl.constexpr("11")
EVEN_LEFT_READ = gl.constexpr("12")
EVEN_RIGHT_READ = gl.constexpr("13")
ODD_LEFT_READ = gl.constexpr("14")
ODD_RIGHT_READ = gl.constexpr("15")
# Where tiles are only copied, mbarriers say that they are filled: FILLED is free.
ODD_STORED = EVEN_LEFT_FILLED
# Of the kernel over fp8 rows, both of whose groups wait here.
SHARED = EVEN_LEFT_FILLED
# Of the kernel over expanded keys, one per stage: its keys were read, and behind them, its values.
KEYS_READ = gl.constexpr(4)


@gluon.jit
def arrive(BARRIER: gl.constexpr, when):
    """Arrive without waiting, unless `when` is 0."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $1, 0; @p bar.arrive " + BARRIER + ", 256; "
        "mov.b32 $0, $1; }",
        "=r,r", [when], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def wait(BARRIER: gl.constexpr, when):
    """Wait for the other group to arrive, unless `when` is 0."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $1, 0; @p bar.sync " + BARRIER + ", 256; mov.b32 $0, $1; }",
        "=r,r", [when], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def arrive_at(barrier, THREADS: gl.constexpr):
    """Arrive, without waiting, at a barrier of THREADS whose number is not a constant."""
    gl.inline_asm_elementwise(
        "{ bar.arrive $1, " + THREADS + "; mov.b32 $0, $1; }",
        "=r,r", [barrier], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def wait_at(barrier, THREADS: gl.constexpr):
    gl.inline_asm_elementwise(
        "{ bar.sync $1, " + THREADS + "; mov.b32 $0, $1; }",
        "=r,r", [barrier], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
