"""cache_gather: read rows of a paged cache, decode them and pack them in request order.

    for request b, j < row_start_loc[b+1] - row_start_loc[b]:
        p = starts[b] + j
        out[row_start_loc[b] + j] = decode(cache[block_table[b, p // BS], p % BS])

`starts` need not be a multiple of BS. Rows of out past row_start_loc[B] are not touched, so out
may be a workspace larger than this call needs. Columns of block_table outside the gathered
positions are never read. out is [n, D] in any floating dtype; or, of the fp8 format, e4m3: codes as
they are stored, and kv_scale is the caller's to multiply by.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from openmla.backends import Problem, problem_on
from openmla.cache.format import check_pages, get_format
from openmla.errors import ShapeError
from openmla.ops._register import Cost, Decided, bind, decided, refuse_grad, register
from openmla.ops._values import check_block_table, check_start_loc

_SPEC = (
    "out:n D q row, cache:N BS W row, kv_scale: f32, block_table:B M i32, starts:B i32,"
    " row_start_loc:B+1 i32"
)


def _check(tensors: tuple[Tensor, ...], format: str) -> dict[str, int]:
    out, cache, _, block_table, *_ = tensors
    layout = get_format(format)
    W = layout.width(out.shape[-1]) if out.dim() else 0
    B1 = block_table.shape[0] + 1 if block_table.dim() else 0
    dims = bind("cache_gather", _SPEC, tensors, {"W": W, "B+1": B1})
    check_pages("cache_gather", cache, format)
    if out.dtype == torch.float8_e4m3fn and format != "fp8":
        raise ShapeError(f"cache_gather: out must be fp16, bf16, fp32 or fp64 for {format} rows.")
    return dims


def _check_values(
    dims: Mapping[str, int], block_table: Tensor, starts: Tensor, row_start_loc: Tensor
) -> None:
    check_start_loc("cache_gather", "row_start_loc", row_start_loc, dims["n"], "out")
    if (starts < 0).any():
        raise ShapeError(f"cache_gather: starts must not be negative, got {int(starts.min())}.")
    num_rows = row_start_loc.diff()
    # a request with no rows asks for no column, wherever it starts
    ends = (starts.long() + num_rows).where(num_rows > 0, 0)
    check_block_table("cache_gather", block_table, starts, ends, dims["N"], dims["BS"])


def problem(device: torch.device, dtype: torch.dtype, format: str) -> Problem:
    """A call, as backends are asked about it."""
    return problem_on(device, "cache_gather", dtype=dtype, format=format)


def _decide(*tensors: Tensor, format: str, backend: str) -> Decided:
    out = tensors[0]
    return decided(_check(tensors, format), problem(out.device, out.dtype, format), backend)


def _run(known: Decided, *tensors: Tensor, format: str) -> None:
    out, _, _, block_table, starts, row_start_loc = tensors
    refuse_grad("cache_gather", (out,))
    if out.device.type == "cpu":
        _check_values(known.dims, block_table, starts, row_start_loc)
    known.runner.run(*tensors, format=format)


def _fake(*tensors: Tensor, format: str, backend: str) -> None:
    _check(tensors, format)


_OP = register(
    "cache_gather(Tensor(a!) out, Tensor cache, Tensor kv_scale, Tensor block_table,"
    " Tensor starts, Tensor row_start_loc, *, str format, str backend) -> ()",
    _decide,
    _run,
    _fake,
)


def cache_gather(
    out: Tensor,  # [n, D], written in place
    cache: Tensor,  # [N, BS, W]
    kv_scale: Tensor,  # [] f32
    block_table: Tensor,  # [B, M] i32
    starts: Tensor,  # [B] i32, first position of each request
    row_start_loc: Tensor,  # [B+1] i32, cumulative row counts
    *,
    format: str,
    backend: str = "auto",
) -> None:
    """Gather row_start_loc[B] rows into out; see the module's text for the contract."""
    _OP(out, cache, kv_scale, block_table, starts, row_start_loc, format=format, backend=backend)


def cost(num_rows: int, *, D: int, format: str, itemsize: int) -> Cost:
    """Every stored row read once, every output row written once."""
    return Cost(num_rows * (D * itemsize + get_format(format).row_bytes(D)), 0)
