"""latent_write, Triton: one launch normalizes, rotates and stores rows, and rotates queries.

Computes  kv[i] and q[i] in place, then encode(kv[i]) into its slot
          (specification: ops/latent_write.py; numbers: backends/reference/latent_write.py)
Grid      (T', 1 + cdiv(H, BLOCK_H)): one program owns a token's latent row, the others BLOCK_H of
          its heads each
Reads     q [T, H, E], kv [T, D], norm_weight [C], table [Q, R], positions and slots [T']
Writes    q and kv in place, the slots' bytes; clamped [], if COUNTED and a value was cut off

A finished row is read back after a barrier and encoded as cache_write would: the cache holds what
kv holds.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from openmla.backends import Problem
from openmla.backends.triton._build import (
    DO_NOT_SPECIALIZE_ON_ALIGNMENT,
    cdiv,
    interpreted,
    next_power_of_2,
)
from openmla.backends.triton._cache_rows import (
    Layout,
    Target,
    Writing,
    is_aligned,
    layout_of,
    row_constants,
    stored_type,
    why_not_rows,
    write_row,
)
from openmla.backends.triton._primitives import rotate_first, rotate_second, round_to, widen
from openmla.backends.triton._spec import Case, Fixed, KernelSpec, case
from openmla.cache.format import get_format

LAUNCHES = 1
ELEMENTS = 4096  # of a row, which one program holds in registers
QUERY_ELEMENTS = 1024  # of a tile of heads: larger tiles only make programs fewer and longer


@triton.jit
def finish(
    at, valid, weight, table, eps, factor,
    WIDTH: tl.constexpr, NORMED: tl.constexpr, R: tl.constexpr, PAIRS: tl.constexpr,
    WEIGHTED: tl.constexpr, ASM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Rows at `at` in place: the first NORMED of WIDTH columns normalized, the last R rotated.
    Those are held as the two halves of their pairs; of the others, columns past NORMED are not
    touched."""
    dtype: tl.constexpr = at.dtype.element_ty
    UNROTATED: tl.constexpr = WIDTH - R
    HELD: tl.constexpr = NORMED if NORMED < UNROTATED else UNROTATED
    c = tl.arange(0, BLOCK)[None, :]
    pair = tl.arange(0, BLOCK_R)[None, :]
    if PAIRS:
        first_at = UNROTATED + 2 * pair
        second_at = first_at + 1
    else:
        first_at = UNROTATED + pair
        second_at = first_at + R // 2
    mask = valid[:, None] & (c < HELD)
    mask_r = valid[:, None] & (pair < R // 2)
    first = widen(tl.load(at[:, None] + first_at, mask=mask_r, other=0.0))
    second = widen(tl.load(at[:, None] + second_at, mask=mask_r, other=0.0))
    if NORMED > 0:
        values = widen(tl.load(at[:, None] + c, mask=mask, other=0.0))
        squares = tl.sum(values * values, 1)
        if NORMED > UNROTATED:
            squares += tl.sum(first * first, 1) + tl.sum(second * second, 1)
        inverse_rms = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(squares, NORMED) + eps))[:, None]
        values = round_to(values * inverse_rms, dtype, ASM)
        if WEIGHTED:
            values = apply_weight(values, weight, c, c < HELD, factor, ASM)
        if NORMED > UNROTATED:
            first = round_to(first * inverse_rms, dtype, ASM)
            second = round_to(second * inverse_rms, dtype, ASM)
            if WEIGHTED:
                first = apply_weight(first, weight, first_at, pair < R // 2, factor, ASM)
                second = apply_weight(second, weight, second_at, pair < R // 2, factor, ASM)
            first = widen(first)
            second = widen(second)
        tl.store(at[:, None] + c, values, mask=mask)
    if R > 0:
        cos = tl.load(table + pair, mask=pair < R // 2, other=0.0).to(tl.float32)
        sin = tl.load(table + R // 2 + pair, mask=pair < R // 2, other=0.0).to(tl.float32)
        rotated = round_to(rotate_first(first, second, cos, sin), dtype, ASM)
        tl.store(at[:, None] + first_at, rotated, mask=mask_r)
        rotated = round_to(rotate_second(first, second, cos, sin), dtype, ASM)
        tl.store(at[:, None] + second_at, rotated, mask=mask_r)


@triton.jit
def apply_weight(values, weight, columns, mask, factor, ASM: tl.constexpr):
    """Times the norm's weight, then the factor, rounding after each."""
    weights = widen(tl.load(weight + columns, mask=mask, other=0.0))
    weighted = round_to(widen(values) * weights, values.dtype, ASM)
    return tl.where(factor == 1.0, weighted, round_to(widen(weighted) * factor, values.dtype, ASM))


@triton.jit(do_not_specialize=["N"], do_not_specialize_on_alignment=DO_NOT_SPECIALIZE_ON_ALIGNMENT)
def _latent_write_kernel(
    cache, q, kv, norm_weight, positions, slot_mapping, kv_scale, table, rope_ratio,
    clamped, page, row_stride, q_token, q_head, kv_c_stride, table_stride, position_stride,
    slot_stride, N, eps, factor,
    H: tl.constexpr, E: tl.constexpr, D: tl.constexpr, NORMED: tl.constexpr,
    NORMED_Q: tl.constexpr, R: tl.constexpr, PAIRS: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_PAIRS: tl.constexpr,
    BS: tl.constexpr, C: tl.constexpr, FORMAT: tl.constexpr, MAIN: tl.constexpr, ROPE: tl.constexpr,
    GROUP: tl.constexpr, SCALES: tl.constexpr, EXACT: tl.constexpr, ALIGNED: tl.constexpr,
    ASM: tl.constexpr, APART: tl.constexpr, COUNTED: tl.constexpr, UPCAST: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    LAYOUT: tl.constexpr = Layout(FORMAT, MAIN, ROPE, GROUP, SCALES, EXACT)
    WRITING: tl.constexpr = Writing(BS, ALIGNED, ASM, APART, COUNTED, BLOCK_G, BLOCK_C, BLOCK_R)
    target = Target(cache, page, row_stride, kv_scale, rope_ratio, clamped)
    i, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if not UPCAST:  # fp64 from a compiled graph; in the interpreter Python floats
        eps = eps.to(tl.float32)
        factor = factor.to(tl.float32)
    if R > 0:
        table += tl.load(positions + i * position_stride) * table_stride
    if part == 0:
        row = kv + i * kv_c_stride
        one = tl.arange(0, 1)
        finish(
            row + one, one == 0, norm_weight, table, eps, factor, D, NORMED, R, PAIRS, True, ASM,
            BLOCK_D, BLOCK_PAIRS,
        )  # fmt: skip
        slot = tl.load(slot_mapping + i * slot_stride)
        tl.debug_barrier()
        if (slot >= 0) & (slot // BS < N):
            write_row(target, row, row + C, slot, C, LAYOUT, WRITING)
    else:
        heads = (part - 1) * BLOCK_H + tl.arange(0, BLOCK_H)
        finish(
            q + i * q_token + heads * q_head, heads < H, norm_weight, table, eps, factor, E,
            NORMED_Q, R, PAIRS, False, ASM, BLOCK_E, BLOCK_PAIRS,
        )  # fmt: skip


def why_not(problem: Problem) -> str | None:
    if problem.E > ELEMENTS or problem.D > ELEMENTS:
        return f"holds rows of up to {ELEMENTS} values, these are {problem.D} and {problem.E}"
    return why_not_rows(problem)


def run(
    cache: Tensor,
    q: Tensor,
    kv: Tensor,
    norm_weight: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    kv_scale: Tensor,
    table: Tensor | None,
    rope_ratio: Tensor | None,
    clamped: Tensor | None,
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
    launch = SPEC.launch(
        format, H, E, D, R, norm_weight.shape[0], cache.shape[1], pairing, norm_queries,
        aligned=is_aligned(cache, layout_of(format, D, cut=D)),
        apart=rope_ratio is not None, counted=clamped is not None,
    )  # fmt: skip
    heads = H if R or norm_queries else 0  # that need a program
    launch(
        (n, 1 + cdiv(heads, launch.fixed["BLOCK_H"])),
        cache.view(torch.uint8) if format == "fp8" else cache,
        q,
        kv,
        norm_weight,
        positions,
        slot_mapping,
        kv_scale,
        kv_scale if table is None else table,
        kv_scale if rope_ratio is None else rope_ratio,
        kv_scale if clamped is None else clamped,
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
    )


def fix(
    format: str, H: int, E: int, D: int, R: int, normed: int, BS: int, pairing: str,
    norm_queries: bool, *, aligned: bool, apart: bool, counted: bool,
) -> Fixed:  # fmt: skip
    unrotated = next_power_of_2(max(E - R, 1)) if norm_queries else 1
    pairs = next_power_of_2(max(R // 2, 1))
    # the part under a ratio must begin where a part of the row does
    layout = layout_of(format, D, cut=normed if apart else D)
    stored = row_constants(layout, D, BS, aligned=aligned)
    return Fixed(
        {
            **stored,
            "H": H,
            "E": E,
            "D": D,
            "NORMED": normed,
            "NORMED_Q": E if norm_queries else 0,
            "R": R,
            "PAIRS": pairing == "pairs",
            "BLOCK_H": min(next_power_of_2(H), max(QUERY_ELEMENTS // max(unrotated, 2 * pairs), 1)),
            "BLOCK_E": unrotated,
            "BLOCK_D": next_power_of_2(max(D - R, 1)),
            "BLOCK_PAIRS": pairs,
            "APART": apart,
            "COUNTED": counted,
            "UPCAST": interpreted(),
        }
    )


def cases(_: int) -> Iterator[Case]:
    """V3's and V4's rows, in each of their formats."""
    for H, E, D, norm_queries, formats in (
        (128, 192, 576, False, ("bf16", "fp8", "fp8_ds_mla")),
        (64, 512, 512, True, ("bf16", "fp8_dsv4")),
    ):
        for format in formats:
            scaled = get_format(format).scaled
            yield case(
                f"latent-write-{format}-H{H}-E{E}", format, H, E, D, 64, 512, 64, "pairs",
                norm_queries, aligned=True, apart=scaled, counted=scaled,
                types={"cache": stored_type(format)},
            )  # fmt: skip


SPEC = KernelSpec(
    _latent_write_kernel,
    fix,
    types={
        "*bf16": "q kv norm_weight",
        "*i64": "positions slot_mapping clamped",
        "*fp32": "kv_scale table rope_ratio",
        "fp32": "eps factor",
    },
    cases=cases,
    fp_fusion=False,  # a row's bytes must not depend on how the compiler contracts
)
SPECS = (SPEC,)
