"""index_write: normalize, rotate and quantize a step's indexer keys and write them to their slots.

    k = LayerNorm(k_raw) with weight and bias
    k[rope_start : rope_start + R] rotated by position, as ops/rope does
    k = k @ H / sqrt(DI) if hadamard: H the DI-point Hadamard matrix, DI a power of two
    cache[slot] = encode(k)

Everything up to the encoding is float32 (float64 for float64 keys), so a key is rounded once.
Rows of k_raw past the slots [T'] are ignored; a negative slot skips its row.
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


def sizes(k_raw: Tensor, format: str) -> dict[str, int]:
    return {"W": row_width(get_format(format, "index"), k_raw)}


def check(op: str, rope_start: int, hadamard: bool, DI: int, R: int) -> None:
    if R % 2 or not 0 <= rope_start <= DI - R:
        raise ShapeError(
            f"{op}: rope_start must leave an even R={R} columns of DI={DI}, got {rope_start}."
        )
    if hadamard and DI & (DI - 1):
        raise ShapeError(f"{op}: hadamard needs DI to be a power of two, got {DI}.")


def problem(device: torch.device, dtype: torch.dtype, format: str) -> Problem:
    """Describe a call to the backends."""
    return problem_on(device, "index_write", dtype=dtype, format=format)


@op(
    problem=problem,
    dtype_of="k_raw",
    sizes=sizes,
    check=[check_written, check_table, check],
    check_values=[check_slot_mapping, check_positions],
    mutates_args=["cache"],
    no_grad=["k_raw", "norm_weight", "norm_bias"],
)
def index_write(
    cache: Annotated[Tensor, "[N, BS, W] row"],
    k_raw: Annotated[Tensor, "[T, DI] float row"],
    norm_weight: Annotated[Tensor, "[DI] float row"],
    norm_bias: Annotated[Tensor, "[DI] float row"],
    positions: Annotated[Tensor, "[S] i64"],  # S = T' <= T
    table: Annotated[Tensor, "[Q, R] float row"],
    slot_mapping: Annotated[Tensor, "[S] i64"],
    *,
    format: str,
    eps: float,
    pairing: str,
    rope_start: int,
    hadamard: bool = False,
    backend: str = "auto",
) -> None:
    """Write keys; see the module docstring for the contract.

    Args:
        cache: cache to write to, in place.
        k_raw: indexer keys, as projected.
        norm_weight: weight of the LayerNorm.
        norm_bias: bias of the LayerNorm.
        positions: positions of tokens.
        table: RoPE table, cos in the first half of a row and sin in the second.
        slot_mapping: slot (block * BS + offset) of each row. Negative: not written.
        format: the cache format, a key of openmla.FORMATS that holds index rows.
        eps: epsilon of the LayerNorm.
        pairing: "pairs" or "halves", as in rope.
        rope_start: first rotated column.
        hadamard: multiply keys by a Hadamard matrix.
        backend: "auto", or the name of a backend.

    Raises:
        ShapeError: an argument does not fit the contract. Values are checked on the CPU only.
        ConfigError: the format or the backend is not known, or the format cannot hold such rows.
        UnsupportedError: no backend supports the call, or k_raw, norm_weight or norm_bias requires
            grad while grad mode is on.

    ```python
    import torch
    from openmla.ops import index_write

    cache = torch.zeros(2, 4, 8)  # 2 blocks of 4 keys
    table = torch.tensor([1.0, 1.0, 0.0, 0.0]).expand(16, 4)  # no rotation
    index_write(
        cache, torch.randn(2, 8), torch.ones(8), torch.zeros(8), torch.arange(2), table,
        torch.tensor([4, 5]), format="index_fp32", eps=1e-6, pairing="halves", rope_start=0,
    )
    print(cache[1, 0])  # the first key
    ```
    """


def cost(num_rows: int, *, DI: int, R: int, format: str, itemsize: int) -> Cost:
    """Keys read once, rows written once, one table row, position and slot per token."""
    row = DI * itemsize + get_format(format, "index").row_bytes(DI) + 4 * R + 16
    return Cost(num_rows * row, num_rows * (8 * DI + 3 * R))
