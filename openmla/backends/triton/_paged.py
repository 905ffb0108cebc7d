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
from openmla.backends.triton._latent import attend, load_query, query_scales
from openmla.backends.triton._latent_rows import PAGED
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
def store_rows(
    out, lse, line, mask, acc_a, acc_b, acc_rope, row_lse, C: tl.constexpr, MAIN: tl.constexpr,
    BLOCK_A: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    TWO_TILES: tl.constexpr = MAIN > BLOCK_A
    USED: tl.constexpr = BLOCK_A if TWO_TILES else MAIN
    tl.store(lse + line, row_lse, mask=mask)
    at = out + line * C
    store_columns(at, mask, acc_a, 0, USED, BLOCK_A)
    if TWO_TILES:
        store_columns(at, mask, acc_b, BLOCK_A, MAIN - BLOCK_A, BLOCK_B)
    if C > MAIN:
        store_columns(at, mask, acc_rope, MAIN, C - MAIN, BLOCK_R)


@triton.jit(
    do_not_specialize=DO_NOT_SPECIALIZE,
    do_not_specialize_on_alignment=[*DO_NOT_SPECIALIZE_ON_ALIGNMENT, "table"],
)
def _paged_kernel(
    q, q_scale, query_start_loc, seq_lens, table, cache, kv_scale, out, lse, part, part_lse, spans,
    B, T, unit, qk_scale, q_token, q_head, page, row_stride, W, N, M, table_stride, slot_rows,
    H: tl.constexpr, C: tl.constexpr, MAIN: tl.constexpr, ROPE: tl.constexpr,
    FORMAT: tl.constexpr, BS: tl.constexpr, ONE_BLOCK: tl.constexpr, TOKENS: tl.constexpr,
    CAUSAL: tl.constexpr, FIXED: tl.constexpr, ALIGNED: tl.constexpr, ASM: tl.constexpr,
    OFFSET: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_A: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_R: tl.constexpr, PRECISION: tl.constexpr,
    UNCHAINED: tl.constexpr, UPCAST: tl.constexpr, STAGES: tl.constexpr, HOIST: tl.constexpr,
    dtype: tl.constexpr, EIGHT_BITS: tl.constexpr, Q_SCALES: tl.constexpr,
):  # fmt: skip
    tile, p, num_programs = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    TWO_TILES: tl.constexpr = MAIN > BLOCK_A
    USED: tl.constexpr = BLOCK_A if TWO_TILES else MAIN
    FOLDED: tl.constexpr = CAUSAL and TOKENS > 1
    if not UPCAST:  # fp64 from a compiled graph; in the interpreter a Python float
        qk_scale = qk_scale.to(tl.float32)
    qk_scale = qk_scale * LOG2E
    rows = tile * BLOCK_H + tl.arange(0, BLOCK_H)
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
        mask = rows < tokens * H
        q_at = q + (token + rows // H).to(tl.int64) * q_token + rows % H * q_head
        scales = query_scales(qk_scale, q_scale, token.to(tl.int64) * H + rows, mask, Q_SCALES)
        pages = table + request.to(tl.int64) * table_stride
        q_a = load_query(q_at, mask, 0, USED, BLOCK_A, ASM, dtype, EIGHT_BITS)
        q_b = load_query(q_at, mask, BLOCK_A, MAIN - BLOCK_A, BLOCK_B, ASM, dtype, EIGHT_BITS)
        q_rope = load_query(q_at, mask, MAIN, ROPE, BLOCK_R, ASM, dtype, EIGHT_BITS)
        running_max, running_sum, acc_a, acc_b, acc_rope = attend(
            q_a, q_b, q_rope, tl.full([BLOCK_H], float("-inf"), tl.float32),
            tl.zeros([BLOCK_H], tl.float32), tl.zeros([BLOCK_H, BLOCK_A], tl.float32),
            tl.zeros([BLOCK_H, BLOCK_B], tl.float32), tl.zeros([BLOCK_H, BLOCK_R], tl.float32),
            lo, hi, 0, visible + rows // H, scales, tl.load(kv_scale), cache, page, row_stride,
            W, table, pages, M, N, BS, ONE_BLOCK, PAGED, FORMAT, FOLDED, ALIGNED, ASM, OFFSET,
            MAIN, ROPE, C > MAIN, BLOCK_N, BLOCK_A, BLOCK_B, BLOCK_R, PRECISION, UNCHAINED,
            UPCAST, STAGES, HOIST, dtype,
        )  # fmt: skip
        _, normalizer, row_lse = finish_softmax(running_max, running_sum)
        acc_a = acc_a * normalizer[:, None]
        acc_b = acc_b * normalizer[:, None]
        acc_rope = acc_rope * normalizer[:, None]
        if slot < 0:
            line = token.to(tl.int64) * H + rows
            store_rows(out, lse, line, mask, acc_a, acc_b, acc_rope, row_lse, C, MAIN, BLOCK_A,
                       BLOCK_B, BLOCK_R)  # fmt: skip
        else:
            line = slot.to(tl.int64) * slot_rows + rows
            store_rows(part, part_lse, line, mask, acc_a, acc_b, acc_rope, row_lse, C, MAIN,
                       BLOCK_A, BLOCK_B, BLOCK_R)  # fmt: skip
        if tile == 0:
            own = index
            if FIXED:
                own = index + r
            store_spans(spans, token, tokens, own, is_first, is_last, BLOCK_T)
        request, item, first_unit = next_run(
            query_start_loc, seq_lens, B, unit, request, item, first_unit, TOKENS, FIXED
        )
