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
Heads may be e4m3 with scales: q is multiplied by q_scale [T, H], k and v by their request's rows of
k_scale [B, H] and v_scale [B, H], all in float32, and `out` is of out_dtype. v may be of that type,
too. Keys come whole then, and v may have its keys contiguous instead of its columns (quantize_heads
makes both).
Backends may round exp(s - max), 256 times it, to e4m3; out is over the sum of what was rounded, lse
has the sum before.
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
from openmla.ops._eight_bits import check_eight_bits, heads_spec, out_of
from openmla.ops._register import Cost, Decided, bind, check_scale, decided, refuse_grad, register
from openmla.ops._values import check_start_loc

_STARTS = "query_start_loc:B+1 i32, key_start_loc:B+1 i32"
_SPEC_APART = f"q:T H E q row, k:S H P q row, v:S H V q row, {_STARTS}, k_pe:S R q row"


def _check(
    tensors: tuple[Tensor | None, ...], out_dtype: torch.dtype | None = None
) -> dict[str, int]:
    """Dims by letter; R is 0 without k_pe, the sixth. Scales follow it."""
    q, k, v, query_start_loc, key_start_loc, k_pe, *scales = (*tensors, *(None,) * 4)[:9]
    assert q is not None and k is not None and v is not None
    assert query_start_loc is not None and key_start_loc is not None
    bound = [q, k, v, query_start_loc, key_start_loc]
    spec, known = f"{heads_spec(q)}, {_STARTS}", {"R": 0}
    if k_pe is not None:
        bound.append(k_pe)
        spec, known = _SPEC_APART, {}
        if q.dim() == 3 and k_pe.dim() == 2:
            known = {"P": q.shape[2] - k_pe.shape[1]}
    dims = bind("mha_ragged", spec, bound, known)
    heads = (("q", q), ("k", k), ("v", v), ("k_pe", k_pe))
    check_eight_bits("mha_ragged", heads, scales, out_dtype, dims["B+1"] - 1)
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
    *tensors: Tensor, scale: float, batch_invariant: bool = False,
    out_dtype: torch.dtype | None = None, backend: str, **_: object,
) -> Decided:  # fmt: skip
    q, dims = tensors[0], _check(tensors, out_dtype)
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
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    *,
    scale: float,
    causal: bool,
    max_query_len: int,
    max_key_len: int,
    batch_invariant: bool = False,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    starts = (query_start_loc, key_start_loc)
    eight_bits: dict[str, object] = {}  # who takes no such heads need not know of it
    if q_scale is not None:
        eight_bits = {"scales": (q_scale, k_scale, v_scale), "out_dtype": out_dtype}
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
        **eight_bits,
    )
    return result


def _fake(
    *tensors: Tensor, out_dtype: torch.dtype | None = None, **_: object
) -> tuple[Tensor, Tensor]:
    q = tensors[0]
    dims = _check(tensors, out_dtype)
    dtype = out_of(q, out_dtype)
    lse_dtype = torch.promote_types(dtype, torch.float32)
    return (
        q.new_empty((dims["T"], dims["H"], dims["V"]), dtype=dtype),
        q.new_empty((dims["T"], dims["H"]), dtype=lse_dtype),
    )


_OP = register(
    "mha_ragged(Tensor q, Tensor k, Tensor v, Tensor query_start_loc, Tensor key_start_loc,"
    " Tensor? k_pe=None, Tensor? q_scale=None, Tensor? k_scale=None, Tensor? v_scale=None,"
    " *, float scale, bool causal, SymInt max_query_len, SymInt max_key_len,"
    " bool batch_invariant=False, ScalarType? out_dtype=None, str backend) -> (Tensor, Tensor)",
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
    q_scale: Tensor | None = None,  # [T, H] f32, of e4m3 heads
    k_scale: Tensor | None = None,  # [B, H] f32
    v_scale: Tensor | None = None,  # [B, H] f32
    *,
    scale: float,
    causal: bool,
    max_query_len: int,
    max_key_len: int,
    batch_invariant: bool = False,
    out_dtype: torch.dtype | None = None,
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
        q_scale,
        k_scale,
        v_scale,
        scale=scale,
        causal=causal,
        max_query_len=max_query_len,
        max_key_len=max_key_len,
        batch_invariant=batch_invariant,
        out_dtype=out_dtype,
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
