"""cache_gather: read rows of a paged cache, decode them and pack them in request order.

    for request b, j < row_start_loc[b+1] - row_start_loc[b]:
        p = starts[b] + j
        out[row_start_loc[b] + j] = decode(cache[block_table[b, p // BS], p % BS])

`starts` need not be a multiple of BS. Rows of out past row_start_loc[B] are not touched, so out
may be a workspace larger than this call needs. Columns of block_table outside the gathered
positions are never read. out is [n, D] in any floating dtype. For the fp8 format it may also be
e4m3: it then receives the stored codes, and the caller must multiply them by kv_scale.
"""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from openmla.backends import Problem, problem_on
from openmla.cache.format import check_pages, get_format
from openmla.errors import ShapeError
from openmla.ops._declare import op
from openmla.ops._register import Cost
from openmla.ops._shapes import row_width
from openmla.ops._values import check_block_table, check_start_loc


def sizes(out: Tensor, format: str) -> dict[str, int]:
    return {"W": row_width(get_format(format), out)}


def check(op: str, out: Tensor, cache: Tensor, format: str) -> None:
    check_pages(op, cache, format)
    if out.dtype == torch.float8_e4m3fn and format != "fp8":
        raise ShapeError(f"{op}: out must be fp16, bf16, fp32 or fp64 for {format} rows.")


def check_values(
    op: str, block_table: Tensor, starts: Tensor, row_start_loc: Tensor, n: int, N: int, BS: int
) -> None:
    check_start_loc(op, "row_start_loc", row_start_loc, n, "out")
    if (starts < 0).any():
        raise ShapeError(f"{op}: starts must not be negative, got {int(starts.min())}.")
    num_rows = row_start_loc.diff()
    # a request with no rows needs no column, wherever it starts
    ends = (starts.long() + num_rows).where(num_rows > 0, 0)
    check_block_table(op, block_table, starts, ends, N, BS)


def problem(device: torch.device, dtype: torch.dtype, format: str) -> Problem:
    """Describe a call to the backends."""
    return problem_on(device, "cache_gather", dtype=dtype, format=format)


@op(
    problem=problem,
    sizes=sizes,
    check=check,
    check_values=check_values,
    mutates_args=["out"],
    no_grad=["out"],
)
def cache_gather(
    out: Annotated[Tensor, "[n, D] float|e4m3 row"],
    cache: Annotated[Tensor, "[N, BS, W] row"],
    kv_scale: Annotated[Tensor, "[] f32"],
    block_table: Annotated[Tensor, "[B, M] i32"],
    starts: Annotated[Tensor, "[B] i32"],
    row_start_loc: Annotated[Tensor, "[B+1] i32"],
    *,
    format: str,
    backend: str = "auto",
) -> None:
    """Gather row_start_loc[B] rows into out; see the module docstring for the contract.

    Args:
        out: packed rows, written in place.
        cache: pages to read.
        kv_scale: scale of format fp8; other formats ignore it.
        block_table: block numbers of each request's rows.
        starts: first position of each request.
        row_start_loc: first row of each request in out, then the end.
        format: the cache format, a key of openmla.FORMATS.
        backend: "auto", or the name of a backend.

    Raises:
        ShapeError: an argument does not fit the contract. Values are checked on the CPU only.
        ConfigError: the format or the backend is not known, or the format cannot hold such rows.
        UnsupportedError: no backend supports the call, or out requires grad while grad mode is on.

    ```python
    import torch
    from openmla.ops import cache_gather

    cache = torch.arange(48.0).view(4, 4, 3)  # 4 blocks of 4 rows
    block_table = torch.tensor([[2, 0], [3, -1]], dtype=torch.int32)
    starts = torch.tensor([3, 1], dtype=torch.int32)
    row_start_loc = torch.tensor([0, 2, 5], dtype=torch.int32)  # 2 rows, then 3
    out = torch.empty(5, 3)
    cache_gather(out, cache, torch.tensor(1.0), block_table, starts, row_start_loc, format="fp32")
    print(out[:, 0])  # 33, 0, 39, 42, 45
    ```
    """


def cost(num_rows: int, *, D: int, format: str, itemsize: int) -> Cost:
    """Every stored row read once, every output row written once."""
    return Cost(num_rows * (D * itemsize + get_format(format).row_bytes(D)), 0)
