"""cache_write: encode this step's latent rows and write them into their slots of a paged cache.

    for i < T', slot_mapping[i] >= 0:
        cache[slot // BS, slot % BS] = encode(concat(kv_c[i], k_pe[i]))

Rows kv_c [T, C] and k_pe [T, R] may be more than slots [T'] (graph padding): the surplus is not
looked at. A negative slot skips its row. Two rows never share a slot. Bytes of other slots and
of padding between pages do not change. R may be 0.
Encoding is cache/format.py's: bit copy or round to nearest even; fp8 saturates.
With `rope_ratio`, a power of two, rows under one scale store k_pe / rope_ratio in k_pe's place.
`clamped`, where it is given, grows by the number of values that did (CacheFormat.num_clamped).
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

_SPEC = "cache:N BS W row, kv_c:T C f row, k_pe:T R f row, slot_mapping:S i64, kv_scale: f32"


def _check(tensors: tuple[Tensor, ...], format: str) -> dict[str, int]:
    cache, kv_c, k_pe, *_ = tensors
    layout = get_format(format)
    W = layout.width(kv_c.shape[-1] + k_pe.shape[-1]) if kv_c.dim() and k_pe.dim() else 0
    dims = bind("cache_write", _SPEC, tensors, {"W": W})
    check_pages("cache_write", cache, format)
    check_blocks_apart("cache_write", "cache", cache)
    if kv_c.dtype != k_pe.dtype:
        raise ShapeError(f"cache_write: k_pe must be {kv_c.dtype} like kv_c, got {k_pe.dtype}.")
    if dims["S"] > dims["T"]:
        raise ShapeError(
            f"cache_write: slot_mapping must have at most T={dims['T']} slots, got {dims['S']}."
        )
    return dims


def problem(device: torch.device, dtype: torch.dtype, format: str) -> Problem:
    """A call, as backends are asked about it."""
    return problem_on(device, "cache_write", dtype=dtype, format=format)


def check_scaled(
    op: str, cache: Tensor, format: str, rope_ratio: Tensor | None, clamped: Tensor | None
) -> None:
    """The two that only rows under one scale have a use for."""
    if rope_ratio is not None:
        bind(op, "cache:N BS W, rope_ratio: f32", (cache, rope_ratio))
        if not get_format(format).scaled:
            raise ShapeError(f"{op}: rope_ratio must be None for format {format}.")
    if clamped is not None:
        bind(op, "cache:N BS W, clamped: i64", (cache, clamped))


def _decide(*tensors: Any, format: str, backend: str) -> Decided:
    cache, kv_c, *_ = tensors
    check_scaled("cache_write", cache, format, *tensors[5:])
    return decided(_check(tensors[:5], format), problem(cache.device, kv_c.dtype, format), backend)


def _run(known: Decided, *tensors: Any, format: str) -> None:
    cache, kv_c, k_pe, slot_mapping, *_ = tensors
    refuse_grad("cache_write", (kv_c, k_pe))
    if cache.device.type == "cpu":
        check_slots("cache_write", slot_mapping, known.dims["N"] * known.dims["BS"])
    known.runner.run(*tensors, format=format)


def _fake(*tensors: Any, format: str, backend: str) -> None:
    check_scaled("cache_write", tensors[0], format, *tensors[5:])
    _check(tensors[:5], format)


_OP = register(
    "cache_write(Tensor(a!) cache, Tensor kv_c, Tensor k_pe, Tensor slot_mapping, Tensor kv_scale,"
    " Tensor? rope_ratio, Tensor(b!)? clamped, *, str format, str backend) -> ()",
    _decide,
    _run,
    _fake,
)


def cache_write(
    cache: Tensor,  # [N, BS, W], written in place
    kv_c: Tensor,  # [T, C]
    k_pe: Tensor,  # [T, R]
    slot_mapping: Tensor,  # [T'] i64, T' <= T; negative: do not write
    kv_scale: Tensor,  # [] f32
    rope_ratio: Tensor | None = None,  # [] f32
    clamped: Tensor | None = None,  # [] i64, counts
    *,
    format: str,
    backend: str = "auto",
) -> None:
    """Write T' rows; see the module's text for the contract."""
    _OP(
        cache, kv_c, k_pe, slot_mapping, kv_scale, rope_ratio, clamped, format=format,
        backend=backend,
    )  # fmt: skip


def cost(num_rows: int, *, D: int, format: str, itemsize: int) -> Cost:
    """Every input row read once, every stored row written once, one i64 slot per row."""
    return Cost(num_rows * (D * itemsize + get_format(format).row_bytes(D) + 8), 0)
