"""Which keys a persistent program attends to, as triton/_parts.py has it.

What works on single numbers is that file's; vectors over requests need Gluon's layouts.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from openmla.backends.triton import _parts as portable

LANES = gl.constexpr(128)
# every warp holds all lanes: reductions need no shared memory
LAYOUT = gl.constexpr(gl.BlockedLayout([4], [32], [4], [0]))


class Work(NamedTuple):
    """All requests: B, where their query tokens are, their lengths, keys of a unit."""

    query_start_loc: Any
    seq_lens: Any
    B: Any
    unit: Any


class Part(NamedTuple):
    """Runs of one program: how many, the first one's request, item and unit, and where in its item
    the last one ends (0: at the item's end). `index` is the part's, or with fixed runs its first
    run's."""

    num_runs: Any
    request: Any
    item: Any
    unit: Any
    last_unit: Any
    index: Any


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def request_work(work, first, TOKENS: gl.constexpr):
    """Items and units of LANES requests."""
    b = first + gl.arange(0, LANES, LAYOUT)
    valid = b < work.B
    start = gl.load(work.query_start_loc + b, mask=valid, other=0)
    stop = gl.load(work.query_start_loc + b + 1, mask=valid, other=0)
    keys = gl.load(work.seq_lens + b, mask=valid, other=0)
    units = gl.maximum((keys + work.unit - 1) // work.unit, 1)  # num_units()
    return (stop - start + TOKENS - 1) // TOKENS, units


@gluon.jit
def find_part(work, p, num_programs, TOKENS: gl.constexpr, FIXED: gl.constexpr):
    num_items = 0
    total = 0
    fewest = 2**30
    most = 0
    for first in range(0, work.B, LANES):
        items, units = request_work(work, first, TOKENS)
        num_items += gl.sum(items, 0)
        total += gl.sum(items * units, 0)
        fewest = gl.minimum(fewest, gl.min(gl.where(items > 0, units, 2**30), 0))
        most = gl.maximum(most, gl.max(gl.where(items > 0, units, 0), 0))
    even, slices, each = portable.cut_evenly(num_items, num_programs, fewest, most)
    overhead = 0
    if not FIXED:
        overhead = 1 - even
        total += overhead * num_items
    begin = portable.begin_part(p, num_items, num_programs, total, most, even, slices, each)
    end = portable.begin_part(p + 1, num_items, num_programs, total, most, even, slices, each)
    b0 = 0
    b1 = 0
    before0 = 0
    before1 = 0
    items0 = 0
    items1 = 0
    base = 0
    for first in range(0, work.B, LANES):
        items, units = request_work(work, first, TOKENS)
        cost = items * (units + overhead)
        ends = base + gl.associative_scan(cost, 0, add)
        valid = first + gl.arange(0, LANES, LAYOUT) < work.B
        passed0 = valid & (ends <= begin)
        passed1 = valid & (ends <= end)
        b0 += gl.sum(passed0.to(gl.int32), 0)
        b1 += gl.sum(passed1.to(gl.int32), 0)
        before0 = gl.maximum(before0, gl.max(gl.where(passed0, ends, 0), 0))
        before1 = gl.maximum(before1, gl.max(gl.where(passed1, ends, 0), 0))
        items0 += gl.sum(gl.where(passed0, items, 0), 0)
        items1 += gl.sum(gl.where(passed1, items, 0), 0)
        base += gl.sum(cost, 0)
    item0, unit0 = portable.place(work.seq_lens, work.B, work.unit, begin, b0, before0, overhead)
    item1, unit1 = portable.place(work.seq_lens, work.B, work.unit, end, b1, before1, overhead)
    if FIXED:
        return Part(end - begin, b0, item0, unit0, 0, begin)
    num_runs = items1 + item1 - items0 - item0 + (unit1 > 0).to(gl.int32)
    return Part(num_runs, b0, item0, unit0, unit1, p)


class Run(NamedTuple):
    """Keys lo .. hi-1 of a request for rows 0 .. num_rows-1 of an item, whose first token is
    `token` and sees keys 0 .. visible-1; the next one sees one more. `slot` is where the partial
    result goes, -1 if this is all of the item; first and last, whether it has its first and last
    keys."""

    request: Any
    token: Any
    num_rows: Any
    visible: Any
    lo: Any
    hi: Any
    slot: Any
    first: Any
    last: Any


@gluon.jit
def find_run(work, part, r, request, item, unit, H: gl.constexpr, TOKENS: gl.constexpr,
             CAUSAL: gl.constexpr, FIXED: gl.constexpr):  # fmt: skip
    token, tokens, visible, lo, hi, slot, first, last = portable.find_run(
        work.query_start_loc, work.seq_lens, work.unit, r, part.num_runs, request, item, unit,
        part.last_unit, part.index, TOKENS, CAUSAL, FIXED,
    )  # fmt: skip
    return Run(request, token, tokens * H, visible, lo, hi, slot, first, last)


@gluon.jit
def next_run(work, request, item, unit, TOKENS: gl.constexpr, FIXED: gl.constexpr):
    """Request, item and unit of the run behind one; requests without query tokens have none.
    Written so, the portable kernel would spill: it selects instead of branching."""
    unit += 1
    if FIXED:
        more = unit < portable.num_units(gl.load(work.seq_lens + request), work.unit)
    else:
        more = unit < 0
    if not more:
        unit = 0
        item += 1
        tokens = gl.load(work.query_start_loc + request + 1) - gl.load(
            work.query_start_loc + request
        )
        if item * TOKENS >= tokens:
            item = 0
            request += 1
            while (request < work.B - 1) & (
                gl.load(work.query_start_loc + request + 1)
                == gl.load(work.query_start_loc + request)
            ):
                request += 1
    return gl.minimum(request, work.B - 1), item, unit


@gluon.jit
def new_item(r, unit, FIXED: gl.constexpr):
    """Whether a program's run has other queries than the one before it: fixed runs of one item
    follow each other."""
    if FIXED:
        return (r == 0) | (unit == 0)
    else:
        return True
