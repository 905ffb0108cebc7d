"""index_logits, Triton: scores of the lightning indexer over a paged cache of its keys.

Computes  out[t, j] = sum over h of w[t, h] * relu(q[t, h] . keys[j]), j < row_lens[t], -inf
          elsewhere (specification: ops/index_logits.py)
Grid      (cdiv(T, BLOCK_Q), X): one program owns BLOCK_Q tokens and one run of columns. It takes
          the requests of its tokens one by one, each tile of keys for all of its tokens.
Reads     q_idx [T, HI, DI], w_idx [T, HI], cache [N, BS, W], block_table [B, M], row_lens [T]
Writes    out [T, num_keys], every column once
Limits    see why_not()
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache, partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from openmla.backends import Problem
from openmla.backends.kernels import Variant
from openmla.backends.triton._build import DO_NOT_SPECIALIZE_ON_ALIGNMENT, capability_of, cdiv
from openmla.backends.triton._index import (
    Chunk,
    Pages,
    Queries,
    Scoring,
    Stored,
    fill_columns,
    load_queries,
    load_weights,
    score_paged_keys,
)
from openmla.backends.triton._index_tiles import (
    FP8,
    TOKENS,
    Config,
    PagedInputs,
    Shape,
    keys_aligned,
    keys_per_program,
    paged_arguments,
    paged_constants,
    paged_shape,
    stored_types,
    why_not_index,
)
from openmla.backends.triton._prepare import Launch
from openmla.backends.triton._primitives import request_of
from openmla.backends.triton._spec import Case, Fixed, KernelSpec, case

LAUNCHES = 1


@triton.jit(
    do_not_specialize=["T", "B", "N", "num_keys", "table_stride"],
    do_not_specialize_on_alignment=[*DO_NOT_SPECIALIZE_ON_ALIGNMENT, "table"],
)
def _index_logits_kernel(
    out, q, w, cache, table, query_start_loc, row_lens,
    T, B, N, num_keys, keys_per_program, q_token, q_head, w_token, page, row_stride, table_stride,
    HI: tl.constexpr, DI: tl.constexpr, BS: tl.constexpr, FORMAT: tl.constexpr, SLICE: tl.constexpr,
    SCALES: tl.constexpr, ALIGNED: tl.constexpr, ONE_BLOCK: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, FILL: tl.constexpr,
    PRECISION: tl.constexpr, HOLD: tl.constexpr, ASM: tl.constexpr, UPCAST: tl.constexpr,
    STAGES: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    STORED: tl.constexpr = Stored(BS, FORMAT, ONE_BLOCK, BLOCK_N)
    SCORING: tl.constexpr = Scoring(
        HI, DI, SLICE, SCALES, ALIGNED, BLOCK_Q, BLOCK_H, BLOCK_D, PRECISION, HOLD, ASM, UPCAST,
        dtype,
    )  # fmt: skip
    first = tl.program_id(0) * BLOCK_Q
    lo = tl.program_id(1) * keys_per_program
    hi = tl.minimum(lo + keys_per_program, num_keys)
    offs_n = tl.arange(0, BLOCK_N)
    t = first + tl.arange(0, BLOCK_Q)
    lens = tl.load(row_lens + t, mask=t < T, other=0)
    row = out + t.to(tl.int64) * num_keys
    written = tl.zeros([BLOCK_Q], tl.int32) + lo  # columns before this one are
    end = tl.minimum(first + BLOCK_Q, tl.load(query_start_loc + B))
    if (first < end) & (lo < tl.max(lens, 0)):
        queries = Queries(q, q_token, q_head, w, w_token, first, T)
        chunk = Chunk(load_queries(queries, 0, 0, SCORING), load_weights(queries, 0, SCORING))
        last = request_of(end - 1, query_start_loc, B)
        for b in range(request_of(first, query_start_loc, B), last + 1):
            owned = (t >= tl.load(query_start_loc + b)) & (t < tl.load(query_start_loc + b + 1))
            stop = tl.minimum(tl.max(tl.where(owned, lens, 0), 0), hi)
            blocks = table + tl.cast(b, tl.int64) * table_stride
            pages = Pages(cache, N, page, row_stride, blocks)
            for start in tl.range(lo, stop, BLOCK_N, num_stages=STAGES):
                j = start + offs_n
                scores = score_paged_keys(pages, start, j, stop, queries, chunk, STORED, SCORING)
                logits = tl.where(j[:, None] < lens[None, :], scores, float("-inf"))
                mask = (j < hi)[:, None] & owned[None, :]
                tl.store(row[None, :] + j[:, None], logits, mask=mask)
            reached = lo + tl.cdiv(tl.maximum(stop - lo, 0), BLOCK_N) * BLOCK_N
            written = tl.where(owned, reached, written)
    fill_columns(out, t, T, written, hi, num_keys, BLOCK_Q, FILL)


def why_not(problem: Problem) -> str | None:
    return why_not_index(problem)


def kernel_for(problem: Problem) -> Variant:
    return Variant(partial(run, fixed=problem.batch_invariant))


def kernel_of(problem: Problem) -> str:
    return "one tile" if problem.batch_invariant else ""


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
    fixed: bool = False,  # a prompt's tile, however few tokens there are
) -> Tensor:
    T, HI, DI = q_idx.shape
    N, BS, _ = cache.shape
    B = block_table.shape[0]
    out = q_idx.new_empty((T, num_keys), dtype=torch.float32)
    if T == 0 or num_keys == 0:
        return out
    shape, config, launch = schedule_of(
        q_idx.dtype, format, HI, DI, BS, TOKENS if fixed else cdiv(T, max(B, 1)),
        capability_of(q_idx.device), aligned=keys_aligned(cache, format, DI),
    )  # fmt: skip
    tiles = cdiv(T, launch.fixed["BLOCK_Q"])
    keys = keys_per_program(num_keys, tiles, config, q_idx.device)
    inputs = PagedInputs(q_idx, w_idx, cache, block_table, query_start_loc, row_lens)
    tensors, strides = paged_arguments(inputs, shape)
    launch(
        (tiles, cdiv(num_keys, keys)),
        out,
        *tensors,
        T,
        B,
        N,
        num_keys,
        keys,
        *strides,
    )
    return out


@lru_cache(maxsize=1024)
def schedule_of(
    dtype: torch.dtype, format: str, HI: int, DI: int, BS: int, tokens: int, capability: int, *,
    aligned: bool,
) -> tuple[Shape, Config, Launch]:  # fmt: skip
    """For so many tokens of a request."""
    shape = paged_shape(dtype, format, HI, DI, capability)
    args = shape, format, BS, tokens, capability
    return shape, SPEC.fix(*args, aligned=aligned).tile, SPEC.launch(*args, aligned=aligned)


def fix(
    shape: Shape, format: str, BS: int, tokens: int, capability: int, *, aligned: bool
) -> Fixed:  # fmt: skip
    config, constants = paged_constants(shape, format, BS, tokens, capability, aligned=aligned)
    return Fixed(constants, config.num_warps, constants["STAGES"], tile=config)


def cases(capability: int) -> Iterator[Case]:
    """The models' heads: decode and many tokens, fp8, bf16 and float32 keys, two block sizes."""
    found = [(FP8, "index_fp8", HI, 64, tokens) for HI in (64, 32) for tokens in (1, 2, 2048)]
    found += [(FP8, "index_fp8", 64, 32, tokens) for tokens in (1, 2048)]
    found += [
        (dtype, format, 64, 64, tokens)
        for dtype, format in (
            (torch.bfloat16, "index_fp8"), (torch.bfloat16, "index_bf16"),
            (torch.float32, "index_fp32"),
        )
        for tokens in (1, 2048)
    ]  # fmt: skip
    for dtype, format, HI, BS, tokens in found:
        shape = paged_shape(dtype, format, HI, 128, capability)
        yield case(
            f"logits-{format}-{str(dtype)[6:]}-HI{HI}-DI128-BS{BS}-n{tokens}", shape, format, BS,
            tokens, capability, aligned=True, types=stored_types(dtype, format, shape),
        )  # fmt: skip


SPEC = KernelSpec(
    _index_logits_kernel,
    fix,
    types={"*fp32": "out w", "*i32": "table query_start_loc row_lens"},
    cases=cases,
    fp_fusion=True,
)
SPECS = (SPEC,)
