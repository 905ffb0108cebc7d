"""mha_masked: ordinary attention over packed keys and values, masked by one bit per query and key.

    s   = scale * q @ k.T per head,  where bit j of mask[t] is set (key j of the request)
    lse = log(sum(exp(s)))
    out = exp(s - lse) @ v

Request b owns query rows query_start_loc[b] .. query_start_loc[b+1]-1 and key rows
key_start_loc[b] .. key_start_loc[b+1]-1; bits past its last key are ignored. Words are as pack_mask
writes them. There is no other mask: causality must be in the bits. A query that sees no key, and
every query row past query_start_loc[B], gets out 0 and lse -inf. lse is natural-log, includes
scale, and is float32 (float64 for float64 queries). max_query_len and max_key_len bound requests.
Heads may be e4m3 with scales and an out_dtype, as in mha_ragged.
"""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from openmla.backends import Problem, problem_on
from openmla.errors import ShapeError
from openmla.ops._declare import Size, op
from openmla.ops._eight_bits import call_with_scales, check_eight_bits, results
from openmla.ops._register import Cost, check_scale
from openmla.ops._values import check_start_loc


def check(op: str, max_key_len: int, words: int) -> None:
    if 32 * words < max_key_len:
        raise ShapeError(
            f"{op}: mask must have a bit for each of max_key_len={max_key_len} keys, "
            f"got {words} words of 32."
        )


def check_values(
    op: str, query_start_loc: Tensor, key_start_loc: Tensor, max_query_len: int, max_key_len: int,
    T: int, S: int, B: int,
) -> None:  # fmt: skip
    check_start_loc(op, "query_start_loc", query_start_loc, T, "q")
    check_start_loc(op, "key_start_loc", key_start_loc, S, "k")
    for name, start_loc, given in (
        ("max_query_len", query_start_loc, max_query_len),
        ("max_key_len", key_start_loc, max_key_len),
    ):
        longest = int(start_loc.diff().max()) if B > 0 else 0
        if longest > given:
            raise ShapeError(f"{op}: {name} must be at least {longest}, got {given}.")


def problem(
    device: torch.device, dtype: torch.dtype, *, E: int, V: int, batch_invariant: bool = False
) -> Problem:
    """Describe a call to the backends."""
    return problem_on(device, "mha_masked", dtype=dtype, E=E, V=V, batch_invariant=batch_invariant)


@op(
    problem=problem,
    check=[check_eight_bits, check, check_scale],
    check_values=check_values,
    fake=results,
    call=call_with_scales,
    no_grad=["q", "k", "v"],
    optional=["q_scale", "k_scale", "v_scale", "batch_invariant", "out_dtype"],
)
def mha_masked(
    q: Annotated[Tensor, "[T, H, E] float|e4m3 row"],
    k: Annotated[Tensor, "[S, H, E] float|e4m3 row"],
    v: Annotated[Tensor, "[S, H, V] float|e4m3"],
    query_start_loc: Annotated[Tensor, "[B+1] i32"],
    key_start_loc: Annotated[Tensor, "[B+1] i32"],
    mask: Annotated[Tensor, "[T, words] i32 row"],
    q_scale: Annotated[Tensor | None, "[T, H] f32"] = None,
    k_scale: Annotated[Tensor | None, "[B, H] f32"] = None,
    v_scale: Annotated[Tensor | None, "[B, H] f32"] = None,
    *,
    scale: float,
    max_query_len: Size,
    max_key_len: Size,
    batch_invariant: bool = False,
    out_dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:  # out [T, H, V], lse [T, H] f32
    """Attend where bits are set; see the module docstring for the contract.

    Args:
        q: queries.
        k: keys.
        v: values.
        query_start_loc: first query row of each request, then the end.
        key_start_loc: first key row of each request, then the end.
        mask: bits of visible keys, as pack_mask returns them.
        q_scale: scale of each query and head; only for e4m3 heads.
        k_scale: scale of keys per request and head; only for e4m3 heads.
        v_scale: scale of values per request and head; only for e4m3 heads.
        scale: factor of scores.
        max_query_len: upper bound on the queries of a request.
        max_key_len: upper bound on the keys of a request.
        batch_invariant: make results independent of the batch, bit for bit.
        out_dtype: dtype of out, required for e4m3 heads.
        backend: "auto", or the name of a backend.

    Returns:
        Outputs [T, H, V], and lse [T, H] in float32 (float64 for float64 queries).

    Raises:
        ShapeError: an argument does not fit the contract. Values are checked on the CPU only.
        ConfigError: the backend is not known.
        UnsupportedError: no backend supports the call, or q, k or v requires grad while grad mode
            is on.

    ```python
    import torch
    from openmla.ops import mha_masked

    q, k, v = torch.randn(3, 2, 8), torch.randn(3, 2, 8), torch.randn(3, 2, 4)
    starts = torch.tensor([0, 3], dtype=torch.int32)  # one request
    mask = torch.tensor([[0b001], [0b011], [0b101]], dtype=torch.int32)
    out, lse = mha_masked(
        q, k, v, starts, starts, mask, scale=8**-0.5, max_query_len=3, max_key_len=3
    )
    print(out.shape, lse.shape)  # [3, 2, 4] and [3, 2]
    ```
    """


def cost(n: int, S: int, *, H: int, E: int, V: int, itemsize: int) -> Cost:
    """Return the cost of one request: everything read once, every pair computed, masked or not."""
    num_bytes = H * itemsize * (n + S) * (E + V) + n * S // 8 + 4 * n * H
    return Cost(num_bytes, 2 * n * S * H * (E + V))
