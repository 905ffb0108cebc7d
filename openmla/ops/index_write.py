"""index_write: normalize, rotate and quantize a step's indexer keys and write them to their slots.

    k = LayerNorm(k_raw) with weight and bias
    k[rope_start : rope_start + R] rotated by position, as ops/rope does
    k = k @ H / sqrt(DI) if hadamard: H the DI-point Hadamard matrix, DI a power of two
    cache[slot] = encode(k)

Everything up to the encoding is float32 (float64 for float64 keys), so a key is rounded once.
Rows of k_raw past the slots [T'] are not looked at; a negative slot skips its row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from openmla.backends import Problem, problem_on
from openmla.cache.format import check_blocks_apart, check_pages, get_format
from openmla.errors import ShapeError
from openmla.ops._register import Cost, Decided, bind, decided, refuse_grad, register
from openmla.ops._values import check_slots
from openmla.ops.rope import PAIRINGS

_SPEC = (
    "cache:N BS W row, k_raw:T DI f row, norm_weight:DI f row, norm_bias:DI f row,"
    " positions:S i64, table:Q R f row, slot_mapping:S i64"
)


def _check(
    tensors: tuple[Tensor, ...], format: str, pairing: str, rope_start: int, hadamard: bool
) -> dict[str, int]:
    cache, k_raw = tensors[:2]
    layout = get_format(format, "index")
    W = layout.width(k_raw.shape[-1]) if k_raw.dim() else 0
    dims = bind("index_write", _SPEC, tensors, {"W": W})
    check_pages("index_write", cache, format)
    check_blocks_apart("index_write", "cache", cache)
    DI, R = dims["DI"], dims["R"]
    if tensors[5].dtype.itemsize < 4:
        raise ShapeError(f"index_write: table must be float32 or float64, got {tensors[5].dtype}.")
    if dims["S"] > dims["T"]:
        raise ShapeError(
            f"index_write: slot_mapping must have at most T={dims['T']} slots, got {dims['S']}."
        )
    if R % 2 or not 0 <= rope_start <= DI - R:
        raise ShapeError(
            f"index_write: rope_start must leave an even R={R} columns of DI={DI}, "
            f"got {rope_start}."
        )
    if pairing not in PAIRINGS:
        raise ShapeError(f"index_write: pairing must be pairs or halves, got {pairing!r}.")
    if hadamard and DI & (DI - 1):
        raise ShapeError(f"index_write: hadamard needs DI to be a power of two, got {DI}.")
    return dims


def problem(device: torch.device, dtype: torch.dtype, format: str) -> Problem:
    """A call, as backends are asked about it."""
    return problem_on(device, "index_write", dtype=dtype, format=format)


def _decide(
    *tensors: Tensor,
    format: str,
    eps: float,
    pairing: str,
    rope_start: int,
    hadamard: bool,
    backend: str,
) -> Decided:
    cache, k_raw = tensors[:2]
    dims = _check(tensors, format, pairing, rope_start, hadamard)
    return decided(dims, problem(cache.device, k_raw.dtype, format), backend)


def _run(known: Decided, *tensors: Tensor, **scalars: Any) -> None:
    cache, _, _, _, positions, _, slot_mapping = tensors
    dims = known.dims
    refuse_grad("index_write", tensors[1:4])
    if cache.device.type == "cpu":
        check_slots("index_write", slot_mapping, dims["N"] * dims["BS"])
        if positions.numel() and (positions.min() < 0 or positions.max() >= dims["Q"]):
            raise ShapeError(
                f"index_write: positions must be within the table's 0..{dims['Q'] - 1}, "
                f"got {int(positions.min())}..{int(positions.max())}."
            )
    known.runner.run(*tensors, **scalars)


def _fake(
    *tensors: Tensor, format: str, pairing: str, rope_start: int, hadamard: bool, **_: object
) -> None:
    _check(tensors, format, pairing, rope_start, hadamard)


_OP = register(
    "index_write(Tensor(a!) cache, Tensor k_raw, Tensor norm_weight, Tensor norm_bias,"
    " Tensor positions, Tensor table, Tensor slot_mapping, *, str format, float eps, str pairing,"
    " int rope_start, bool hadamard, str backend) -> ()",
    _decide,
    _run,
    _fake,
)


def index_write(
    cache: Tensor,  # [N, BS, W], an index format, written in place
    k_raw: Tensor,  # [T, DI], as projected
    norm_weight: Tensor,  # [DI]
    norm_bias: Tensor,  # [DI]
    positions: Tensor,  # [T'] i64, T' <= T
    table: Tensor,  # [Q, R] f32: cos in the first half of a row, sin in the second
    slot_mapping: Tensor,  # [T'] i64; negative: do not write
    *,
    format: str,
    eps: float,
    pairing: str,
    rope_start: int,
    hadamard: bool = False,
    backend: str = "auto",
) -> None:
    """Write keys; see the module's text for the contract."""
    _OP(
        cache,
        k_raw,
        norm_weight,
        norm_bias,
        positions,
        table,
        slot_mapping,
        format=format,
        eps=eps,
        pairing=pairing,
        rope_start=rope_start,
        hadamard=hadamard,
        backend=backend,
    )


def cost(num_rows: int, *, DI: int, R: int, format: str, itemsize: int) -> Cost:
    """Keys read once, rows written once, one table row, position and slot per token."""
    row = DI * itemsize + get_format(format, "index").row_bytes(DI) + 4 * R + 16
    return Cost(num_rows * row, num_rows * (8 * DI + 3 * R))
