"""index_logits, Triton: scores of the lightning indexer over a paged cache of its keys.

Computes  out[t, j] = sum over h of w[t, h] * relu(q[t, h] . keys[j]), j < row_lens[t], -inf
          elsewhere (specification: ops/index_logits.py)
Grid      (cdiv(T, BLOCK_Q), X): one program owns BLOCK_Q tokens and one run of columns. It takes
          the requests of its tokens one after another, a tile of keys for all tokens at once.
Reads     q_idx [T, HI, DI], w_idx [T, HI], cache [N, BS, W], block_table [B, M], row_lens [T]
Writes    out [T, num_keys], every column once
Limits    see why_not()
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from openmla.backends import Problem
from openmla.backends.triton import cache_write
from openmla.backends.triton._build import (
    DO_NOT_SPECIALIZE_ON_ALIGNMENT,
    TARGETS,
    Build,
    capability_of,
    cdiv,
)
from openmla.backends.triton._index import (
    FP8,
    KEYS,
    Config,
    Shape,
    add_heads,
    as_stored,
    fill_columns,
    load_keys,
    load_queries,
    load_weights,
    multiply,
    run_length,
    shape_of,
    stored_type,
    tile_of,
    why_not_index,
)
from openmla.backends.triton._latent import PLAIN, request_of
from openmla.backends.triton.cache_write import INDEX
from openmla.cache.format import GROUP, get_format

LAUNCHES = 1
FP_FUSION = True


@triton.jit
def _load_scales(scales, n, ALIGNED: tl.constexpr):
    """The n-th float32 behind a pointer to bytes."""
    if ALIGNED:
        found = tl.load(scales.to(tl.pointer_type(tl.float32)) + n)
    else:
        at = scales.to(tl.pointer_type(tl.uint8)) + 4 * n
        bits = tl.zeros(n.shape, tl.uint32)
        for i in tl.static_range(4):
            bits |= tl.load(at + i).to(tl.uint32) << (8 * i)
        found = bits.to(tl.float32, bitcast=True)
    return found


@triton.jit
def score_tile(
    cache, blocks, start, j, stop, N, page, row_stride, q, q_first, q_token, q_head, w, w_first,
    w_token, first, T,
    HI: tl.constexpr, DI: tl.constexpr, BS: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr,
    SCALES: tl.constexpr, ALIGNED: tl.constexpr, ONE_BLOCK: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
    HOLD: tl.constexpr, ASM: tl.constexpr, UPCAST: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Scores of keys j = start, start + 1, ... of one request for the tokens from `first` on,
    [BLOCK_N, BLOCK_Q]; of keys from `stop` on anything."""
    CHUNKS: tl.constexpr = (HI + BLOCK_H - 1) // BLOCK_H
    GROUPS: tl.constexpr = DI // GROUP
    if ONE_BLOCK:  # looked up once
        block = tl.load(blocks + start // BS)
        offset = start % BS + tl.arange(0, BLOCK_N)
    else:
        block = tl.load(blocks + j // BS, mask=j < stop, other=0)
        offset = j % BS
    block = tl.where((block >= 0) & (block < N), block, 0)
    values = cache + block.to(tl.int64) * page
    scales = values + BS * DI
    if KIND == PLAIN:
        keys_at = values + offset.to(tl.int64) * row_stride
    else:
        keys_at = values + offset * DI
    for c in tl.static_range(CHUNKS):
        for g in tl.static_range(GROUPS):
            if c == 0 and g == 0:
                queries = q_first
            else:
                queries = load_queries(
                    q, first, T, q_token, q_head, c, g * GROUP, GROUP, HI, BLOCK_Q,
                    BLOCK_H, BLOCK_D, ASM, dtype,
                )  # fmt: skip
            keys = load_keys(keys_at, g * GROUP, GROUP, BLOCK_D, ASM, dtype)
            part = multiply(keys, queries, PRECISION, UPCAST)
            if SCALES > 1:
                n = offset * SCALES + g * SCALES // GROUPS
                part = part * _load_scales(scales, n, ALIGNED)[:, None]
            if g == 0:
                products = part
            else:
                products += part
        if c == 0 and HOLD:
            weights = w_first
        else:
            weights = load_weights(w, first, T, w_token, c, HI, BLOCK_Q, BLOCK_H)
        liked = add_heads(products, weights, BLOCK_Q, BLOCK_H)
        if c == 0:
            total = liked
        else:
            total += liked
    if KIND != PLAIN and SCALES == 1:  # not negative, so it commutes with relu
        total *= _load_scales(scales, offset, ALIGNED)[:, None]
    return total


@triton.jit(
    do_not_specialize=["T", "B", "N", "num_keys", "table_stride"],
    do_not_specialize_on_alignment=[*DO_NOT_SPECIALIZE_ON_ALIGNMENT, "table"],
)
def _index_logits_kernel(
    out, q, w, cache, table, query_start_loc, row_lens,
    T, B, N, num_keys, run, q_token, q_head, w_token, page, row_stride, table_stride,
    HI: tl.constexpr, DI: tl.constexpr, BS: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr,
    SCALES: tl.constexpr, ALIGNED: tl.constexpr, ONE_BLOCK: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, FILL: tl.constexpr,
    PRECISION: tl.constexpr, HOLD: tl.constexpr, ASM: tl.constexpr, UPCAST: tl.constexpr,
    STAGES: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * BLOCK_Q
    lo = tl.program_id(1) * run
    hi = tl.minimum(lo + run, num_keys)
    offs_n = tl.arange(0, BLOCK_N)
    t = first + tl.arange(0, BLOCK_Q)
    lens = tl.load(row_lens + t, mask=t < T, other=0)
    row = out + t.to(tl.int64) * num_keys
    written = tl.zeros([BLOCK_Q], tl.int32) + lo  # the first column that is not
    end = tl.minimum(first + BLOCK_Q, tl.load(query_start_loc + B))
    if (first < end) & (lo < tl.max(lens, 0)):
        q_first = load_queries(
            q, first, T, q_token, q_head, 0, 0, GROUP, HI, BLOCK_Q, BLOCK_H, BLOCK_D, ASM, dtype
        )
        w_first = load_weights(w, first, T, w_token, 0, HI, BLOCK_Q, BLOCK_H)
        last = request_of(end - 1, query_start_loc, B)
        for b in range(request_of(first, query_start_loc, B), last + 1):
            mine = (t >= tl.load(query_start_loc + b)) & (t < tl.load(query_start_loc + b + 1))
            stop = tl.minimum(tl.max(tl.where(mine, lens, 0), 0), hi)
            blocks = table + tl.cast(b, tl.int64) * table_stride
            for start in tl.range(lo, stop, BLOCK_N, num_stages=STAGES):
                j = start + offs_n
                total = score_tile(
                    cache, blocks, start, j, stop, N, page, row_stride, q, q_first, q_token, q_head,
                    w, w_first, w_token, first, T, HI, DI, BS, KIND, GROUP, SCALES, ALIGNED,
                    ONE_BLOCK, BLOCK_Q, BLOCK_H, BLOCK_N, BLOCK_D, PRECISION, HOLD, ASM, UPCAST,
                    dtype,
                )  # fmt: skip
                logits = tl.where(j[:, None] < lens[None, :], total, float("-inf"))
                mask = (j < hi)[:, None] & mine[None, :]
                tl.store(row[None, :] + j[:, None], logits, mask=mask)
            reached = lo + tl.cdiv(tl.maximum(stop - lo, 0), BLOCK_N) * BLOCK_N
            written = tl.where(mine, reached, written)
    fill_columns(out, t, T, written, hi, num_keys, BLOCK_Q, FILL)


def why_not(problem: Problem) -> str | None:
    return why_not_index(problem)


def run(
    q_idx: Tensor,
    w_idx: Tensor,
    cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    row_lens: Tensor,
    *,
    format: str,
    num_keys: int,
) -> Tensor:
    T, HI, DI = q_idx.shape
    N, BS, _ = cache.shape
    B = block_table.shape[0]
    out = q_idx.new_empty((T, num_keys), dtype=torch.float32)
    if T == 0 or num_keys == 0:
        return out
    capability = capability_of(q_idx.device)
    shape = paged_shape(q_idx.dtype, format, HI, DI, capability)
    layout = cache_write.layout_of(format, DI, cut=DI)
    config, constants = constants_of(
        shape, format, BS, cdiv(T, max(B, 1)), capability,
        aligned=cache_write.is_aligned(cache, layout),
    )  # fmt: skip
    tiles = cdiv(T, constants["BLOCK_Q"])
    length = run_length(num_keys, tiles, config, q_idx.device)
    inputs, strides = arguments_of(
        q_idx, w_idx, cache, block_table, query_start_loc, row_lens, shape
    )
    _index_logits_kernel[(tiles, cdiv(num_keys, length))](
        out,
        *inputs,
        T,
        B,
        N,
        num_keys,
        length,
        *strides,
        **constants,
        num_warps=config.num_warps,
        num_stages=constants["STAGES"],
        enable_fp_fusion=FP_FUSION,
    )
    return out


def arguments_of(
    q_idx: Tensor,
    w_idx: Tensor,
    cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    row_lens: Tensor,
    shape: Shape,
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """Tensors as kernels over a paged cache take them, and their strides."""
    table = block_table if block_table.stride(1) == 1 else block_table.contiguous()
    q, keys = as_stored(q_idx, shape), as_stored(cache, shape)
    tensors = (q, w_idx, keys, table, query_start_loc.contiguous(), row_lens.contiguous())
    strides = (q.stride(0), q.stride(1), w_idx.stride(0), keys.stride(0), keys.stride(1))
    return tensors, (*strides, table.stride(0))


def paged_shape(dtype: torch.dtype, format: str, HI: int, DI: int, capability: int) -> Shape:
    layout = get_format(format)
    if layout.packed:
        return shape_of(dtype, FP8, HI, DI, max(DI // GROUP, 1), capability)
    return shape_of(dtype, layout.dtype, HI, DI, 1, capability)


def constants_of(
    shape: Shape, format: str, BS: int, tokens: int, capability: int, *, aligned: bool
) -> tuple[Config, dict[str, Any]]:
    config, constants = tile_of(
        shape, tokens, chain=2, gathered=BS % KEYS != 0, capability=capability
    )
    constants["SCALES"] = shape.SCALES
    constants["BS"] = BS
    constants["KIND"] = INDEX.value if get_format(format).packed else PLAIN.value
    constants["ALIGNED"] = aligned
    constants["ONE_BLOCK"] = BS % config.block_n == 0
    return config, constants


def builds() -> Iterator[Build]:
    """The models' heads: decode and many tokens, fp8 and bf16 keys, and what is rarer."""
    bf16, fp32 = torch.bfloat16, torch.float32
    for capability in TARGETS:
        for HI in (64, 32):
            for tokens in (1, 2, 2048):
                yield paged_build(capability, FP8, "index_fp8", HI, 128, 64, tokens)
        yield paged_build(capability, FP8, "index_fp8", 64, 128, 32, 1)
        yield paged_build(capability, FP8, "index_fp8", 64, 128, 32, 2048)
        for tokens in (1, 2048):
            yield paged_build(capability, bf16, "index_fp8", 64, 128, 64, tokens)
            yield paged_build(capability, bf16, "index_bf16", 64, 128, 64, tokens)
            yield paged_build(capability, fp32, "index_fp32", 64, 128, 64, tokens)


def paged_build(
    capability: int,
    dtype: torch.dtype,
    format: str,
    HI: int,
    DI: int,
    BS: int,
    tokens: int,
) -> Build:
    shape = paged_shape(dtype, format, HI, DI, capability)
    config, constants = constants_of(shape, format, BS, tokens, capability, aligned=True)
    types = {
        "out": "*fp32",
        "q": "*" + stored_type(dtype, shape),
        "w": "*fp32",
        "cache": "*" + stored_type(get_format(format).dtype, shape),
        **dict.fromkeys(("table", "query_start_loc", "row_lens"), "*i32"),
    }
    signature = {
        name: "constexpr" if name in constants else types.get(name, "i32")
        for name in _index_logits_kernel.arg_names
    }
    return Build(
        f"logits-{format}-{str(dtype)[6:]}-HI{HI}-DI{DI}-BS{BS}-n{tokens}", _index_logits_kernel,
        signature, constants, config.num_warps, constants["STAGES"], capability, FP_FUSION,
    )  # fmt: skip
