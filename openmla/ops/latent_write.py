"""latent_write: normalize and rotate a step's latent rows and queries, and cache the rows.

    kv[i, :C]  <- RMSNorm(kv[i, :C]) * norm_weight * factor        C = the weight's width
    q[i, h]    <- RMSNorm(q[i, h]), without a weight               if norm_queries
    the last R columns of kv[i] and of each q[i, h] rotated by position, as ops/rope does
    cache[slot] = encode(kv[i]), as ops/cache_write does

kv and q are modified in place, because both forms of attention use them afterwards. Each step
(norm, weight, factor if it is not 1, rotation) is computed in float32 (float64 for float64 rows)
and rounded once to kv's dtype. C may be all of kv's columns (V4); the last R are then normalized
before they are rotated. Without a table nothing is rotated: columns after C are stored unchanged
(Kimi-Linear). Rows past the slots [T'] are ignored; a negative slot skips only the write. No two
rows may share a slot. `rope_ratio`, for the columns after C, and `clamped` work as in cache_write:
they apply to what is stored, not to kv.
"""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from openmla.backends import Problem, problem_on
from openmla.cache.format import get_format
from openmla.errors import ShapeError
from openmla.ops._declare import op
from openmla.ops._register import Cost
from openmla.ops._shapes import row_width
from openmla.ops._values import check_positions
from openmla.ops.cache_write import check_slot_mapping, check_written
from openmla.ops.rope import check_table


def sizes(kv: Tensor, format: str) -> dict[str, int]:
    return {"W": row_width(get_format(format, "latent"), kv)}


def check(
    op: str, q: Tensor, kv: Tensor, table: Tensor | None, D: int, E: int, C: int, R: int = 0
) -> None:
    if q.dtype != kv.dtype:
        raise ShapeError(f"{op}: q must be {kv.dtype} like kv, got {q.dtype}.")
    if R % 2 or min(D, E) < R:
        raise ShapeError(f"{op}: table must turn an even R <= {min(D, E)} columns, got {R}.")
    if table is None and C > D:
        raise ShapeError(f"{op}: norm_weight must be [C] with C at most D={D}, got ({C},).")
    if table is not None and C not in (D - R, D):
        raise ShapeError(f"{op}: norm_weight must be [C] with C={D - R} or {D}, got ({C},).")


def problem(device: torch.device, dtype: torch.dtype, format: str, *, D: int, E: int) -> Problem:
    """Describe a call to the backends."""
    return problem_on(device, "latent_write", dtype=dtype, format=format, D=D, E=E)


@op(
    problem=problem,
    dtype_of="kv",
    sizes=sizes,
    check=[check_written, check_table, check],
    check_values=[check_slot_mapping, check_positions],
    mutates_args=["cache", "q", "kv", "clamped"],
    no_grad=["q", "kv", "norm_weight"],
)
def latent_write(
    cache: Annotated[Tensor, "[N, BS, W] row"],  # written in place
    q: Annotated[Tensor, "[T, H, E] float row"],  # changed in place
    kv: Annotated[Tensor, "[T, D] float row"],  # changed in place
    norm_weight: Annotated[Tensor, "[C] float row"],
    positions: Annotated[Tensor, "[S] i64"],  # S = T' <= T
    slot_mapping: Annotated[Tensor, "[S] i64"],  # negative: do not write
    kv_scale: Annotated[Tensor, "[] f32"],
    table: Annotated[Tensor | None, "[Q, R] float row"],  # cos in the first half of a row, then sin
    rope_ratio: Annotated[Tensor | None, "[] f32"] = None,
    clamped: Annotated[Tensor | None, "[] i64"] = None,  # counts
    *,
    format: str,
    pairing: str,
    eps: float,
    factor: float = 1.0,
    norm_queries: bool = False,
    backend: str = "auto",
) -> None:
    """Normalize, rotate and write; see the module docstring for the contract."""


def cost(
    num_rows: int, *, H: int, E: int, D: int, R: int, format: str, itemsize: int, norm_queries: bool
) -> Cost:
    """Latent rows and the changed part of queries read and written once, stored rows once."""
    turned = H * (E if norm_queries else R)
    row = 2 * itemsize * (D + turned) + get_format(format).row_bytes(D) + 4 * R + 16
    return Cost(num_rows * row, num_rows * (4 * D + 3 * R * (H + 1)))
