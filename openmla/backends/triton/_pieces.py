"""Which rows a program of the many-heads kernels attends to: tokens with listed rows, in parts.

Parts are as in _parts.py, but every token has the same units of rows on the axis, so that a
program finds its own in a few operations, and the host need not know how many rows a token has. A
part may have the end of one token, whole ones and the beginning of another: its pieces.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from openmla.backends.triton._parts import begin_part, cut_evenly

STEP = tl.constexpr(128)  # rows of a unit
# Kinds of lists: of V4 a prefix or positions behind a window, one or two lists of slots; of V3 one
# list, of slots or positions.
PREFIX = tl.constexpr(0)
POSITIONS = tl.constexpr(1)
SLOTS = tl.constexpr(2)
ONE_LIST = tl.constexpr(3)


class Tokens(NamedTuple):
    """What says how many rows tokens have. A list has K at most. A window has span_1 rows and room
    for room_1, a prefix an entry for span_2 tokens and room for room_2."""

    query_start_loc: Any
    B: Any
    row_lens: Any
    K: Any
    positions: Any
    span_1: Any
    room_1: Any
    span_2: Any
    room_2: Any


@triton.jit
def count_rows(tokens, t, KIND: tl.constexpr):
    """Rows of a token in its first segment, if it has two, and in all; past all requests none."""
    n_1 = 0
    if KIND != ONE_LIST:
        position = tl.load(tokens.positions + t).to(tl.int32)
        if KIND == SLOTS:  # how many slots the first list has
            n_1 = tl.minimum(position, tokens.room_1)
        else:
            n_1 = tl.minimum(tl.minimum(position + 1, tokens.span_1), tokens.room_1)
    if KIND == PREFIX:
        n_2 = tl.minimum((position + 1) // tokens.span_2, tokens.room_2)
    else:
        n_2 = tl.minimum(tl.load(tokens.row_lens + t), tokens.K)
    owned = t < tl.load(tokens.query_start_loc + tokens.B)
    n_1 = tl.where(owned, tl.maximum(n_1, 0), 0)
    return n_1, n_1 + tl.where(owned, tl.maximum(n_2, 0), 0)


class Cut(NamedTuple):
    """Tokens of equal size cut into parts: this one begins and ends at places of the axis, which
    has `units` of rows for each token, and before them `overhead`. `index` is the part's, first the
    token that the axis begins with."""

    begin: Any
    end: Any
    units: Any
    overhead: Any
    index: Any
    first: Any


@triton.jit
def cut_tokens(first, T, units, part, num_programs, first_part):
    """A part of tokens first .. first + T - 1; parts are numbered from first_part on. Fewer rows
    than `units` of a token are cut in proportion, so that nothing has to be known of others."""
    even, slices, each = cut_evenly(T, num_programs, units, units)
    overhead = 1 - even
    size = units + overhead
    begin = begin_part(part, T, num_programs, T * size, size, even, slices, each)
    end = begin_part(part + 1, T, num_programs, T * size, size, even, slices, each)
    return Cut(begin, end, units, overhead, first_part + part, first)


@triton.jit
def num_pieces(cut):
    """How many tokens a part has rows of; what is left of one's overhead alone does not count."""
    size = cut.units + cut.overhead
    last = (cut.end - cut.overhead + size - 1) // size  # of parts that begin there, the next token
    return tl.where(cut.end > cut.begin, tl.maximum(last - cut.begin // size, 0), 0)


class Piece(NamedTuple):
    """Rows lo .. hi-1 of a token in steps, at least one. `slot` is where the partial result goes,
    -1 if this is all of the token; first and last, whether it has its first and last rows."""

    token: Any
    lo: Any
    hi: Any
    steps: Any
    slot: Any
    first: Any
    last: Any


@triton.jit
def find_piece(tokens, cut, r, run_length, KIND: tl.constexpr, FIXED: tl.constexpr):
    """The r-th piece of a part. Fixed runs: parts are runs of run_length, `units` of each token,
    and all have slots."""
    token = cut.first + cut.begin // (cut.units + cut.overhead) + r
    _, n = count_rows(tokens, token, KIND)
    if FIXED:
        lo = cut.begin % cut.units * run_length
        hi = tl.minimum(lo + run_length, n)
        slot, first, last = cut.index, False, False
    else:
        size = cut.units + cut.overhead
        before = (token - cut.first) * size + cut.overhead
        begin = tl.maximum(cut.begin - before, 0)
        end = tl.minimum(cut.end - before, cut.units)
        own = (n + STEP - 1) // STEP
        lo = begin * own // cut.units * STEP
        hi = tl.minimum(end * own // cut.units * STEP, n)
        first, last = begin == 0, end == cut.units
        slot = tl.where(first & last, -1, 2 * cut.index + first.to(tl.int32))
    steps = tl.maximum((hi - lo + STEP - 1) // STEP, 1)
    return Piece(token, lo, hi, steps, slot, first, last)


@triton.jit
def own_cut(first_token, T, units, first_part, FIXED: tl.constexpr):
    """A program's part. Fixed runs: the grid has one for each of a token's `units` of them."""
    if FIXED:
        index = tl.program_id(1) * units + tl.program_id(2)
        return Cut(index, index + 1, units, 0, first_token * units + index, first_token)
    return cut_tokens(first_token, T, units, tl.program_id(1), tl.num_programs(1), first_part)
