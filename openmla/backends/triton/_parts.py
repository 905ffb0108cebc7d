"""Parts of a balanced launch: which keys a persistent program attends to, and where it writes.

Work is laid out on one axis: requests in order, each as often as its query tokens fill items of
TOKENS, every item as many units of keys as the request has plus `overhead`, what loading queries
and storing outputs costs. Parts cut the axis into equal lengths, so that programs finish together
whatever the lengths; items that are alike are cut evenly if that takes hardly longer. With FIXED
every unit is a run of its own, wherever parts begin: then a row's bits depend on nothing but
itself. Lengths are read by the kernel, so that captured graphs are balanced by the lengths they are
replayed with.

An item in one part is written to out and lse; of one in several, partial results go to slots, and
spans [T, 3] tell the merge about each of its tokens: the first and the last part (FIXED: run), and
which token of the item it is. Of tokens past all requests the last is before the first.
"""

import triton
import triton.language as tl

LANES = tl.constexpr(128)
MERGE_UNITS = tl.constexpr(2)


@triton.jit
def num_units(keys, unit):
    return tl.maximum((keys + unit - 1) // unit, 1)


@triton.jit
def request_work(query_start_loc, seq_lens, B, unit, first, TOKENS: tl.constexpr):
    """Items and units of LANES requests."""
    b = first + tl.arange(0, LANES)
    start = tl.load(query_start_loc + b, mask=b < B, other=0)
    stop = tl.load(query_start_loc + b + 1, mask=b < B, other=0)
    keys = tl.load(seq_lens + b, mask=b < B, other=0)
    return (stop - start + TOKENS - 1) // TOKENS, num_units(keys, unit)


@triton.jit
def cut_evenly(num_items, num_programs, fewest, most):
    """Whether items of `fewest` to `most` units are cut evenly: each into so many slices, or so
    many whole ones to a part. Otherwise parts have pieces of several items. That balances better,
    but more is merged, which takes as long as MERGE_UNITS. Of plain integers too, for the host."""
    items = max(num_items, 1)
    slices = max(min(num_programs // items, most), 1)
    length = max((most + slices - 1) // slices, 1)
    slices = max((most + length - 1) // length, 1)  # fewer may be no longer
    each = (items + num_programs - 1) // num_programs
    longest = (length + 1) * each
    balanced = (items * (most + 1) + num_programs - 1) // num_programs
    alike = min(max(fewest - most + 1, 0), 1)
    even = alike * min(max(balanced + MERGE_UNITS - longest + 1, 0), 1)
    return even, slices, each


@triton.jit
def begin_part(p, num_items, num_programs, total, units, even, slices, each):
    """Where a part begins on an axis of `total` units; cut evenly, of `units` for every item."""
    groups = (tl.maximum(num_items, 1) + each - 1) // each
    at = tl.minimum(p, groups * slices)
    begin = at // slices * num_items // groups * units + at % slices * units // slices
    parts = tl.maximum(tl.minimum(num_programs, total), 1)
    at = tl.minimum(p, parts)
    uneven = at * (total // parts) + tl.minimum(at, total % parts)  # the first have one unit more
    return tl.where(even == 1, begin, uneven)


@triton.jit
def place(seq_lens, B, unit, at, request, before, overhead):
    """Item and unit of a place on the axis within a request; overhead comes first in an item."""
    item = 0
    first_unit = 0
    if request < B:
        units = num_units(tl.load(seq_lens + request), unit)
        item = (at - before) // (units + overhead)
        first_unit = tl.maximum((at - before) % (units + overhead) - overhead, 0)
    return item, first_unit


@triton.jit
def find_part(
    query_start_loc, seq_lens, B, unit, p, num_programs, TOKENS: tl.constexpr, FIXED: tl.constexpr
):
    """A program's runs: how many, the first one's request, item and unit, where in its item the
    last one ends (0: at the item's end), and the part's index, or with FIXED its first run's."""
    num_items = 0
    total = 0
    fewest = 2**30
    most = 0
    for first in range(0, B, LANES):
        items, units = request_work(query_start_loc, seq_lens, B, unit, first, TOKENS)
        num_items += tl.sum(items, 0)
        total += tl.sum(items * units, 0)
        fewest = tl.minimum(fewest, tl.min(tl.where(items > 0, units, 2**30), 0))
        most = tl.maximum(most, tl.max(tl.where(items > 0, units, 0), 0))
    even, slices, each = cut_evenly(num_items, num_programs, fewest, most)
    overhead = 0
    if not FIXED:
        overhead = 1 - even
        total += overhead * num_items
    begin = begin_part(p, num_items, num_programs, total, most, even, slices, each)
    end = begin_part(p + 1, num_items, num_programs, total, most, even, slices, each)
    request = 0
    request_end = 0
    before = 0
    before_end = 0
    items_before = 0
    items_end = 0
    base = 0
    for first in range(0, B, LANES):
        items, units = request_work(query_start_loc, seq_lens, B, unit, first, TOKENS)
        cost = items * (units + overhead)
        ends = base + tl.cumsum(cost, 0)
        valid = first + tl.arange(0, LANES) < B
        passed = valid & (ends <= begin)
        passed_end = valid & (ends <= end)
        request += tl.sum(passed.to(tl.int32), 0)
        request_end += tl.sum(passed_end.to(tl.int32), 0)
        before = tl.maximum(before, tl.max(tl.where(passed, ends, 0), 0))
        before_end = tl.maximum(before_end, tl.max(tl.where(passed_end, ends, 0), 0))
        items_before += tl.sum(tl.where(passed, items, 0), 0)
        items_end += tl.sum(tl.where(passed_end, items, 0), 0)
        base += tl.sum(cost, 0)
    item, first_unit = place(seq_lens, B, unit, begin, request, before, overhead)
    last_item, last_unit = place(seq_lens, B, unit, end, request_end, before_end, overhead)
    if FIXED:
        num_runs = end - begin
        index = begin
    else:
        num_runs = items_end + last_item - items_before - item + (last_unit > 0).to(tl.int32)
        index = p
    return num_runs, request, item, first_unit, last_unit, index


@triton.jit
def find_run(
    query_start_loc, seq_lens, unit, r, num_runs, request, item, first_unit, last_unit, index,
    TOKENS: tl.constexpr, CAUSAL: tl.constexpr, FIXED: tl.constexpr,
):  # fmt: skip
    """Keys lo .. hi-1 for `tokens` from `token` on, of which the first sees keys 0 .. visible-1 and
    the next one more; the slot for partial results, -1 if this is all of the item; whether it has
    the item's first and last keys."""
    start = tl.load(query_start_loc + request)
    stop = tl.load(query_start_loc + request + 1)
    keys = tl.load(seq_lens + request)
    units = num_units(keys, unit)
    token = start + item * TOKENS
    tokens = tl.minimum(stop - token, TOKENS)
    visible = keys
    if CAUSAL:  # keys of the first token, then of the last
        visible = keys - (stop - 1 - token)
        keys = visible + tokens - 1
    if FIXED:
        end = first_unit + 1
        slot = index + r
    else:
        cut = (r == num_runs - 1) & (last_unit > 0)
        end = tl.where(cut, last_unit, units)
        slot = 2 * index + (first_unit == 0).to(tl.int32)
    is_first = first_unit == 0
    is_last = end == units
    slot = tl.where(is_first & is_last, -1, slot)
    lo = first_unit * unit
    hi = tl.minimum(end * unit, tl.maximum(keys, 0))
    return token, tokens, visible, lo, hi, slot, is_first, is_last


@triton.jit
def next_run(
    query_start_loc, seq_lens, B, unit, request, item, first_unit, TOKENS: tl.constexpr,
    FIXED: tl.constexpr,
):  # fmt: skip
    """Request, item and unit of the run behind one; requests without query tokens have none."""
    same_item = False
    if FIXED:
        same_item = first_unit + 1 < num_units(tl.load(seq_lens + request), unit)
    first_unit = tl.where(same_item, first_unit + 1, 0)
    item = tl.where(same_item, item, item + 1)
    start = tl.load(query_start_loc + request)
    if item * TOKENS >= tl.load(query_start_loc + request + 1) - start:
        item = 0
        request = tl.minimum(request + 1, B - 1)
        while (request < B - 1) & (
            tl.load(query_start_loc + request + 1) == tl.load(query_start_loc + request)
        ):
            request += 1
    return request, item, first_unit


@triton.jit
def store_spans(spans, token, tokens, index, is_first, is_last, BLOCK_T: tl.constexpr):
    """What the merge has to know about an item's tokens."""
    i = tl.arange(0, BLOCK_T)
    at = spans + 3 * (token + i)
    firsts = i < tl.where(is_first, tokens, 0)
    tl.store(at, index, mask=firsts)
    tl.store(at + 1, index, mask=i < tl.where(is_last, tokens, 0))
    tl.store(at + 2, i, mask=firsts)


@triton.jit
def store_padding_spans(spans, first, T, step):
    """Nothing to merge for tokens past all requests."""
    for t in range(first, T, step):
        tl.store(spans + 3 * t, 0)
        tl.store(spans + 3 * t + 1, -1)
        tl.store(spans + 3 * t + 2, 0)
