"""mha_masked: ordinary attention over packed keys and values, masked by one bit per query and key.

    s   = scale * q @ k.T per head,  where bit j of mask[t] is set (key j of the request)
    lse = log(sum(exp(s)))
    out = exp(s - lse) @ v

Request b owns query rows query_start_loc[b] .. query_start_loc[b+1]-1 and key rows
key_start_loc[b] .. key_start_loc[b+1]-1; bits from its number of keys on are not looked at. Words
are pack_mask's. Nothing else restricts: causality is in the bits. A query that sees no key, and
every query row past query_start_loc[B], gets out 0 and lse -inf. lse is natural-log, includes
scale, and is float32 (float64 for float64 queries). max_query_len and max_key_len bound requests.
Heads may be e4m3 with scales and an out_dtype, as mha_ragged's.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from openmla.backends import Problem, problem_on
from openmla.errors import ShapeError
from openmla.ops._eight_bits import check_eight_bits, heads_spec, out_of
from openmla.ops._register import Cost, Decided, bind, check_scale, decided, refuse_grad, register
from openmla.ops._values import check_start_loc

_REST = "query_start_loc:B+1 i32, key_start_loc:B+1 i32, mask:T words i32 row"


def _check(
    tensors: tuple[Tensor | None, ...], max_key_len: int, out_dtype: torch.dtype | None
) -> dict[str, int]:
    """Dims by letter; scales follow the mask, the sixth."""
    given, scales = tensors[:6], (*tensors[6:], *(None,) * 3)[:3]
    q, k, v, *_ = given
    assert q is not None
    bound = [tensor for tensor in given if tensor is not None]
    dims = bind("mha_masked", f"{heads_spec(q)}, {_REST}", bound)
    heads = (("q", q), ("k", k), ("v", v))
    check_eight_bits("mha_masked", heads, scales, out_dtype, dims["B+1"] - 1)
    if 32 * dims["words"] < max_key_len:
        raise ShapeError(
            f"mha_masked: mask must have a bit for each of max_key_len={max_key_len} keys, "
            f"got {dims['words']} words of 32."
        )
    return dims


def _check_values(
    dims: Mapping[str, int], tensors: tuple[Tensor, ...], max_query_len: int, max_key_len: int
) -> None:
    query_start_loc, key_start_loc = tensors
    check_start_loc("mha_masked", "query_start_loc", query_start_loc, dims["T"], "q")
    check_start_loc("mha_masked", "key_start_loc", key_start_loc, dims["S"], "k")
    for name, start_loc, given in (
        ("max_query_len", query_start_loc, max_query_len),
        ("max_key_len", key_start_loc, max_key_len),
    ):
        longest = int(start_loc.diff().max()) if dims["B+1"] > 1 else 0
        if longest > given:
            raise ShapeError(f"mha_masked: {name} must be at least {longest}, got {given}.")


def problem(
    device: torch.device, dtype: torch.dtype, *, E: int, V: int, batch_invariant: bool = False
) -> Problem:
    """A call, as backends are asked about it."""
    return problem_on(device, "mha_masked", dtype=dtype, E=E, V=V, batch_invariant=batch_invariant)


def _decide(
    *tensors: Tensor, scale: float, max_query_len: int, max_key_len: int, backend: str,
    batch_invariant: bool = False, out_dtype: torch.dtype | None = None,
) -> Decided:  # fmt: skip
    q, dims = tensors[0], _check(tensors, max_key_len, out_dtype)
    check_scale("mha_masked", scale)
    E, V = dims["E"], dims["V"]
    asked = problem(q.device, q.dtype, E=E, V=V, batch_invariant=batch_invariant)
    return decided(dims, asked, backend)


def _run(
    known: Decided,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_start_loc: Tensor,
    key_start_loc: Tensor,
    mask: Tensor,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    *,
    scale: float,
    max_query_len: int,
    max_key_len: int,
    batch_invariant: bool = False,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    refuse_grad("mha_masked", (q, k, v))
    starts = (query_start_loc, key_start_loc)
    if q.device.type == "cpu":
        _check_values(known.dims, starts, max_query_len, max_key_len)
    eight_bits: dict[str, object] = {}  # who takes no such heads need not know of it
    if q_scale is not None:
        eight_bits = {"scales": (q_scale, k_scale, v_scale), "out_dtype": out_dtype}
    result: tuple[Tensor, Tensor] = known.runner.run(
        q,
        k,
        v,
        *starts,
        mask,
        scale=scale,
        max_query_len=max_query_len,
        max_key_len=max_key_len,
        **eight_bits,
    )
    return result


def _fake(
    *tensors: Tensor, max_key_len: int, out_dtype: torch.dtype | None = None, **_: object
) -> tuple[Tensor, Tensor]:
    dims = _check(tensors, max_key_len, out_dtype)
    q = tensors[0]
    dtype = out_of(q, out_dtype)
    lse_dtype = torch.promote_types(dtype, torch.float32)
    return (
        q.new_empty((dims["T"], dims["H"], dims["V"]), dtype=dtype),
        q.new_empty((dims["T"], dims["H"]), dtype=lse_dtype),
    )


_OP = register(
    "mha_masked(Tensor q, Tensor k, Tensor v, Tensor query_start_loc, Tensor key_start_loc,"
    " Tensor mask, Tensor? q_scale=None, Tensor? k_scale=None, Tensor? v_scale=None,"
    " *, float scale, SymInt max_query_len, SymInt max_key_len,"
    " bool batch_invariant=False, ScalarType? out_dtype=None, str backend) -> (Tensor, Tensor)",
    _decide,
    _run,
    _fake,
)


def mha_masked(
    q: Tensor,  # [T, H, E]
    k: Tensor,  # [S, H, E]
    v: Tensor,  # [S, H, V]
    query_start_loc: Tensor,  # [B+1] i32
    key_start_loc: Tensor,  # [B+1] i32
    mask: Tensor,  # [T, words] i32
    q_scale: Tensor | None = None,  # [T, H] f32, of e4m3 heads
    k_scale: Tensor | None = None,  # [B, H] f32
    v_scale: Tensor | None = None,  # [B, H] f32
    *,
    scale: float,
    max_query_len: int,
    max_key_len: int,
    batch_invariant: bool = False,
    out_dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:  # out [T, H, V], lse [T, H] f32
    """Attend where bits are set; see the module's text for the contract."""
    out, lse = _OP(
        q,
        k,
        v,
        query_start_loc,
        key_start_loc,
        mask,
        q_scale,
        k_scale,
        v_scale,
        scale=scale,
        max_query_len=max_query_len,
        max_key_len=max_key_len,
        batch_invariant=batch_invariant,
        out_dtype=out_dtype,
        backend=backend,
    )
    return out, lse


def cost(n: int, S: int, *, H: int, E: int, V: int, itemsize: int) -> Cost:
    """Of one request: everything read once, every pair computed whatever its bit says."""
    num_bytes = H * itemsize * (n + S) * (E + V) + n * S // 8 + 4 * n * H
    return Cost(num_bytes, 2 * n * S * H * (E + V))
