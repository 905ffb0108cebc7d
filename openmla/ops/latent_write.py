"""latent_write: normalize and rotate a step's latent rows and queries, and cache the rows.

    kv[i, :C]  <- RMSNorm(kv[i, :C]) * norm_weight * factor        C = the weight's width
    q[i, h]    <- RMSNorm(q[i, h]), without a weight               if norm_queries
    the last R columns of kv[i] and of each q[i, h] rotated by position, as ops/rope does
    cache[slot] = encode(kv[i]), as ops/cache_write does

kv and q are changed in place: both forms of attention go on with them. Each step is float32
(float64 for float64 rows) and rounds once to kv's type: the norm, the weight, the factor where it
is not 1, the rotation. C may be all of kv's columns (V4), then those R are normalised before they
are turned. Without a table nothing turns: columns behind C are stored as they are (Kimi-Linear).
Rows past the slots [T'] are not looked at; a negative slot skips only the write. Two rows never
share a slot. `rope_ratio`, of the columns behind C, and `clamped` are cache_write's: of what is
stored, not of kv.
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
from openmla.ops.cache_write import check_scaled
from openmla.ops.rope import PAIRINGS

_SPEC = (
    "cache:N BS W row, q:T H E f row, kv:T D f row, norm_weight:C f row, positions:S i64,"
    " slot_mapping:S i64, kv_scale: f32"
)


def _check(
    tensors: tuple[Tensor, ...], table: Tensor | None, format: str, pairing: str
) -> dict[str, int]:
    op = "latent_write"
    cache, q, kv = tensors[:3]
    W = get_format(format, "latent").width(kv.shape[-1]) if kv.dim() else 0
    dims = bind(op, _SPEC, tensors, {"W": W})
    check_pages(op, cache, format)
    check_blocks_apart(op, "cache", cache)
    dims["R"] = 0
    if table is not None:
        dims["R"] = bind(op, "kv:T D, table:Q R f row", (kv, table))["R"]
        if table.dtype.itemsize < 4:
            raise ShapeError(f"{op}: table must be float32 or float64, got {table.dtype}.")
    D, E, R = dims["D"], dims["E"], dims["R"]
    if q.dtype != kv.dtype:
        raise ShapeError(f"{op}: q must be {kv.dtype} like kv, got {q.dtype}.")
    if dims["S"] > dims["T"]:
        raise ShapeError(
            f"{op}: slot_mapping must have at most T={dims['T']} slots, got {dims['S']}."
        )
    if R % 2 or min(D, E) < R:
        raise ShapeError(f"{op}: table must turn an even R <= {min(D, E)} columns, got {R}.")
    if table is None and dims["C"] > D:
        raise ShapeError(
            f"{op}: norm_weight must be [C] with C at most D={D}, got {tuple(tensors[3].shape)}."
        )
    if table is not None and dims["C"] not in (D - R, D):
        raise ShapeError(
            f"{op}: norm_weight must be [C] with C={D - R} or {D}, got {tuple(tensors[3].shape)}."
        )
    if pairing not in PAIRINGS:
        raise ShapeError(f"{op}: pairing must be pairs or halves, got {pairing!r}.")
    return dims


def problem(device: torch.device, dtype: torch.dtype, format: str, *, D: int, E: int) -> Problem:
    """A call, as backends are asked about it."""
    return problem_on(device, "latent_write", dtype=dtype, format=format, D=D, E=E)


def _decide(*tensors: Any, format: str, pairing: str, backend: str, **_: object) -> Decided:
    cache, kv = tensors[0], tensors[2]
    check_scaled("latent_write", cache, format, *tensors[8:])
    dims = _check(tensors[:7], tensors[7], format, pairing)
    asked = problem(cache.device, kv.dtype, format, D=dims["D"], E=dims["E"])
    return decided(dims, asked, backend)


def _run(known: Decided, *tensors: Any, **scalars: Any) -> None:
    cache, q, kv, norm_weight, positions, slot_mapping, _, table, *_ = tensors
    dims = known.dims
    refuse_grad("latent_write", (q, kv, norm_weight))
    if cache.device.type == "cpu":
        check_slots("latent_write", slot_mapping, dims["N"] * dims["BS"])
        if table is not None and positions.numel():
            low, high = positions.aminmax()
            if low < 0 or high >= table.shape[0]:
                raise ShapeError(
                    f"latent_write: positions must be within the table's 0..{table.shape[0] - 1}, "
                    f"got {int(low)}..{int(high)}."
                )
    known.runner.run(*tensors, **scalars)


def _fake(*tensors: Any, format: str, pairing: str, **_: object) -> None:
    check_scaled("latent_write", tensors[0], format, *tensors[8:])
    _check(tensors[:7], tensors[7], format, pairing)


_OP = register(
    "latent_write(Tensor(a!) cache, Tensor(b!) q, Tensor(c!) kv, Tensor norm_weight,"
    " Tensor positions, Tensor slot_mapping, Tensor kv_scale, Tensor? table,"
    " Tensor? rope_ratio, Tensor(d!)? clamped, *, str format, str pairing, float eps, float factor,"
    " bool norm_queries, str backend) -> ()",
    _decide,
    _run,
    _fake,
)


def latent_write(
    cache: Tensor,  # [N, BS, W], written in place
    q: Tensor,  # [T, H, E], changed in place
    kv: Tensor,  # [T, D], changed in place
    norm_weight: Tensor,  # [C]
    positions: Tensor,  # [T'] i64, T' <= T
    slot_mapping: Tensor,  # [T'] i64; negative: do not write
    kv_scale: Tensor,  # [] f32
    table: Tensor | None,  # [Q, R] f32: cos in the first half of a row, sin in the second
    rope_ratio: Tensor | None = None,  # [] f32
    clamped: Tensor | None = None,  # [] i64, counts
    *,
    format: str,
    pairing: str,
    eps: float,
    factor: float = 1.0,
    norm_queries: bool = False,
    backend: str = "auto",
) -> None:
    """Normalise, rotate, write; see the module's text for the contract."""
    _OP(
        cache,
        q,
        kv,
        norm_weight,
        positions,
        slot_mapping,
        kv_scale,
        table,
        rope_ratio,
        clamped,
        format=format,
        pairing=pairing,
        eps=eps,
        factor=factor,
        norm_queries=norm_queries,
        backend=backend,
    )


def cost(
    num_rows: int, *, H: int, E: int, D: int, R: int, format: str, itemsize: int, norm_queries: bool
) -> Cost:
    """Latent rows and the changed part of queries read and written once, stored rows once."""
    turned = H * (E if norm_queries else R)
    row = 2 * itemsize * (D + turned) + get_format(format).row_bytes(D) + 4 * R + 16
    return Cost(num_rows * row, num_rows * (4 * D + 3 * R * (H + 1)))
