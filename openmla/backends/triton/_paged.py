"""Latent attention over paged rows, split evenly among persistent programs; mqa_paged.

Computes  what ops/mqa_paged.py says; query rows are tokens times heads, so that several tokens of a
          request share its keys, causal among themselves
Grid      (tiles of BLOCK_H rows of an item, programs): a program works through its part's runs,
          see _parts.py; programs of the same part read the same keys
Reads     q [T, H, D], cache [N, BS, W] by the pages that table [B, M] names
Writes    out [T, H, C] and lse [T, H] where an item is one run, else slots of part and part_lse;
          spans [T, 3] for the merge
"""

import triton
import triton.language as tl

from openmla.backends.triton._build import DO_NOT_SPECIALIZE_ON_ALIGNMENT
from openmla.backends.triton._latent import attend, initial_state, load_queries, query_scales
from openmla.backends.triton._latent_rows import PAGED, Columns, Options, Rows, Segment
from openmla.backends.triton._parts import (
    find_part,
    find_run,
    next_run,
    store_padding_spans,
    store_spans,
)
from openmla.backends.triton._primitives import LOG2E, finish_softmax, store_columns

DO_NOT_SPECIALIZE = ("B", "T", "unit", "N", "M", "table_stride", "slot_rows")


@triton.jit
def store_rows(out, lse, line, mask, columns, row_lse, COLUMNS: tl.constexpr):
    """Epilogue: normalized accumulators and lse, to rows `line` of out and lse."""
    a, b, rope = columns
    MAIN: tl.constexpr = COLUMNS.MAIN
    BLOCK_A: tl.constexpr = COLUMNS.BLOCK_A
    USED: tl.constexpr = BLOCK_A if MAIN > BLOCK_A else MAIN
    tl.store(lse + line, row_lse, mask=mask)
    at = out + line * COLUMNS.C
    store_columns(at, mask, a, 0, USED, BLOCK_A)
    if MAIN > BLOCK_A:
        store_columns(at, mask, b, BLOCK_A, MAIN - BLOCK_A, COLUMNS.BLOCK_B)
    if COLUMNS.C > MAIN:
        store_columns(at, mask, rope, MAIN, COLUMNS.C - MAIN, COLUMNS.BLOCK_R)


@triton.jit(
    do_not_specialize=DO_NOT_SPECIALIZE,
    do_not_specialize_on_alignment=[*DO_NOT_SPECIALIZE_ON_ALIGNMENT, "table"],
)
def _paged_kernel(
    q, q_scale, query_start_loc, seq_lens,
    table, cache, kv_scale,
    # results, and partial ones of items in several parts
    out, lse, part, part_lse, spans,
    B, T, unit, qk_scale, q_token, q_head,
    # sizes and strides of the cache, the block table and slots
    page, row_stride, W, N, M, table_stride, slot_rows,
    # what is computed
    H: tl.constexpr, C: tl.constexpr, MAIN: tl.constexpr, ROPE: tl.constexpr,
    FORMAT: tl.constexpr, BS: tl.constexpr, ONE_BLOCK: tl.constexpr, TOKENS: tl.constexpr,
    CAUSAL: tl.constexpr, FIXED: tl.constexpr,
    # and how
    ALIGNED: tl.constexpr, ASM: tl.constexpr, OFFSET: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_A: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_R: tl.constexpr, PRECISION: tl.constexpr,
    UNCHAINED: tl.constexpr, UPCAST: tl.constexpr, STAGES: tl.constexpr, HOIST: tl.constexpr,
    dtype: tl.constexpr, EIGHT_BITS: tl.constexpr, Q_SCALES: tl.constexpr,
):  # fmt: skip
    # constants of the segment, of a row's columns, and of the kernel
    SEGMENT: tl.constexpr = Segment(PAGED, FORMAT, BS, ONE_BLOCK)
    COLUMNS: tl.constexpr = Columns(C, MAIN, ROPE, BLOCK_A, BLOCK_B, BLOCK_R)
    OPTIONS: tl.constexpr = Options(
        BLOCK_N, ALIGNED, ASM, OFFSET, STAGES, HOIST, dtype, PRECISION, UPCAST, UNCHAINED
    )
    FOLDED: tl.constexpr = CAUSAL and TOKENS > 1
    tile, p, num_programs = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    if not UPCAST:  # fp64 from a compiled graph; in the interpreter a Python float
        qk_scale = qk_scale.to(tl.float32)
    qk_scale = qk_scale * LOG2E
    lines = tile * BLOCK_H + tl.arange(0, BLOCK_H)  # query rows of the item: tokens times heads
    if tile == 0:
        store_padding_spans(spans, tl.load(query_start_loc + B) + p, T, num_programs)
    num_runs, request, item, first_unit, last_unit, index = find_part(
        query_start_loc, seq_lens, B, unit, p, num_programs, TOKENS, FIXED
    )
    for r in tl.range(0, num_runs, disable_licm=not HOIST):
        token, tokens, visible, lo, hi, slot, is_first, is_last = find_run(
            query_start_loc, seq_lens, unit, r, num_runs, request, item, first_unit, last_unit,
            index, TOKENS, CAUSAL, FIXED,
        )  # fmt: skip
        mask = lines < tokens * H
        q_at = q + (token + lines // H).to(tl.int64) * q_token + lines % H * q_head
        scales = query_scales(qk_scale, q_scale, token.to(tl.int64) * H + lines, mask, Q_SCALES)
        pages = table + request.to(tl.int64) * table_stride
        queries = load_queries(q_at, mask, EIGHT_BITS, COLUMNS, OPTIONS)
        state = initial_state(BLOCK_H, COLUMNS)
        visible += lines // H
        rows = Rows(cache, page, row_stride, W, N, tl.load(kv_scale), table, 0, pages, M)
        state = attend(
            queries, scales, visible, state, rows, lo, hi, FOLDED, SEGMENT, COLUMNS, OPTIONS
        )
        _, normalizer, row_lse = finish_softmax(state.running_max, state.running_sum)
        columns = (
            state.a * normalizer[:, None],
            state.b * normalizer[:, None],
            state.rope * normalizer[:, None],
        )
        if slot < 0:
            line = token.to(tl.int64) * H + lines
            store_rows(out, lse, line, mask, columns, row_lse, COLUMNS)
        else:
            line = slot.to(tl.int64) * slot_rows + lines
            store_rows(part, part_lse, line, mask, columns, row_lse, COLUMNS)
        if tile == 0:
            own = index
            if FIXED:
                own = index + r
            store_spans(spans, token, tokens, own, is_first, is_last, BLOCK_T)
        request, item, first_unit = next_run(
            query_start_loc, seq_lens, B, unit, request, item, first_unit, TOKENS, FIXED
        )
