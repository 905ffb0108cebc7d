"""latent_write, Triton: one launch normalises, rotates and stores a step's rows and turns queries.

Computes  kv[i] and q[i] in place, then encode(kv[i]) into its slot
          (specification: ops/latent_write.py; numbers: backends/reference/latent_write.py)
Grid      (T', 1 + cdiv(H, BLOCK_H)): one program owns a token's latent row, the others BLOCK_H of
          its heads each
Reads     q [T, H, E], kv [T, D], norm_weight [C], table [Q, R], positions and slots [T']
Writes    q and kv in place, the slots' bytes

A row is read back after a barrier to be stored: cache_write's own function encodes it then, and
what is in the cache is what is in kv.
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
    TYPES,
    Build,
    cdiv,
    interpreted,
    next_power_of_2,
)
from openmla.backends.triton.cache_write import round_to, store_row, widen
from openmla.cache.format import get_format

LAUNCHES = 1
FP_FUSION = False  # a row's bytes do not depend on what else was compiled
ELEMENTS = 4096  # of a row
QUERIES = 1024  # elements of a tile of heads: a program has more heads at the price of time alone


@triton.jit
def finish(
    at, there, weight, table, eps, factor,
    WIDTH: tl.constexpr, NORMED: tl.constexpr, R: tl.constexpr, PAIRS: tl.constexpr,
    WEIGHTED: tl.constexpr, ASM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Rows at `at` in place: the first NORMED of WIDTH columns normalised, the last R turned. What
    turns is held as the two halves of its pairs; the others are columns 0 .. WIDTH - R - 1, of
    which those past NORMED are not touched."""
    dtype: tl.constexpr = at.dtype.element_ty
    PLAIN: tl.constexpr = WIDTH - R
    HELD: tl.constexpr = NORMED if NORMED < PLAIN else PLAIN
    c = tl.arange(0, BLOCK)[None, :]
    pair = tl.arange(0, BLOCK_R)[None, :]
    if PAIRS:
        first_at = PLAIN + 2 * pair
        second_at = first_at + 1
    else:
        first_at = PLAIN + pair
        second_at = first_at + R // 2
    mask = there[:, None] & (c < HELD)
    mask_r = there[:, None] & (pair < R // 2)
    first = widen(tl.load(at[:, None] + first_at, mask=mask_r, other=0.0))
    second = widen(tl.load(at[:, None] + second_at, mask=mask_r, other=0.0))
    if NORMED > 0:
        values = widen(tl.load(at[:, None] + c, mask=mask, other=0.0))
        squares = tl.sum(values * values, 1)
        if NORMED > PLAIN:
            squares += tl.sum(first * first, 1) + tl.sum(second * second, 1)
        share = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(squares, NORMED) + eps))[:, None]
        values = round_to(values * share, dtype, ASM)
        if WEIGHTED:
            values = weigh(values, weight, c, c < HELD, factor, ASM)
        if NORMED > PLAIN:
            first = round_to(first * share, dtype, ASM)
            second = round_to(second * share, dtype, ASM)
            if WEIGHTED:
                first = weigh(first, weight, first_at, pair < R // 2, factor, ASM)
                second = weigh(second, weight, second_at, pair < R // 2, factor, ASM)
            first = widen(first)
            second = widen(second)
        tl.store(at[:, None] + c, values, mask=mask)
    if R > 0:
        cos = tl.load(table + pair, mask=pair < R // 2, other=0.0).to(tl.float32)
        sin = tl.load(table + R // 2 + pair, mask=pair < R // 2, other=0.0).to(tl.float32)
        turned = round_to(first * cos - second * sin, dtype, ASM)
        tl.store(at[:, None] + first_at, turned, mask=mask_r)
        turned = round_to(second * cos + first * sin, dtype, ASM)
        tl.store(at[:, None] + second_at, turned, mask=mask_r)


@triton.jit
def weigh(values, weight, columns, mask, factor, ASM: tl.constexpr):
    """Times the norm's weight, then the factor, each rounded."""
    weights = widen(tl.load(weight + columns, mask=mask, other=0.0))
    weighted = round_to(widen(values) * weights, values.dtype, ASM)
    return tl.where(factor == 1.0, weighted, round_to(widen(weighted) * factor, values.dtype, ASM))


@triton.jit(do_not_specialize=["N"], do_not_specialize_on_alignment=DO_NOT_SPECIALIZE_ON_ALIGNMENT)
def _latent_write_kernel(
    cache, q, kv, norm_weight, positions, slot_mapping, kv_scale, table,
    page, row_stride, q_token, q_head, kv_c_stride, table_stride, position_stride, slot_stride,
    N, eps, factor,
    H: tl.constexpr, E: tl.constexpr, D: tl.constexpr, NORMED: tl.constexpr,
    NORMED_Q: tl.constexpr, R: tl.constexpr, PAIRS: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_TURNED: tl.constexpr,
    BS: tl.constexpr, C: tl.constexpr, KIND: tl.constexpr, MAIN: tl.constexpr, ROPE: tl.constexpr,
    GROUP: tl.constexpr, SCALES: tl.constexpr, EXACT: tl.constexpr, ALIGNED: tl.constexpr,
    ASM: tl.constexpr, UPCAST: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr,
):  # fmt: skip
    i, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if not UPCAST:  # inside a compiled graph they may arrive as fp64; interpreted, as Python's
        eps = eps.to(tl.float32)
        factor = factor.to(tl.float32)
    if R > 0:
        table += tl.load(positions + i * position_stride) * table_stride
    if part == 0:
        row = kv + i * kv_c_stride
        one = tl.arange(0, 1)
        finish(
            row + one, one == 0, norm_weight, table, eps, factor, D, NORMED, R, PAIRS, True, ASM,
            BLOCK_D, BLOCK_TURNED,
        )  # fmt: skip
        slot = tl.load(slot_mapping + i * slot_stride)
        tl.debug_barrier()
        if (slot >= 0) & (slot // BS < N):
            store_row(
                cache, row, row + C, slot, kv_scale, page, row_stride, BS, C, KIND, MAIN, ROPE,
                GROUP, SCALES, EXACT, ALIGNED, ASM, BLOCK_G, BLOCK_C, BLOCK_R,
            )  # fmt: skip
    else:
        heads = (part - 1) * BLOCK_H + tl.arange(0, BLOCK_H)
        finish(
            q + i * q_token + heads * q_head, heads < H, norm_weight, table, eps, factor, E,
            NORMED_Q, R, PAIRS, False, ASM, BLOCK_E, BLOCK_TURNED,
        )  # fmt: skip


def why_not(problem: Problem) -> str | None:
    if problem.E > ELEMENTS or problem.D > ELEMENTS:
        return f"holds rows of up to {ELEMENTS} values, these are {problem.D} and {problem.E}"
    return cache_write.why_not(problem)


def run(
    cache: Tensor,
    q: Tensor,
    kv: Tensor,
    norm_weight: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    kv_scale: Tensor,
    table: Tensor | None,
    *,
    format: str,
    pairing: str,
    eps: float,
    factor: float,
    norm_queries: bool,
) -> None:
    n, (_, H, E), D = slot_mapping.shape[0], q.shape, kv.shape[1]
    if n == 0:
        return
    R = 0 if table is None else table.shape[1]
    constants = constants_of(
        format, H, E, D, R, norm_weight.shape[0], cache.shape[1], pairing, norm_queries,
        aligned=cache_write.is_aligned(cache, cache_write.layout_of(format, D, cut=D)),
    )  # fmt: skip
    turning = H if R or norm_queries else 0
    _latent_write_kernel[(n, 1 + cdiv(turning, constants["BLOCK_H"]))](
        cache.view(torch.uint8) if format == "fp8" else cache,
        q,
        kv,
        norm_weight,
        positions,
        slot_mapping,
        kv_scale,
        kv_scale if table is None else table,
        cache.stride(0),
        cache.stride(1),
        q.stride(0),
        q.stride(1),
        kv.stride(0),
        0 if table is None else table.stride(0),
        positions.stride(0),
        slot_mapping.stride(0),
        cache.shape[0],
        eps,
        factor,
        **constants,
        num_warps=4,
        num_stages=1,
        enable_fp_fusion=FP_FUSION,
    )


def constants_of(
    format: str, H: int, E: int, D: int, R: int, normed: int, BS: int, pairing: str,
    norm_queries: bool, *, aligned: bool,
) -> dict[str, Any]:  # fmt: skip
    plain = next_power_of_2(max(E - R, 1)) if norm_queries else 1
    turned = next_power_of_2(max(R // 2, 1))
    layout = cache_write.layout_of(format, D, cut=D)
    stored = cache_write.constants_of(layout, D, BS, aligned=aligned)
    return {
        **stored,
        "H": H,
        "E": E,
        "D": D,
        "NORMED": normed,
        "NORMED_Q": E if norm_queries else 0,
        "R": R,
        "PAIRS": pairing == "pairs",
        "BLOCK_H": min(next_power_of_2(H), max(QUERIES // max(plain, 2 * turned), 1)),
        "BLOCK_E": plain,
        "BLOCK_D": next_power_of_2(max(D - R, 1)),
        "BLOCK_TURNED": turned,
        "UPCAST": interpreted(),
    }


def builds() -> Iterator[Build]:
    """V3's and V4's rows, each way they are stored."""
    for capability in TARGETS:
        for format in ("bf16", "fp8", "fp8_ds_mla"):
            yield write_build(capability, format, 128, 192, 576, 512, norm_queries=False)
        for format in ("bf16", "fp8_dsv4"):
            yield write_build(capability, format, 64, 512, 512, 512, norm_queries=True)


def write_build(
    capability: int, format: str, H: int, E: int, D: int, normed: int, *, norm_queries: bool,
    dtype: torch.dtype = torch.bfloat16,
) -> Build:  # fmt: skip
    constants = constants_of(format, H, E, D, 64, normed, 64, "pairs", norm_queries, aligned=True)
    types = {
        "cache": TYPES.get(get_format(format).dtype, "u8"),
        **dict.fromkeys(("q", "kv", "norm_weight"), TYPES[dtype]),
        **dict.fromkeys(("positions", "slot_mapping"), "i64"),
        **dict.fromkeys(("kv_scale", "table"), "fp32"),
    }
    scalars = dict.fromkeys(("eps", "factor"), "fp32")
    signature = {
        name: "constexpr"
        if name in constants
        else "*" + types[name]
        if name in types
        else scalars.get(name, "i32")
        for name in _latent_write_kernel.arg_names
    }
    name = f"latent-write-{format}-H{H}-E{E}"
    return Build(name, _latent_write_kernel, signature, constants, 4, 1, capability, FP_FUSION)
