"""index_logits_ragged, Triton: scores of the lightning indexer over packed keys.

Computes  out[t, j] = k_scale[j] * sum over h of w[t, h] * relu(q[t, h] . k[j]) for starts[t] <= j
          < ends[t], -inf elsewhere (specification: ops/index_logits_ragged.py)
Grid      (cdiv(T, BLOCK_Q), X): one program owns BLOCK_Q tokens and one run of columns. It scores
          the keys from the first to the last that any of its tokens sees.
Reads     q_idx [T, HI, DI], w_idx [T, HI], k_idx [S, DI], k_scale [S], starts [T], ends [T]
Writes    out [T, S], every column once
Limits    see why_not()
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from openmla.backends import Problem
from openmla.backends.triton._build import DO_NOT_SPECIALIZE_ON_ALIGNMENT, capability_of, cdiv
from openmla.backends.triton._index import (
    Chunk,
    Queries,
    Scoring,
    fill_columns,
    load_queries,
    load_weights,
    score_keys,
)
from openmla.backends.triton._index_tiles import (
    FP8,
    Shape,
    as_stored,
    keys_per_program,
    shape_of,
    stored_type,
    tile_of,
    why_not_index,
)
from openmla.backends.triton._spec import Case, Fixed, KernelSpec, case

LAUNCHES = 1


@triton.jit(
    do_not_specialize=["T", "S"], do_not_specialize_on_alignment=DO_NOT_SPECIALIZE_ON_ALIGNMENT
)
def _index_logits_ragged_kernel(
    out, q, w, k, k_scale, starts, ends,
    T, S, keys_per_program, q_token, q_head, w_token, row_stride,
    HI: tl.constexpr, DI: tl.constexpr, SLICE: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, FILL: tl.constexpr,
    PRECISION: tl.constexpr, HOLD: tl.constexpr, ASM: tl.constexpr, UPCAST: tl.constexpr,
    STAGES: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    SCORING: tl.constexpr = Scoring(
        HI, DI, SLICE, 1, True, BLOCK_Q, BLOCK_H, BLOCK_D, PRECISION, HOLD, ASM, UPCAST,
        dtype,
    )  # fmt: skip
    first = tl.program_id(0) * BLOCK_Q
    lo = tl.program_id(1) * keys_per_program
    hi = tl.minimum(lo + keys_per_program, S)
    offs_n = tl.arange(0, BLOCK_N)
    t = first + tl.arange(0, BLOCK_Q)
    begin = tl.load(starts + t, mask=t < T, other=0)
    end = tl.load(ends + t, mask=t < T, other=0)
    nonempty = begin < end
    row = out + t.to(tl.int64) * S
    lowest = tl.maximum(tl.min(tl.where(nonempty, begin, S), 0), lo)
    stop = tl.minimum(tl.max(tl.where(nonempty, end, 0), 0), hi)
    from_tile = lo
    to_tile = lo
    if lowest < stop:
        from_tile = lo + (lowest - lo) // BLOCK_N * BLOCK_N
        to_tile = from_tile + tl.cdiv(stop - from_tile, BLOCK_N) * BLOCK_N
        queries = Queries(q, q_token, q_head, w, w_token, first, T)
        chunk = Chunk(load_queries(queries, 0, 0, SCORING), load_weights(queries, 0, SCORING))
        for start in tl.range(from_tile, stop, BLOCK_N, num_stages=STAGES):
            j = start + offs_n
            key = tl.minimum(j, S - 1)
            keys_at = k + key.to(tl.int64) * row_stride
            scores = score_keys(keys_at, None, None, queries, chunk, SCORING)
            scores *= tl.load(k_scale + key)[:, None]
            inside = (j[:, None] >= begin[None, :]) & (j[:, None] < end[None, :])
            mask = (j < hi)[:, None] & (t < T)[None, :]
            tl.store(row[None, :] + j[:, None], tl.where(inside, scores, float("-inf")), mask=mask)
    zeros = tl.zeros([BLOCK_Q], tl.int32)
    fill_columns(out, t, T, zeros + lo, from_tile, S, BLOCK_Q, FILL)
    fill_columns(out, t, T, zeros + to_tile, hi, S, BLOCK_Q, FILL)


def why_not(problem: Problem) -> str | None:
    return why_not_index(problem)


def run(
    q_idx: Tensor, w_idx: Tensor, k_idx: Tensor, k_scale: Tensor, starts: Tensor, ends: Tensor
) -> Tensor:
    T, HI, DI = q_idx.shape
    S = k_idx.shape[0]
    out = q_idx.new_empty((T, S), dtype=torch.float32)
    if T == 0 or S == 0:
        return out
    if k_idx.dtype == torch.float64:  # as the reference does
        k_idx = k_idx.to(torch.float32)
    capability = capability_of(q_idx.device)
    shape = shape_of(q_idx.dtype, k_idx.dtype, HI, DI, 1, capability)
    fixed = SPEC.fix(shape, T, capability)
    tiles = cdiv(T, fixed.constants["BLOCK_Q"])
    keys = keys_per_program(S, tiles, fixed.tile, q_idx.device)
    SPEC.launch(shape, T, capability)(
        (tiles, cdiv(S, keys)),
        out,
        as_stored(q_idx, shape),
        w_idx,
        as_stored(k_idx, shape),
        k_scale.contiguous(),
        starts.contiguous(),
        ends.contiguous(),
        T,
        S,
        keys,
        q_idx.stride(0),
        q_idx.stride(1),
        w_idx.stride(0),
        k_idx.stride(0),
    )
    return out


def fix(shape: Shape, tokens: int, capability: int) -> Fixed:
    config, constants = tile_of(shape, tokens, chain=1, gathered=False, capability=capability)
    return Fixed(constants, config.num_warps, constants["STAGES"], tile=config)


def cases(capability: int) -> Iterator[Case]:
    """The models' heads in fp8 and bf16, many tokens and one."""
    bf16, fp32 = torch.bfloat16, torch.float32
    for dtype, HI, tokens in (
        (FP8, 64, 2048), (FP8, 32, 2048), (FP8, 64, 1), (bf16, 64, 2048), (bf16, 32, 2048),
        (bf16, 64, 1), (fp32, 64, 2048),
    ):  # fmt: skip
        shape = shape_of(dtype, dtype, HI, 128, 1, capability)
        stored = "*" + stored_type(dtype, shape)
        name = f"ragged-{str(dtype)[6:]}-HI{HI}-DI128-n{tokens}"
        yield case(name, shape, tokens, capability, types={"q": stored, "k": stored})


SPEC = KernelSpec(
    _index_logits_ragged_kernel,
    fix,
    types={"*fp32": "out w k_scale", "*i32": "starts ends"},
    cases=cases,
    fp_fusion=True,
)
SPECS = (SPEC,)
