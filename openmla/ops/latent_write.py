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
    cache: Annotated[Tensor, "[N, BS, W] row"],
    q: Annotated[Tensor, "[T, H, E] float row"],
    kv: Annotated[Tensor, "[T, D] float row"],
    norm_weight: Annotated[Tensor, "[C] float row"],
    positions: Annotated[Tensor, "[S] i64"],  # S = T' <= T
    slot_mapping: Annotated[Tensor, "[S] i64"],
    kv_scale: Annotated[Tensor, "[] f32"],
    table: Annotated[Tensor | None, "[Q, R] float row"],
    rope_ratio: Annotated[Tensor | None, "[] f32"] = None,
    clamped: Annotated[Tensor | None, "[] i64"] = None,
    *,
    format: str,
    pairing: str,
    eps: float,
    factor: float = 1.0,
    norm_queries: bool = False,
    backend: str = "auto",
) -> None:
    """Normalize, rotate and write; see the module docstring for the contract.

    Args:
        cache: cache to write to, in place.
        q: queries, changed in place.
        kv: latent rows, normalized and rotated in place.
        norm_weight: weight of the RMS norm.
        positions: positions of tokens.
        slot_mapping: slot (block * BS + offset) of each row. Negative: not written.
        kv_scale: scale of format fp8; other formats ignore it.
        table: RoPE table, cos in the first half of a row and sin in the second. None: no rotation.
        rope_ratio: power of two that stored k_pe are divided by. Only for format fp8.
        clamped: counter that grows by the number of saturated values.
        format: a key of openmla.FORMATS that holds latent rows.
        pairing: "pairs" or "halves", as in rope.
        eps: epsilon of the RMS norm.
        factor: factor of the normalized latent.
        norm_queries: normalize queries too, without a weight.
        backend: "auto", or the name of a backend.

    Raises:
        ShapeError: an argument does not fit the contract. Values are checked on the CPU only.
        ConfigError: the format or the backend is not known, or the format cannot hold such rows.
        UnsupportedError: no backend supports the call, or q, kv or norm_weight requires grad while
            grad mode is on.

    ```python
    import torch
    from openmla.ops import latent_write

    cache = torch.zeros(2, 4, 8)  # 2 blocks of 4 rows
    q, kv = torch.randn(2, 3, 6), torch.randn(2, 8)  # 2 tokens, 3 heads
    angles = torch.arange(16.0)[:, None] * torch.tensor([1.0, 0.1])
    table = torch.cat((angles.cos(), angles.sin()), 1)
    latent_write(
        cache, q, kv, torch.ones(4), torch.arange(2), torch.tensor([4, 5]), torch.tensor(1.0),
        table, format="fp32", pairing="pairs", eps=1e-6,
    )
    print(torch.equal(cache[1, :2], kv))  # True
    ```
    """


def cost(
    num_rows: int, *, H: int, E: int, D: int, R: int, format: str, itemsize: int, norm_queries: bool
) -> Cost:
    """Latent rows and the changed part of queries read and written once, stored rows once."""
    turned = H * (E if norm_queries else R)
    row = 2 * itemsize * (D + turned) + get_format(format).row_bytes(D) + 4 * R + 16
    return Cost(num_rows * row, num_rows * (4 * D + 3 * R * (H + 1)))
