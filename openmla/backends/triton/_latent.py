"""Latent attention of one token over the rows that segments name; mqa_paged and mqa_sparse.

Computes  for each token t, head h: rows = the cached rows its segments name, decoded
          s = scale * q[t, h] @ rows.T;  lse = log(sum(exp(s)));  out = exp(s - lse) @ rows[:, :C]
          (specification: ops/mqa_sparse.py, ops/mqa_paged.py; numbers: backends/reference)
Grid      (cdiv(H, BLOCK_H), T, X): one program owns one token, BLOCK_H heads, one run of its rows;
          a grid holds 65535 tokens, more take several launches
Reads     q [T, H, D], caches [N, BS, W], the rows' names, query_start_loc [B+1]
Writes    out [T, H, C] and lse [T, H]; with X > 1 runs part [T, X, H, C] and part_lse [T, X, H],
          merged by a second kernel
Limits    see why_not() of the two ops

A row is MAIN columns and ROPE more, loaded as two tiles; both serve as keys, MAIN columns as
values, ROPE ones too where values go that far. All of V4's columns are MAIN, though the last are
stored otherwise. Rows that are not there are zeros with a score of -inf, so that nothing of unused
memory, NaN or not, gets into a result.
"""

import triton
import triton.language as tl

from openmla.backends.triton._build import DO_NOT_SPECIALIZE_ON_ALIGNMENT

SLOTS, POSITIONS, WINDOW, PREFIX, PAGED = (tl.constexpr(i) for i in range(5))
PLAIN, FP8, PACKED, V4 = (tl.constexpr(i) for i in range(4))
V4_ROPE = tl.constexpr(64)  # columns that V4's packed rows end with, in bf16
LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(1.4426950408889634)
# What differs from step to step: no other value of these is another kernel.
CHANGING = (
    "B", "first_token", "X", "N_1", "M_1", "K_1", "table_stride_1", "N_2", "M_2", "K_2",
    "table_stride_2",
)  # fmt: skip


@triton.jit
def decode_e4m3(stored, dtype: tl.constexpr, ASM: tl.constexpr):
    """e4m3 bytes as numbers of a wider type, exactly: the bits shifted into place, times a power of
    two. No target is asked to know the format; a NaN byte becomes NaN."""
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
        value = moved.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    else:
        wide = stored.to(tl.uint32)
        moved = ((wide & 0x80) << 24) | ((wide & 0x7F) << 20)
        value = moved.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2**120
    return tl.where((bits & 0x7F) == 0x7F, float("nan"), value).to(dtype)


@triton.jit
def request_of(t, query_start_loc, B):
    """Which request owns a token, B for one past them all; so many ends looked at in one go, that a
    larger batch is not another kernel."""
    bounds = tl.arange(0, 128)
    owner = 0
    for first in range(0, B, 128):
        ends = tl.load(
            query_start_loc + 1 + first + bounds, mask=first + bounds < B, other=2147483647
        )
        owner += tl.sum((ends <= t).to(tl.int32), 0)
    return owner


@triton.jit
def count_rows(t, b, position, B, row_lens, K, M, span, KIND: tl.constexpr, BS: tl.constexpr):
    """How many rows a segment may name for a token."""
    n = 0
    if b < B:
        if KIND == SLOTS or KIND == POSITIONS:
            n = tl.maximum(tl.minimum(tl.load(row_lens + t), K), 0)
        elif KIND == WINDOW:
            n = tl.minimum(tl.minimum(position + 1, span), M * BS).to(tl.int32)
        elif KIND == PREFIX:
            n = tl.minimum((position + 1) // span, M * BS).to(tl.int32)
    return n


@triton.jit
def name_rows(j, hi, position, rows, M, KIND: tl.constexpr, BS: tl.constexpr):
    """A segment's j-th rows by slot or by position within a request, -1 from hi on."""
    if KIND == SLOTS or KIND == POSITIONS:
        name = tl.load(rows + j, mask=j < hi, other=-1)
    elif KIND == WINDOW:
        name = (position % (M * BS)).to(tl.int32) - j
        name = tl.where(j < hi, tl.where(name < 0, name + M * BS, name), -1)
    else:
        name = tl.where(j < hi, j, -1)
    return name


@triton.jit
def find_slots(name, table, M, N, BS: tl.constexpr):
    """Slots of rows named by position, -1 of those that are not there; a cache has fewer than 2**31
    rows."""
    block = tl.load(table + name // BS, mask=within(name, M * BS), other=-1)
    return tl.where(within(block, N), block * BS + name % BS, -1)


@triton.jit
def find_rows(
    start, j, lo, hi, position, rows, table, M, N,
    KIND: tl.constexpr, BS: tl.constexpr, ONE_BLOCK: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """Block and offset of a segment's j-th rows, and whether they are there: anything where not.

    With ONE_BLOCK the rows from `start` on lie in one block, which is looked up once: a thread that
    loads parts of many rows would otherwise look each of them up.
    """
    if ONE_BLOCK:
        block = tl.load(table + start // BS)
        there = (j >= lo) & (j < tl.where(within(block, N), hi, 0))
        offset = start % BS + (j - start)
    else:
        name = name_rows(j, hi, position, rows, M, KIND, BS)
        if KIND == SLOTS:
            block = name // BS
            there = within(name, N * BS)
        else:
            block = tl.load(table + name // BS, mask=within(name, M * BS), other=-1)
            there = within(block, N)
        offset = name % BS
    return block.to(OFFSET), offset, there


@triton.jit
def within(i, n):
    """0 <= i < n, at the price of one comparison."""
    return i.to(tl.uint32, bitcast=True) < n.to(tl.uint32)


@triton.jit
def load_main(
    cache, row, scales_at, there,
    FIRST: tl.constexpr, USED: tl.constexpr, BLOCK: tl.constexpr, MAIN: tl.constexpr,
    FORMAT: tl.constexpr, ALIGNED: tl.constexpr, ASM: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Columns FIRST .. FIRST + USED - 1 of some rows as a tile [BLOCK_N, BLOCK] in the dtype of the
    products; rows that are not there are zeros. fp8 is not yet multiplied with its kv_scale."""
    c = tl.arange(0, BLOCK)
    BYTES: tl.constexpr = MAIN - V4_ROPE - FIRST if FORMAT == V4 else USED  # V4: of e4m3
    if BYTES >= BLOCK:
        mask = there[:, None]
    else:
        mask = there[:, None] & (c < BYTES)[None, :]
    tile = tl.load(cache + row[:, None] + (FIRST + c)[None, :], mask=mask, other=0)
    if FORMAT == FP8:
        tile = decode_e4m3(tile, dtype, ASM)
    if FORMAT == PACKED or FORMAT == V4:
        GROUP: tl.constexpr = 128 if FORMAT == PACKED else 64
        GROUPS: tl.constexpr = BLOCK // GROUP
        g = FIRST // GROUP + tl.arange(0, GROUPS)
        mask_g = there[:, None] & (g < (FIRST + BYTES) // GROUP)[None, :]
        if FORMAT == V4 and ALIGNED:  # bytes could not be copied ahead of their use
            words = (cache + scales_at).to(tl.pointer_type(tl.uint32))
            four = tl.load(words[:, None] + (g // 4)[None, :], mask=mask_g, other=0)
            byte = (four >> (8 * (g % 4))[None, :].to(tl.uint32)) & 0xFF
            scales = (byte << 23).to(tl.float32, bitcast=True)
        elif FORMAT == V4:
            byte = tl.load(cache + scales_at[:, None] + g[None, :], mask=mask_g, other=0)
            scales = (byte.to(tl.uint32) << 23).to(tl.float32, bitcast=True)
        elif ALIGNED:
            words = (cache + scales_at).to(tl.pointer_type(tl.float32))
            scales = tl.load(words[:, None] + g[None, :], mask=mask_g, other=0.0)
        else:
            bits = tl.zeros([there.shape[0], GROUPS], tl.uint32)
            for i in tl.static_range(4):
                at = cache + scales_at[:, None] + (4 * g + i)[None, :]
                bits |= tl.load(at, mask=mask_g, other=0).to(tl.uint32) << (8 * i)
            scales = bits.to(tl.float32, bitcast=True)
        # a power of two times four bits is exact; the interpreter multiplies in float32 only
        FACTORS: tl.constexpr = dtype if ASM else tl.float32
        values = tl.reshape(decode_e4m3(tile, FACTORS, ASM), [there.shape[0], GROUPS, GROUP])
        values = values * scales.to(FACTORS)[:, :, None]
        if FORMAT == V4 and BYTES < BLOCK:  # the group behind the bytes
            at = row + (MAIN - V4_ROPE)
            rope = load_rope(cache, at, there, V4_ROPE, V4_ROPE, FORMAT, ALIGNED, ASM, FACTORS)
            is_rope = g == (MAIN - V4_ROPE) // GROUP
            values = tl.where(is_rope[None, :, None], rope[:, None, :], values)
        tile = tl.reshape(values, [there.shape[0], BLOCK])
    return tile.to(dtype)


@triton.jit
def load_rope(
    cache, rope_at, there,
    ROPE: tl.constexpr, BLOCK: tl.constexpr, FORMAT: tl.constexpr, ALIGNED: tl.constexpr,
    ASM: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """The last columns of some rows, [BLOCK_N, BLOCK]; 16-bit numbers in the packed formats."""
    r = tl.arange(0, BLOCK)
    if ROPE == BLOCK:
        mask = there[:, None]
    else:
        mask = there[:, None] & (r < ROPE)[None, :]
    if FORMAT == PLAIN or FORMAT == FP8:
        rope = tl.load(cache + rope_at[:, None] + r[None, :], mask=mask, other=0)
        if FORMAT == FP8:
            rope = decode_e4m3(rope, dtype, ASM)
    elif ALIGNED:
        halves = (cache + rope_at).to(tl.pointer_type(tl.bfloat16))
        rope = tl.load(halves[:, None] + r[None, :], mask=mask, other=0.0)
    else:
        at = cache + rope_at[:, None] + (2 * r)[None, :]
        low = tl.load(at, mask=mask, other=0).to(tl.uint16)
        high = tl.load(at + 1, mask=mask, other=0).to(tl.uint16)
        rope = (low | (high << 8)).to(tl.bfloat16, bitcast=True)
    return rope.to(dtype)


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    """A product on the matrix units. Triton 3.6's interpreter multiplies bf16 wrongly and cuts
    float32 short instead of rounding it: there everything stays float32."""
    if UPCAST:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def add_product(
    scores, q, tile, PRECISION: tl.constexpr, UNCHAINED: tl.constexpr, UPCAST: tl.constexpr
):  # fmt: skip
    """scores + q @ tile.T; UNCHAINED, as a sum that the compiler does not turn into a product that
    goes on from another one's result."""
    if UNCHAINED:
        product = dot(q, tl.trans(tile), tl.zeros(scores.shape, tl.float32), PRECISION, UPCAST)
        scores = tl.fma(product, 1.0, scores)
    else:
        scores = dot(q, tl.trans(tile), scores, PRECISION, UPCAST)
    return scores


@triton.jit
def unchained(weights, shrink):
    """The same values, to be asked for where a condition holds that the compiler cannot know.

    A product whose result goes into another one gets its warps along its rows alone, and where
    there are fewer rows than 16 times warps, several compute the same. The compiler finds the other
    product behind any operation, but not behind the end of a branch."""
    PACK: tl.constexpr = 32 // weights.dtype.primitive_bitwidth
    weights = tl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [weights], dtype=weights.dtype, is_pure=False, pack=PACK
    )
    shrink = tl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [shrink], dtype=tl.float32, is_pure=False, pack=1
    )
    return weights, shrink


@triton.jit
def attend(
    q_a, q_b, q_rope, largest, total, acc_a, acc_b, acc_rope, lo, hi, position, qk_scale, kv_scale,
    cache, page, row_stride, W, rows, table, M, N, BS: tl.constexpr, ONE_BLOCK: tl.constexpr,
    KIND: tl.constexpr, FORMAT: tl.constexpr, ALIGNED: tl.constexpr, ASM: tl.constexpr,
    OFFSET: tl.constexpr, MAIN: tl.constexpr, ROPE: tl.constexpr, ROPE_VALUED: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_R: tl.constexpr,
    PRECISION: tl.constexpr, UNCHAINED: tl.constexpr, UPCAST: tl.constexpr, STAGES: tl.constexpr,
    HOIST: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Rows lo .. hi-1 of one segment, added to what a softmax has seen so far."""
    if FORMAT == FP8:  # on logits and sums, so that the largest weight stays exactly 1
        qk_scale *= kv_scale
        acc_a = acc_a / kv_scale
        acc_b = acc_b / kv_scale
        acc_rope = acc_rope / kv_scale
    SECOND: tl.constexpr = MAIN > BLOCK_A
    USED: tl.constexpr = BLOCK_A if SECOND else MAIN
    offs_n = tl.arange(0, BLOCK_N)
    begin = lo
    # What leads to V4's rows is read ahead, where there are warps enough to hold it: blocks one
    # tile, positions, which lead to blocks, two. Elsewhere it was tried and lost.
    AHEAD: tl.constexpr = FORMAT == V4 and KIND != SLOTS and not ONE_BLOCK and q_a.shape[0] > 16
    if ONE_BLOCK:
        begin = lo - lo % BLOCK_N
    if AHEAD:
        name = name_rows(begin + offs_n, hi, position, rows, M, KIND, BS)
        found = find_slots(name, table, M, N, BS)
        if KIND == POSITIONS:
            name = name_rows(begin + BLOCK_N + offs_n, hi, position, rows, M, KIND, BS)
    for start in tl.range(begin, hi, BLOCK_N, num_stages=STAGES, disable_licm=not HOIST):
        j = start + offs_n
        if AHEAD:
            there = found >= 0
            block = (found // BS).to(OFFSET)
            offset = found % BS
            if KIND == POSITIONS:
                found = find_slots(name, table, M, N, BS)
                name = name_rows(j + 2 * BLOCK_N, hi, position, rows, M, KIND, BS)
            else:
                coming = name_rows(j + BLOCK_N, hi, position, rows, M, KIND, BS)
                found = find_slots(coming, table, M, N, BS)
        else:
            block, offset, there = find_rows(
                start, j, lo, hi, position, rows, table, M, N, KIND, BS, ONE_BLOCK, OFFSET
            )
        if FORMAT == V4:
            row = block * page + offset * (MAIN + V4_ROPE)
            scales_at = block * page + BS * (MAIN + V4_ROPE) + offset * (W - MAIN - V4_ROPE)
            rope_at = row
        else:
            row = block * page + offset * row_stride
            scales_at = row + MAIN
            rope_at = row + MAIN
            if FORMAT == PACKED:
                rope_at = row + MAIN + 4 * (MAIN // 128)
        tile_a = load_main(
            cache, row, scales_at, there, 0, USED, BLOCK_A, MAIN, FORMAT, ALIGNED, ASM, dtype
        )
        scores = tl.zeros([q_a.shape[0], BLOCK_N], tl.float32)
        scores = dot(q_a, tl.trans(tile_a), scores, PRECISION, UPCAST)
        if SECOND:
            tile_b = load_main(
                cache, row, scales_at, there, BLOCK_A, MAIN - BLOCK_A, BLOCK_B, MAIN, FORMAT,
                ALIGNED, ASM, dtype,
            )  # fmt: skip
            scores = add_product(scores, q_b, tile_b, PRECISION, UNCHAINED, UPCAST)
        if ROPE > 0:
            rope = load_rope(cache, rope_at, there, ROPE, BLOCK_R, FORMAT, ALIGNED, ASM, dtype)
            scores = add_product(scores, q_rope, rope, PRECISION, UNCHAINED, UPCAST)
        scores = tl.where(there[None, :], scores * qk_scale, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        safe = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weights = tl.exp2(scores - safe[:, None])
        shrink = tl.exp2(largest - safe)
        total = total * shrink + tl.sum(weights, 1)
        if not UPCAST:
            weights = weights.to(dtype)
        if UNCHAINED and start < hi:
            weights, shrink = unchained(weights, shrink)
        acc_a = dot(weights, tile_a, acc_a * shrink[:, None], PRECISION, UPCAST)
        if SECOND:
            acc_b = dot(weights, tile_b, acc_b * shrink[:, None], PRECISION, UPCAST)
        if ROPE_VALUED:
            acc_rope = dot(weights, rope, acc_rope * shrink[:, None], PRECISION, UPCAST)
        largest = new_largest
    if FORMAT == FP8:
        acc_a = acc_a * kv_scale
        acc_b = acc_b * kv_scale
        acc_rope = acc_rope * kv_scale
    return largest, total, acc_a, acc_b, acc_rope


@triton.jit
def load_query(q_at, mask_h, FIRST: tl.constexpr, USED: tl.constexpr, BLOCK: tl.constexpr):
    """Columns FIRST .. FIRST + USED - 1 of the heads' queries, zeros around."""
    c = tl.arange(0, BLOCK)
    mask = mask_h[:, None] & (c < USED)[None, :]
    return tl.load(q_at[:, None] + (FIRST + c)[None, :], mask=mask, other=0.0)


@triton.jit
def store_columns(at, mask_h, values, FIRST: tl.constexpr, USED: tl.constexpr, BLOCK: tl.constexpr):
    """Columns FIRST .. FIRST + USED - 1 of the heads' outputs."""
    c = tl.arange(0, BLOCK)
    mask = mask_h[:, None] & (c < USED)[None, :]
    tl.store(at[:, None] + (FIRST + c)[None, :], values.to(at.dtype.element_ty), mask=mask)


@triton.jit(
    do_not_specialize=CHANGING, do_not_specialize_on_alignment=DO_NOT_SPECIALIZE_ON_ALIGNMENT
)
def _latent_kernel(
    q, query_start_loc, positions, seq_lens, split_starts, sink,
    cache_1, kv_scale_1, rows_1, row_lens_1, table_1,
    cache_2, kv_scale_2, rows_2, row_lens_2, table_2,
    out, lse,
    B, first_token, qk_scale, q_token, q_head, X, run_length,
    page_1, row_1, W_1, N_1, M_1, K_1, span_1, rows_stride_1, table_stride_1,
    page_2, row_2, W_2, N_2, M_2, K_2, span_2, rows_stride_2, table_stride_2,
    H: tl.constexpr, C: tl.constexpr, MAIN: tl.constexpr, ROPE: tl.constexpr,
    KIND_1: tl.constexpr, FORMAT_1: tl.constexpr, BS_1: tl.constexpr, ONE_BLOCK_1: tl.constexpr,
    KIND_2: tl.constexpr, FORMAT_2: tl.constexpr, BS_2: tl.constexpr, ONE_BLOCK_2: tl.constexpr,
    SECOND: tl.constexpr, CAUSAL: tl.constexpr, SINK: tl.constexpr, SPLIT: tl.constexpr,
    ALIGNED: tl.constexpr, ASM: tl.constexpr, OFFSET: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_B: tl.constexpr,
    BLOCK_R: tl.constexpr, PRECISION: tl.constexpr, UNCHAINED: tl.constexpr, UPCAST: tl.constexpr,
    STAGES: tl.constexpr, HOIST: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    head_tile, t, x = tl.program_id(0), first_token + tl.program_id(1), tl.program_id(2)
    ROPE_VALUED: tl.constexpr = C > MAIN
    TWO_TILES: tl.constexpr = MAIN > BLOCK_A
    USED: tl.constexpr = BLOCK_A if TWO_TILES else MAIN
    if not UPCAST:  # inside a compiled graph it may arrive as fp64; interpreted, as a Python number
        qk_scale = qk_scale.to(tl.float32)
    qk_scale = qk_scale * LOG2E
    if KIND_1 == SLOTS and (not SECOND or KIND_2 == SLOTS):  # whose they are does not matter
        b = tl.where(t < tl.load(query_start_loc + B), 0, B)
    else:
        b = request_of(t, query_start_loc, B)
    t64 = t.to(tl.int64)
    n_2 = 0
    if KIND_1 == PAGED:
        position = 0
        n_1 = 0
        if b < B:
            n_1 = tl.load(seq_lens + b)
            if CAUSAL:
                n_1 = tl.maximum(n_1 - (tl.load(query_start_loc + b + 1) - 1 - t), 0)
    else:
        position = tl.load(positions + t)
        n_1 = count_rows(t, b, position, B, row_lens_1, K_1, M_1, span_1, KIND_1, BS_1)
        if SECOND:
            n_2 = count_rows(t, b, position, B, row_lens_2, K_2, M_2, span_2, KIND_2, BS_2)
    owner = tl.minimum(b, B - 1).to(tl.int64)
    lo = 0
    hi = n_1 + n_2
    if SPLIT:
        if KIND_1 == PAGED:
            if b < B:
                lo = tl.load(split_starts + owner * (X + 1) + x)
                hi = tl.minimum(hi, tl.load(split_starts + owner * (X + 1) + x + 1))
        else:
            run = tl.cdiv(tl.cdiv(hi, BLOCK_N), X) * BLOCK_N
            run = tl.where(run_length > 0, run_length, run)
            lo = x * run
            hi = tl.minimum(hi, lo + run)

    heads = head_tile * BLOCK_H + tl.arange(0, BLOCK_H)
    mask_h = heads < H
    q_at = q + t64 * q_token + heads * q_head
    q_a = load_query(q_at, mask_h, 0, USED, BLOCK_A).to(dtype)
    q_b = load_query(q_at, mask_h, BLOCK_A, MAIN - BLOCK_A, BLOCK_B).to(dtype)
    q_rope = load_query(q_at, mask_h, MAIN, ROPE, BLOCK_R).to(dtype)
    largest = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    acc_a = tl.zeros([BLOCK_H, BLOCK_A], tl.float32)
    acc_b = tl.zeros([BLOCK_H, BLOCK_B], tl.float32)
    acc_rope = tl.zeros([BLOCK_H, BLOCK_R], tl.float32)
    largest, total, acc_a, acc_b, acc_rope = attend(
        q_a, q_b, q_rope, largest, total, acc_a, acc_b, acc_rope, lo, tl.minimum(hi, n_1), position,
        qk_scale, tl.load(kv_scale_1), cache_1, page_1, row_1, W_1,
        rows_1 + t64 * rows_stride_1, table_1 + owner * table_stride_1, M_1, N_1, BS_1, ONE_BLOCK_1,
        KIND_1, FORMAT_1, ALIGNED, ASM, OFFSET, MAIN, ROPE, ROPE_VALUED, BLOCK_N, BLOCK_A, BLOCK_B,
        BLOCK_R, PRECISION, UNCHAINED, UPCAST, STAGES, HOIST, dtype,
    )  # fmt: skip
    if SECOND:
        largest, total, acc_a, acc_b, acc_rope = attend(
            q_a, q_b, q_rope, largest, total, acc_a, acc_b, acc_rope, tl.maximum(lo - n_1, 0),
            hi - n_1, position, qk_scale, tl.load(kv_scale_2), cache_2, page_2, row_2, W_2,
            rows_2 + t64 * rows_stride_2, table_2 + owner * table_stride_2, M_2, N_2, BS_2,
            ONE_BLOCK_2, KIND_2, FORMAT_2, ALIGNED, ASM, OFFSET, MAIN, ROPE, ROPE_VALUED, BLOCK_N,
            BLOCK_A, BLOCK_B, BLOCK_R, PRECISION, UNCHAINED, UPCAST, STAGES, HOIST, dtype,
        )  # fmt: skip
    seen = total != 0  # NaN stays NaN
    share = tl.where(seen, 1.0 / total, 0.0)
    natural = tl.where(seen, (largest + tl.log2(total)) * LN2, float("-inf"))
    if SPLIT:
        row = (t64 * X + x) * H + heads
    else:
        row = t64 * H + heads
        if SINK:
            logit = tl.load(sink + heads, mask=mask_h, other=0.0).to(tl.float32)
            share *= tl.where(seen, 1.0 / (1.0 + tl.exp2((logit - natural) * LOG2E)), 0.0)
    tl.store(lse + row, natural, mask=mask_h)
    at = out + row * C
    store_columns(at, mask_h, acc_a * share[:, None], 0, USED, BLOCK_A)
    if TWO_TILES:
        store_columns(at, mask_h, acc_b * share[:, None], BLOCK_A, MAIN - BLOCK_A, BLOCK_B)
    if ROPE_VALUED:
        store_columns(at, mask_h, acc_rope * share[:, None], MAIN, C - MAIN, BLOCK_R)


@triton.jit(do_not_specialize=["X"])
def _merge_runs_kernel(
    part, part_lse, sink, out, lse, X,
    H: tl.constexpr, C: tl.constexpr, SINK: tl.constexpr, BLOCK_X: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    """One token and head: its runs weighted by their sums; the sink takes its share once."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    t, h = row // H, row % H
    c = tile * BLOCK_C + tl.arange(0, BLOCK_C)
    offs_x = tl.arange(0, BLOCK_X)
    acc = tl.zeros([BLOCK_C], tl.float32)
    total = 0.0
    largest = float("-inf")
    for start in range(0, X, BLOCK_X):
        x = start + offs_x
        runs = (t * X + x) * H + h
        each = tl.load(part_lse + runs, mask=x < X, other=float("-inf"))
        new_largest = tl.maximum(largest, tl.max(each, 0))
        safe = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weights = tl.exp2((each - safe) * LOG2E)
        shrink = tl.exp2((largest - safe) * LOG2E)
        values = tl.load(
            part + runs[:, None] * C + c[None, :],
            mask=(weights > 0)[:, None] & (c < C)[None, :],
            other=0.0,
        )
        acc = acc * shrink + tl.sum(values * weights[:, None], 0)
        total = total * shrink + tl.sum(weights, 0)
        largest = new_largest
    seen = total != 0  # NaN stays NaN
    natural = tl.where(seen, largest + tl.log2(total) * LN2, float("-inf"))
    share = tl.where(seen, 1.0 / total, 0.0)
    if SINK:
        logit = tl.load(sink + h).to(tl.float32)
        share *= tl.where(seen, 1.0 / (1.0 + tl.exp2((logit - natural) * LOG2E)), 0.0)
    tl.store(out + row * C + c, (acc * share).to(out.dtype.element_ty), mask=c < C)
    if tile == 0:
        tl.store(lse + row, natural)
