"""mha_ragged: ordinary attention over packed, expanded keys and values, request by request.

    s   = scale * q @ k.T per head             query token i of n sees keys j <= S - n + i
    lse = log(sum(exp(s)))                     (causal; all S keys otherwise)
    out = exp(s - lse) @ v

Request b owns query rows query_start_loc[b] .. query_start_loc[b+1]-1 and key rows
key_start_loc[b] .. key_start_loc[b+1]-1. Causal is aligned at the end: the last query sees every
key. K and V may differ in width. With k_pe [S, R], which all heads share, k holds the first E - R
columns of keys and k_pe the rest; backends that can read the two separately copy nothing. A query
that sees no key, and every query row past query_start_loc[B], gets out 0 and lse -inf. Key rows
past key_start_loc[B] are never read. lse is natural-log, includes scale, and is float32 (float64
for float64 queries).
Heads may be e4m3 with scales: q is multiplied by q_scale [T, H], k and v by their request's rows of
k_scale [B, H] and v_scale [B, H], all in float32, and `out` has out_dtype. v may also have that
dtype. With e4m3 heads, keys are given whole, without k_pe, and v may be contiguous along keys
instead of columns (quantize_heads makes both).
Backends may round 256 * exp(s - max) to e4m3; out is then divided by the sum of the rounded values,
while lse uses the sum before rounding.
max_query_len and max_key_len are exactly those of the longest request. With batch_invariant, a
request's bits do not depend on the batch: only backends that guarantee this are used.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import sub
from typing import Annotated

import torch
from torch import Tensor

from openmla.backends import Problem, problem_on
from openmla.backends.expanded import joined as joined  # for callers of this op
from openmla.errors import ShapeError
from openmla.ops._declare import Size, op
from openmla.ops._eight_bits import call_with_scales, check_eight_bits, results
from openmla.ops._register import Cost, check_scale
from openmla.ops._values import check_start_loc


def sizes(q: Tensor, k_pe: Tensor | None) -> dict[str, int]:
    R = k_pe.shape[-1] if k_pe is not None and k_pe.dim() else 0
    return {"R": R, "P": q.shape[-1] - R if q.dim() else 0}


def check_values(
    op: str, query_start_loc: Tensor, key_start_loc: Tensor, max_query_len: int, max_key_len: int,
    T: int, S: int,
) -> None:  # fmt: skip
    queries = check_start_loc(op, "query_start_loc", query_start_loc, T, "q")
    keys = check_start_loc(op, "key_start_loc", key_start_loc, S, "k")
    for name, starts, given in (
        ("max_query_len", queries, max_query_len),
        ("max_key_len", keys, max_key_len),
    ):
        longest = max(map(sub, starts[1:], starts), default=0)
        if longest != given:
            raise ShapeError(f"{op}: {name} must be {longest}, got {given}.")


def problem(
    device: torch.device, dtype: torch.dtype, *, E: int, R: int, V: int,
    batch_invariant: bool = False,
) -> Problem:  # fmt: skip
    """Describe a call to the backends; R is 0 where keys are given whole."""
    return problem_on(
        device, "mha_ragged", dtype=dtype, E=E, R=R, V=V, batch_invariant=batch_invariant
    )


@op(
    problem=problem,
    sizes=sizes,
    check=[check_eight_bits, check_scale],
    check_values=check_values,
    fake=results,
    call=call_with_scales,
    no_grad=["q", "k", "v", "k_pe"],
    optional=["k_pe", "q_scale", "k_scale", "v_scale", "batch_invariant", "out_dtype"],
)
def mha_ragged(
    q: Annotated[Tensor, "[T, H, E] float|e4m3 row"],
    k: Annotated[Tensor, "[S, H, P] float|e4m3 row"],  # P = E, or E - R with k_pe
    v: Annotated[Tensor, "[S, H, V] float|e4m3"],
    query_start_loc: Annotated[Tensor, "[B+1] i32"],
    key_start_loc: Annotated[Tensor, "[B+1] i32"],
    k_pe: Annotated[Tensor | None, "[S, R] float|e4m3 row"] = None,
    q_scale: Annotated[Tensor | None, "[T, H] f32"] = None,
    k_scale: Annotated[Tensor | None, "[B, H] f32"] = None,
    v_scale: Annotated[Tensor | None, "[B, H] f32"] = None,
    *,
    scale: float,
    causal: bool,
    max_query_len: Size,
    max_key_len: Size,
    batch_invariant: bool = False,
    out_dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:  # out [T, H, V], lse [T, H] f32
    """Attend over expanded keys and values; see the module docstring for the contract.

    Args:
        q: queries.
        k: keys, without the columns in k_pe.
        v: values.
        query_start_loc: first query row of each request, then the end.
        key_start_loc: first key row of each request, then the end.
        k_pe: key columns that all heads share.
        q_scale: scale of each query and head; only for e4m3 heads.
        k_scale: scale of keys per request and head; only for e4m3 heads.
        v_scale: scale of values per request and head; only for e4m3 heads.
        scale: factor of scores.
        causal: hide later keys; the last query sees all keys.
        max_query_len: queries of the longest request.
        max_key_len: keys of the longest request.
        batch_invariant: make results independent of the batch, bit for bit.
        out_dtype: dtype of out, required for e4m3 heads.
        backend: "auto", or the name of a backend.

    Returns:
        Outputs [T, H, V], and lse [T, H] in float32 (float64 for float64 queries).

    Raises:
        ShapeError: an argument does not fit the contract. Values are checked on the CPU only.
        ConfigError: the backend is not known.
        UnsupportedError: no backend supports the call, or q, k, v or k_pe requires grad while grad
            mode is on.

    ```python
    import torch
    from openmla.ops import mha_ragged

    q, k, v = torch.randn(3, 2, 8), torch.randn(5, 2, 8), torch.randn(5, 2, 4)
    query_starts = torch.tensor([0, 1, 3], dtype=torch.int32)  # 1 and 2 queries
    key_starts = torch.tensor([0, 3, 5], dtype=torch.int32)  # 3 and 2 keys
    out, lse = mha_ragged(
        q, k, v, query_starts, key_starts,
        scale=8**-0.5, causal=True, max_query_len=2, max_key_len=3,
    )
    print(out.shape, lse.shape)  # [3, 2, 4] and [3, 2]
    ```
    """


def cost(
    query_lens: Sequence[int],
    key_lens: Sequence[int],
    *,
    H: int,
    E: int,
    V: int,
    itemsize: int,
    causal: bool,
) -> Cost:
    """Everything read and written once; 2 * (E + V) per visible query-key pair and head."""
    num_bytes = num_pairs = 0
    for n, S in zip(query_lens, key_lens, strict=True):
        num_bytes += (n + S) * H * (E + V) * itemsize + n * H * 4
        hidden = min(n, S)  # the last min(n, S) queries lose 0, 1, 2, ... keys
        pairs = n * S
        if causal:
            pairs = hidden * S - hidden * (hidden - 1) // 2
        num_pairs += pairs
    return Cost(num_bytes, 2 * num_pairs * H * (E + V))
