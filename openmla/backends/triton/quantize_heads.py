"""quantize_heads, Triton: quantize expanded heads to e4m3 in one pass.

Computes  values, row_scale (specification: ops/quantize_heads.py)
Grid      (cdiv(S, BLOCK_S) * H,): one program owns BLOCK_S rows of a head; programs of the same
          rows are adjacent, like their heads in memory.
Reads     x [S, H, P], shared [S, R], head_scale [B, H], requests [S]
Writes    values [S, H, P + R], row_scale [S, H]
Limits    see why_not()

P is split into a power of two and the rest, so that 192 columns are 128 and 64.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from openmla.backends import Problem
from openmla.backends.triton._build import GFX942, assembly, capability_of, cdiv, next_power_of_2
from openmla.backends.triton._prepare import Piece
from openmla.backends.triton._primitives import decode_e4m3, widen
from openmla.backends.triton._quantize import E4M3_MAX, FIRST_CVT, encode_fp8
from openmla.backends.triton._spec import Case, Fixed, KernelSpec, case

LAUNCHES = 1
BLOCK_S = 16  # rows per program
BLOCK_KEYS = 64  # rows per program if values are contiguous along rows: bytes stored together
SMALLEST = tl.constexpr(2.0**-60)  # lower bound of a row's largest magnitude
E4M3 = torch.float8_e4m3fn


@triton.jit
def load_columns(at, row_mask, FIRST: tl.constexpr, USED: tl.constexpr, BLOCK: tl.constexpr):
    """Load columns of rows at `at` as float32; bytes are e4m3."""
    c = tl.arange(0, BLOCK)
    mask = row_mask[:, None] & (c < USED)[None, :]
    stored = tl.load(at[:, None] + (FIRST + c)[None, :], mask=mask, other=0)
    if stored.dtype == tl.uint8:
        wide = decode_e4m3(stored, tl.float32, False)
    else:
        wide = widen(stored)
    return wide


@triton.jit
def largest(tile):
    """Return the largest magnitude of each row as bits, which order NaN above all."""
    magnitudes = tile.to(tl.uint32, bitcast=True) & 0x7FFFFFFF
    return tl.max(magnitudes, 1)


@triton.jit
def store_columns(
    at, row_mask, tile, factor, column_stride, FIRST: tl.constexpr, USED: tl.constexpr,
    BLOCK: tl.constexpr, CVT: tl.constexpr,
):  # fmt: skip
    c = tl.arange(0, BLOCK)
    codes = encode_fp8(tile * factor[:, None], CVT)
    mask = row_mask[:, None] & (c < USED)[None, :]
    tl.store(at[:, None] + ((FIRST + c).to(tl.int64) * column_stride)[None, :], codes, mask=mask)


@triton.jit(do_not_specialize=["S"])
def _quantize_heads_kernel(
    values, row_scale, x, shared, head_scale, requests, S, x_token, x_head, shared_token,
    values_token, values_head, values_column, scale_token, scale_head,
    H: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr, R: tl.constexpr,
    BY_ROW: tl.constexpr, CVT: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_FIRST: tl.constexpr,
    BLOCK_REST: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    h = (program % H).to(tl.int64)
    s = program // H * BLOCK_S + tl.arange(0, BLOCK_S)
    valid = s < S
    x_at = x + s.to(tl.int64) * x_token + h * x_head
    first = load_columns(x_at, valid, 0, FIRST, BLOCK_FIRST)
    rest = first
    same = first
    if REST > 0:
        rest = load_columns(x_at, valid, FIRST, REST, BLOCK_REST)
    if R > 0:
        shared_at = shared + s.to(tl.int64) * shared_token
        same = load_columns(shared_at, valid, 0, R, BLOCK_R)
    if BY_ROW:
        bits = largest(first)
        if REST > 0:
            bits = tl.maximum(bits, largest(rest))
        if R > 0:
            bits = tl.maximum(bits, largest(same))
        most = bits.to(tl.float32, bitcast=True)
        scale = tl.div_rn(tl.where(most < SMALLEST, SMALLEST, most), E4M3_MAX)
        up = (scale.to(tl.uint32, bitcast=True) + 0x007FFFFF) & 0x7F800000
        scale = tl.where(bits >= 0x7F800000, float("nan"), up.to(tl.float32, bitcast=True))
        scale_at = row_scale + s.to(tl.int64) * scale_token + h * scale_head
        tl.store(scale_at, scale, mask=valid)
    else:
        b = tl.load(requests + s, mask=valid, other=0)
        scale_at = head_scale + b * scale_token + h * scale_head
        scale = tl.load(scale_at, mask=valid, other=1.0)
    factor = tl.div_rn(1.0, scale)
    at = values + s.to(tl.int64) * values_token + h * values_head
    store_columns(at, valid, first, factor, values_column, 0, FIRST, BLOCK_FIRST, CVT)
    if REST > 0:
        store_columns(at, valid, rest, factor, values_column, FIRST, REST, BLOCK_REST, CVT)
    if R > 0:
        store_columns(at, valid, same, factor, values_column, FIRST + REST, R, BLOCK_R, CVT)


def why_not(problem: Problem) -> str | None:
    if problem.dtype == torch.float64:
        return "takes heads of up to 32 bits, this is torch.float64"
    return None


def run(
    values: Tensor,
    row_scale: Tensor | None,
    x: Tensor,
    shared: Tensor | None,
    head_scale: Tensor | None,
    requests: Tensor | None,
) -> None:
    S, H, P = x.shape
    R = 0 if shared is None else shared.shape[1]
    if S * H == 0:
        return
    by_row, by_keys = row_scale is not None, values.stride(2) != 1
    launch = SPEC.launch(H, P, R, by_row, by_keys, capability_of(x.device))
    same: Any = x
    if shared is not None:
        same = Piece(shared, 0, torch.uint8) if shared.dtype == E4M3 else shared
    scale = row_scale if row_scale is not None else head_scale
    assert scale is not None  # checked by the op
    launch(
        (cdiv(S, launch.fixed["BLOCK_S"]) * H,),
        Piece(values, 0, torch.uint8),
        scale,
        x,
        same,
        scale,
        scale if requests is None else requests.contiguous(),
        S,
        x.stride(0),
        x.stride(1),
        0 if shared is None else shared.stride(0),
        *values.stride(),
        *scale.stride(),
    )


def fix(H: int, P: int, R: int, by_row: bool, by_keys: bool, capability: int) -> Fixed:
    first = next_power_of_2(P + 1) // 2
    constants = {
        "H": H,
        "FIRST": first,
        "REST": P - first,
        "R": R,
        "BY_ROW": by_row,
        "CVT": assembly() and FIRST_CVT <= capability < GFX942,
        "BLOCK_S": BLOCK_KEYS if by_keys else BLOCK_S,
        "BLOCK_FIRST": max(first, 1),
        "BLOCK_REST": next_power_of_2(P - first),
        "BLOCK_R": next_power_of_2(R),
    }
    return Fixed(constants, num_warps=8 if by_keys else 4)


def cases(capability: int) -> Iterator[Case]:
    """Queries, keys and values of V3, and keys of an fp8 cache."""
    for name, P, R, by_row, by_keys, shared in (
        ("queries", 192, 0, True, False, "bf16"), ("keys", 128, 64, False, False, "bf16"),
        ("cached-keys", 128, 64, False, False, "u8"), ("values", 128, 0, False, True, "bf16"),
    ):  # fmt: skip
        yield case(
            f"quantize-heads-{name}", 128, P, R, by_row, by_keys, capability,
            types={"shared": f"*{shared}"},
            constants={"values_token" if by_keys else "values_column": 1},
        )  # fmt: skip


SPEC = KernelSpec(
    _quantize_heads_kernel,
    fix,
    types={"*u8": "values", "*bf16": "x", "*fp32": "row_scale head_scale", "*i64": "requests"},
    cases=cases,
    fp_fusion=False,  # bytes must not depend on how the compiler contracts
)
SPECS = (SPEC,)
