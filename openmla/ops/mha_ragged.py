"""mha_ragged: ordinary attention over packed, expanded keys and values, request by request.

    s   = scale * q @ k.T per head             query token i of n sees keys j <= S - n + i
    lse = log(sum(exp(s)))                     (causal; all S keys otherwise)
    out = exp(s - lse) @ v

Request b owns query rows query_start_loc[b] .. query_start_loc[b+1]-1 and key rows
key_start_loc[b] .. key_start_loc[b+1]-1. Causal is aligned at the end: the last query sees every
key. K and V may differ in width. With k_pe [S, R], which all heads share, k has the first E - R
columns of keys and k_pe the others: backends that can read them apart copy nothing. A query that
sees no key, and every query row past query_start_loc[B], gets out 0 and lse -inf. Key rows past
key_start_loc[B] are never read. lse is natural-log, includes scale, and is float32 (float64 for
float64 queries).
max_query_len and max_key_len are the longest request's, exactly. With batch_invariant a request's
bits are its own: only backends run that give it the same alone and beside any others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import sub

import torch
from torch import Tensor

from openmla.backends import Problem, problem_on
from openmla.backends.expanded import joined as joined  # for who calls this op
from openmla.errors import ShapeError
from openmla.ops._register import Cost, Decided, bind, check_scale, decided, refuse_grad, register
from openmla.ops._values import check_start_loc

_STARTS = "query_start_loc:B+1 i32, key_start_loc:B+1 i32"
_SPEC = f"q:T H E f row, k:S H E f row, v:S H V f row, {_STARTS}"
_SPEC_APART = f"q:T H E f row, k:S H P f row, v:S H V f row, {_STARTS}, k_pe:S R f row"


def _check(tensors: tuple[Tensor, ...]) -> dict[str, int]:
    """Dims by letter; R is 0 without k_pe, the sixth."""
    q, k, v, *_ = tensors
    spec, known, alike = _SPEC, {"R": 0}, [("k", k), ("v", v)]
    if len(tensors) > 5:
        k_pe, spec = tensors[5], _SPEC_APART
        alike.append(("k_pe", k_pe))
        known = {}
        if q.dim() == 3 and k_pe.dim() == 2:
            known = {"P": q.shape[2] - k_pe.shape[1]}
    dims = bind("mha_ragged", spec, tensors, known)
    for name, tensor in alike:
        if tensor.dtype != q.dtype:
            raise ShapeError(f"mha_ragged: {name} must be {q.dtype} like q, got {tensor.dtype}.")
    return dims


def _check_values(
    dims: Mapping[str, int], tensors: tuple[Tensor, ...], max_query_len: int, max_key_len: int
) -> None:
    query_start_loc, key_start_loc = tensors
    queries = check_start_loc("mha_ragged", "query_start_loc", query_start_loc, dims["T"], "q")
    keys = check_start_loc("mha_ragged", "key_start_loc", key_start_loc, dims["S"], "k")
    for name, starts, given in (
        ("max_query_len", queries, max_query_len),
        ("max_key_len", keys, max_key_len),
    ):
        longest = max(map(sub, starts[1:], starts), default=0)
        if longest != given:
            raise ShapeError(f"mha_ragged: {name} must be {longest}, got {given}.")


def problem(
    device: torch.device, dtype: torch.dtype, *, E: int, R: int, V: int,
    batch_invariant: bool = False,
) -> Problem:  # fmt: skip
    """A call, as backends are asked about it; R is 0 where keys come whole."""
    return problem_on(
        device, "mha_ragged", dtype=dtype, E=E, R=R, V=V, batch_invariant=batch_invariant
    )


def _decide(
    *tensors: Tensor, scale: float, batch_invariant: bool = False, backend: str, **_: object
) -> Decided:
    q, dims = tensors[0], _check(_given(tensors))
    check_scale("mha_ragged", scale)
    E, R, V = dims["E"], dims["R"], dims["V"]
    asked = problem(q.device, q.dtype, E=E, R=R, V=V, batch_invariant=batch_invariant)
    return decided(dims, asked, backend)


def _given(tensors: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    """Without a k_pe that is None."""
    return tuple(tensor for tensor in tensors if tensor is not None)


def _run(
    known: Decided,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_start_loc: Tensor,
    key_start_loc: Tensor,
    k_pe: Tensor | None = None,
    *,
    scale: float,
    causal: bool,
    max_query_len: int,
    max_key_len: int,
    batch_invariant: bool = False,
) -> tuple[Tensor, Tensor]:
    starts = (query_start_loc, key_start_loc)
    refuse_grad("mha_ragged", _given((q, k, v, k_pe)))
    if q.device.type == "cpu":
        _check_values(known.dims, starts, max_query_len, max_key_len)
    result: tuple[Tensor, Tensor] = known.runner.run(
        q,
        k,
        v,
        *starts,
        k_pe,
        scale=scale,
        causal=causal,
        max_query_len=max_query_len,
        max_key_len=max_key_len,
    )
    return result


def _fake(*tensors: Tensor, **_: object) -> tuple[Tensor, Tensor]:
    q = tensors[0]
    dims = _check(_given(tensors))
    lse_dtype = torch.promote_types(q.dtype, torch.float32)
    return (
        q.new_empty((dims["T"], dims["H"], dims["V"])),
        q.new_empty((dims["T"], dims["H"]), dtype=lse_dtype),
    )


_OP = register(
    "mha_ragged(Tensor q, Tensor k, Tensor v, Tensor query_start_loc, Tensor key_start_loc,"
    " Tensor? k_pe=None, *, float scale, bool causal, SymInt max_query_len, SymInt max_key_len,"
    " bool batch_invariant=False, str backend) -> (Tensor, Tensor)",
    _decide,
    _run,
    _fake,
)


def mha_ragged(
    q: Tensor,  # [T, H, E]
    k: Tensor,  # [S, H, E], or with k_pe [S, H, E - R]
    v: Tensor,  # [S, H, V]
    query_start_loc: Tensor,  # [B+1] i32
    key_start_loc: Tensor,  # [B+1] i32
    k_pe: Tensor | None = None,  # [S, R]
    *,
    scale: float,
    causal: bool,
    max_query_len: int,
    max_key_len: int,
    batch_invariant: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:  # out [T, H, V], lse [T, H] f32
    """Attend over expanded keys and values; see the module's text for the contract."""
    out, lse = _OP(
        q,
        k,
        v,
        query_start_loc,
        key_start_loc,
        k_pe,
        scale=scale,
        causal=causal,
        max_query_len=max_query_len,
        max_key_len=max_key_len,
        batch_invariant=batch_invariant,
        backend=backend,
    )
    return out, lse


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
