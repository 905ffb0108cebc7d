"""index_write, Triton: normalize, rotate and quantise indexer keys, store them in their slots.

Computes  k = LayerNorm(k_raw[i]), R columns rotated by positions[i], times the Hadamard matrix if
          asked for, all in float32; cache[slot // BS, slot % BS] = encode(k), byte for byte as
          cache/format.py encodes it (specification: ops/index_write.py)
Grid      (T',): one program owns one key.
Reads     k_raw [T, DI], norm_weight [DI], norm_bias [DI], positions [T'], table [Q, R],
          slot_mapping [T']
Writes    cache [N, BS, W]
Limits    see why_not()
"""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor

from openmla.backends import Problem
from openmla.backends.triton._build import DO_NOT_SPECIALIZE_ON_ALIGNMENT
from openmla.backends.triton._cache_rows import (
    FLOAT32_BYTES,
    INPUTS,
    is_aligned,
    layout_of,
    quantize_groups,
    row_constants,
    row_offsets,
    row_warps,
    stored_type,
)
from openmla.backends.triton._primitives import (
    PLAIN,
    hadamard_transform,
    rotate_in_row,
    round_to,
    store_bits,
    widen,
)
from openmla.backends.triton._spec import Case, Fixed, KernelSpec, case

LAUNCHES = 1


@triton.jit
def normalize(k_raw, weight, bias, d, mask, mean, std):
    """Columns d of the normalized key, zeros outside the mask."""
    centred = widen(tl.load(k_raw + d, mask=mask, other=0.0)) - mean
    scaled = tl.div_rn(centred, std) * widen(tl.load(weight + d, mask=mask, other=0.0))
    return tl.where(mask, scaled + widen(tl.load(bias + d, mask=mask, other=0.0)), 0.0)


@triton.jit(do_not_specialize=["N"], do_not_specialize_on_alignment=DO_NOT_SPECIALIZE_ON_ALIGNMENT)
def _index_write_kernel(
    cache, k_raw, norm_weight, norm_bias, positions, table, slot_mapping,
    eps, page, row_stride, k_raw_stride, position_stride, table_stride, slot_stride, N,
    BS: tl.constexpr, FORMAT: tl.constexpr, DI: tl.constexpr, GROUP: tl.constexpr,
    SCALES: tl.constexpr, EXACT: tl.constexpr, ALIGNED: tl.constexpr, R: tl.constexpr,
    ROPE_START: tl.constexpr, PAIRS: tl.constexpr, HADAMARD: tl.constexpr, LOG2: tl.constexpr,
    ASM: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    if ASM:  # inside a compiled graph it may arrive as fp64; interpreted, as a Python number
        eps = eps.to(tl.float32)
    i = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + i * slot_stride)
    if (slot >= 0) & (slot // BS < N):
        k_raw += i * k_raw_stride
        g = tl.arange(0, BLOCK_G)
        c = tl.arange(0, BLOCK_C)
        d = (g * GROUP)[:, None] + c[None, :]  # [BLOCK_G, BLOCK_C]
        mask = (g < DI // GROUP)[:, None] & (c < GROUP)[None, :]
        raw = widen(tl.load(k_raw + d, mask=mask, other=0.0))
        mean = tl.div_rn(tl.sum(tl.sum(raw, 1), 0), DI * 1.0)
        centred = tl.where(mask, raw - mean, 0.0)
        variance = tl.div_rn(tl.sum(tl.sum(centred * centred, 1), 0), DI * 1.0)
        std = tl.sqrt_rn(variance + eps)
        k = normalize(k_raw, norm_weight, norm_bias, d, mask, mean, std)
        if R > 0:
            HALF: tl.constexpr = R // 2
            r = d - ROPE_START
            rotated = mask & (r >= 0) & (r < R)
            if PAIRS:
                is_second = r % 2 == 1
                angle = r // 2
                partner = tl.where(is_second, d - 1, d + 1)
            else:
                is_second = r >= HALF
                angle = tl.where(is_second, r - HALF, r)
                partner = tl.where(is_second, d - HALF, d + HALF)
            other = normalize(k_raw, norm_weight, norm_bias, partner, rotated, mean, std)
            row = table + tl.load(positions + i * position_stride) * table_stride
            cos = tl.load(row + angle, mask=rotated, other=0.0)
            sin = tl.load(row + HALF + angle, mask=rotated, other=0.0)
            k = rotate_in_row(k, other, cos, sin, is_second, rotated)
        if HADAMARD:
            k = hadamard_transform(tl.reshape(k, [BLOCK_G * BLOCK_C]), LOG2)
            k = tl.reshape(k, [BLOCK_G, BLOCK_C])
        values_at, scales_at, _ = row_offsets(
            slot // BS, slot % BS, page, row_stride, BS, FORMAT, DI, 0, SCALES
        )
        if FORMAT == PLAIN:
            stored = round_to(k, cache.dtype.element_ty, ASM)
        else:
            stored, scale_bits = quantize_groups(k, FORMAT, EXACT)
            store_bits(cache + scales_at, scale_bits, g < DI // GROUP, FLOAT32_BYTES, ALIGNED)
        tl.store(cache + values_at + d, stored, mask=mask)


def why_not(problem: Problem) -> str | None:
    if problem.dtype not in INPUTS:
        return f"takes 16- and 32-bit keys, this is {problem.dtype}"
    return None


def run(
    cache: Tensor,
    k_raw: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    positions: Tensor,
    table: Tensor,
    slot_mapping: Tensor,
    *,
    format: str,
    eps: float,
    pairing: str,
    rope_start: int,
    hadamard: bool,
) -> None:
    N, BS, _ = cache.shape
    DI, R = k_raw.shape[1], table.shape[1]
    if slot_mapping.shape[0] == 0 or DI == 0:
        return
    aligned = is_aligned(cache, layout_of(format, DI, cut=DI))
    launch = SPEC.launch(format, DI, R, BS, rope_start, pairing, hadamard, aligned=aligned)
    launch(
        (slot_mapping.shape[0],),
        cache,
        k_raw,
        norm_weight,
        norm_bias,
        positions,
        table,
        slot_mapping,
        eps,
        cache.stride(0),
        cache.stride(1),
        k_raw.stride(0),
        positions.stride(0),
        table.stride(0),
        slot_mapping.stride(0),
        N,
    )


def fix(
    format: str, DI: int, R: int, BS: int, rope_start: int, pairing: str, hadamard: bool, *,
    aligned: bool,
) -> Fixed:  # fmt: skip
    constants = row_constants(layout_of(format, DI, cut=DI), 0, BS, aligned=aligned)
    warps = row_warps(constants)
    for name in ("C", "MAIN", "ROPE", "BLOCK_R"):
        del constants[name]
    constants |= {
        "DI": DI,
        "R": R,
        "ROPE_START": rope_start,
        "PAIRS": pairing == "pairs",
        "HADAMARD": hadamard,
        "LOG2": DI.bit_length() - 1,
    }
    return Fixed(constants, warps)


def cases(_: int) -> Iterator[Case]:
    """Keys of 128 in every format, rotated as the models do."""
    formats = ("index_fp8", "index_fp8_exact", "index_bf16")
    both = [(format, pairing, False) for format in formats for pairing in ("halves", "pairs")]
    for format, pairing, hadamard in (*both, ("index_fp8", "halves", True)):
        yield case(
            f"index-write-{format}-{pairing}{'-hadamard' * hadamard}", format, 128, 64, 64, 0,
            pairing, hadamard, aligned=True, types={"cache": stored_type(format)},
        )  # fmt: skip


SPEC = KernelSpec(
    _index_write_kernel,
    fix,
    types={
        "*bf16": "k_raw",
        "*fp32": "norm_weight norm_bias table",
        "*i64": "positions slot_mapping",
        "fp32": "eps",
    },
    cases=cases,
    fp_fusion=False,  # a key's bytes must not depend on how the compiler contracts
)
SPECS = (SPEC,)
